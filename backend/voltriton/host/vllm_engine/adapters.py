"""LoRA adapters by name: those of `multi_lora.json`, and those that requests load and unload."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from voltriton.errors import InvalidArgument


class Adapters:
    def __init__(self, llm: Any, paths: dict[str, str]) -> None:
        self._llm = llm
        self._requests: dict[str, Any] = {}
        self._in_use: Counter[str] = Counter()
        # Ids are never used again: vLLM knows an adapter by its id alone.
        self._next_id = 1
        for name, path in paths.items():
            self._requests[name] = self._make(name, path)

    @property
    def names(self) -> list[str]:
        return list(self._requests)

    @contextlib.contextmanager
    def use(self, name: str | None) -> Iterator[Any]:
        """The adapter for one request, kept from being unloaded meanwhile; None for the base model."""
        if name is None:
            yield None
            return
        self._in_use[name] += 1
        try:
            yield self._requests[name]
        finally:
            self._in_use[name] -= 1

    async def load(self, name: str, path: str) -> None:
        request = self._make(name, path)
        try:
            loaded = await self._llm.add_lora(request)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidArgument(f"lora_request.load: {name!r} cannot be loaded: {reason}") from None
        if not loaded:
            raise InvalidArgument(f"lora_request.load: {name!r} cannot be loaded: vLLM refused it")
        self._requests[name] = request

    async def unload(self, name: str) -> None:
        if self._in_use[name]:
            raise InvalidArgument(
                f"lora_request.unload: {name!r} is in use by {self._in_use[name]} requests; try again later"
            )
        request = self._requests.pop(name)
        await self._llm.remove_lora(request.lora_int_id)

    def _make(self, name: str, path: str) -> Any:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, self._next_id, path)
        self._next_id += 1
        return request
