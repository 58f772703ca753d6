"""What the gateway is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from voltriton_client.channel import MIB, Target, Tls
from voltriton_client.errors import InvalidArgument


@dataclass(frozen=True)
class Alias:
    """A public model name for a model of the servers, with an adapter (LoRA) where one is named."""

    name: str
    model: str
    lora: str | None = None

    @classmethod
    def parse(cls, text: str) -> Alias:
        """`NAME=MODEL` or `NAME=MODEL:ADAPTER`."""
        name, _, target = text.partition("=")
        model, colon, lora = target.partition(":")
        if not name or not model or (colon and not lora):
            raise InvalidArgument(f"--alias: got {text!r}, allowed: NAME=MODEL or NAME=MODEL:ADAPTER")
        return cls(name, model, lora or None)


@dataclass(frozen=True)
class Settings:
    """Limits hold for each process of the gateway on its own."""

    servers: tuple[str, ...] = ("127.0.0.1:8001",)
    tls: Tls | None = None
    upstream_key: str | None = None
    # Models to show; empty: all that take text, sampling parameters and streaming, and are no ensembles.
    models: tuple[str, ...] = ()
    aliases: tuple[Alias, ...] = ()
    api_keys_file: str | None = None
    requests_per_minute_per_key: int | None = None
    requests_per_minute_per_ip: int | None = None
    max_body_bytes: int = 16 * MIB
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    max_open_requests: int = 256
    health_interval_s: float = 2.0
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for server in self.servers:
            Target(server)

    def alias_of(self) -> Mapping[str, Alias]:
        return {alias.name: alias for alias in self.aliases}
