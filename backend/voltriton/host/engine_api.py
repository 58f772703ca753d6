"""What the service asks of an engine. `voltriton.host.engine` is vLLM; tests have a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from voltriton.settings import ModelSettings
from voltriton.wire import Delta, Generation


@dataclass(frozen=True)
class EngineInfo:
    """Fixed facts of a loaded model."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    max_logprobs: int
    # "generate", "embed"
    tasks: tuple[str, ...] = ("generate",)
    # Text of control tokens, which user text in a chat must not contain.
    control_tokens: frozenset[str] = frozenset()
    # Variables that the chat template reads; None: not known, anything goes.
    template_variables: frozenset[str] | None = None
    lora_enabled: bool = False
    # For logs and `voltriton status`: quantisation, kernel, dtype, versions.
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class Prompt:
    """A rendered prompt: its token ids, and what the engine wants to be given back."""

    token_ids: list[int]
    engine_input: Any


class Engine(Protocol):
    info: EngineInfo

    @classmethod
    async def start(cls, model: ModelSettings) -> Engine:
        """Loads the model. Raises VoltritonError (cause in one line) or whatever the engine raises."""

    async def render(self, generation: Generation) -> list[Prompt]:
        """Prompts as tokens; InvalidArgument where the prompt is at fault."""

    def generate(
        self, generation: Generation, prompt: Prompt, params: dict[str, Any], request_id: str
    ) -> AsyncIterator[Delta]:
        """Deltas of the prompt's sequences (`index` counts the prompt's own `n`); closing it aborts."""

    async def embed(self, generation: Generation, request_id: str) -> Delta:
        """One delta with the vector as JSON text."""

    def samples(self) -> Iterable[tuple[str, dict[str, str], float]]:
        """Prometheus samples, all of them: name, labels, value."""

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it is not."""

    @property
    def last_step_at(self) -> float:
        """time.monotonic() of the last sign of life of the engine's step loop."""

    @property
    def loras(self) -> list[str]:
        """Names of the adapters that a request may choose."""

    async def load_lora(self, name: str, path: str) -> None:
        """InvalidArgument where the folder holds no adapter that fits."""

    async def unload_lora(self, name: str) -> None:
        """The name is one of `loras`."""

    async def stop(self, timeout_s: float) -> None:
        """Ends the engine's processes."""
