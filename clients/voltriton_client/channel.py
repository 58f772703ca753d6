"""Where the server is and how to reach it: the settings that the clients share."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from voltriton_client.errors import InvalidArgument

MIB = 2**20
# gRPC's own 4 MiB is too little for a long prompt's logprobs; Triton itself takes 2 GiB.
MAX_MESSAGE_BYTES = 256 * MIB
_KEY = re.compile(r"^[\x21-\x7e]+$")
_ADDRESS = re.compile(r"^(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(\d{1,5})$")


@dataclass(frozen=True)
class Tls:
    """TLS files in PEM form: a CA other than the system's, and a certificate of the client with its key."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def credentials(self) -> Any:
        """gRPC credentials. InvalidArgument as for `context`: gRPC itself would only fail to connect."""
        self.context()
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))

    def context(self) -> ssl.SSLContext:
        """For HTTP. InvalidArgument: a file cannot be read or holds something else, or cert and key do not belong
        together."""
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument("TLS: the client's certificate and its key go together; one is missing")
        for path in (self.ca, self.cert, self.key):
            _read(path)
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError:
            raise InvalidArgument(f"TLS file {self.ca!r}: no certificate in PEM form") from None
        if self.cert:
            try:
                context.load_cert_chain(self.cert, self.key, password="")
            except (ssl.SSLError, OSError) as error:
                raise InvalidArgument(
                    f"TLS files {self.cert!r} and {self.key!r}: no certificate in PEM form with its key, without a "
                    f"password ({error})"
                ) from None
        return context


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"TLS file {path!r}: {error.strerror}") from error


@dataclass(frozen=True)
class Target:
    """A server's gRPC address, with everything that opening a channel needs."""

    address: str
    tls: Tls | None = None
    api_key: str | None = None
    metadata: Sequence[tuple[str, str]] = ()
    connect_timeout_s: float = 5.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    # Whether to try again, within connect_timeout_s, where nothing could be sent.
    retries: bool = True

    def __post_init__(self) -> None:
        match = _ADDRESS.match(self.address)
        if not match or not 0 < int(match.group(1)) < 65536:
            raise InvalidArgument(f"address: got {self.address!r}, allowed: HOST:PORT, as in 127.0.0.1:8001")
        if self.api_key and not _KEY.match(self.api_key):
            raise InvalidArgument("api_key: allowed: one word of ASCII letters, digits and signs")

    @property
    def call_metadata(self) -> list[tuple[str, str]]:
        key = [("authorization", f"Bearer {self.api_key}")] if self.api_key else []
        return [*key, *self.metadata]

    def options(self) -> list[tuple[str, Any]]:
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            # Come back soon after a restart of the server, and do not share another client's back-off.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.use_local_subchannel_pool", 1),
            # `http_proxy` in the environment is for the internet; over HTTP we do not follow it either.
            ("grpc.enable_http_proxy", 0),
        ]

    def open(self) -> Any:
        if self.tls is None:
            return grpc.insecure_channel(self.address, self.options())
        return grpc.secure_channel(self.address, self.tls.credentials(), self.options())

    def open_aio(self) -> Any:
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, self.options())
        return grpc.aio.secure_channel(self.address, self.tls.credentials(), self.options())
