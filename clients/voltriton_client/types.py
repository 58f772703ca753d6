"""What a client gets back: chunks while an answer is streamed, a result when it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Token counts of the server; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timing:
    """The server's own times of a request, in milliseconds; None where the model does not tell."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Timing:
        return cls(
            **{name: values[name] for name in cls.__dataclass_fields__ if values.get(name) is not None}
        )


@dataclass(frozen=True)
class Chunk:
    """What is new in one sequence (`index`: prompt by prompt, sequence by sequence).

    A chunk may have no text: reasoning or tool calls alone, or a last one where the server had nothing more
    to say. Only `final` is the end of the request. `usage` is the count so far. `at_s` is the client's time
    since the request was sent.
    """

    text: str = ""
    index: int = 0
    token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    cumulative_logprob: float | None = None
    prompt_logprobs: Any = None
    usage: Usage = Usage()
    timing: Timing | None = None
    at_s: float = 0.0
    final: bool = False

    @property
    def has_content(self) -> bool:
        """Whether there is something to show: the first such chunk is what time-to-first-token means."""
        return bool(self.text or self.reasoning or self.tool_calls)


@dataclass
class Choice:
    """One finished sequence."""

    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    cumulative_logprob: float | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.num_tokens += chunk.num_tokens
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stop_reason = chunk.stop_reason if chunk.stop_reason is not None else self.stop_reason
        if chunk.cumulative_logprob is not None:
            self.cumulative_logprob = chunk.cumulative_logprob
        for delta in chunk.tool_calls:
            self._add_tool_call(delta)

    def _add_tool_call(self, delta: dict[str, Any]) -> None:
        at = delta.get("index", len(self.tool_calls))
        known = next((call for call in self.tool_calls if call.get("index") == at), None)
        if known is None:
            self.tool_calls.append({**delta, "index": at, "function": dict(delta.get("function") or {})})
            return
        for name, value in (delta.get("function") or {}).items():
            known["function"][name] = (known["function"].get(name) or "") + (value or "")


@dataclass
class Result:
    """A whole answer. `text` and the like are those of the first (mostly the only) choice."""

    choices: list[Choice]
    usage: Usage = Usage()
    timing: Timing | None = None
    prompt_logprobs: Any = None
    request_id: str = ""
    first_content_s: float | None = None
    total_s: float = 0.0

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.choices[0].tool_calls

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first ones; None where there is nothing to divide by."""
        if self.first_content_s is None or self.total_s <= self.first_content_s:
            return None
        return max(0, self.usage.completion_tokens - 1) / (self.total_s - self.first_content_s)


class Collector:
    """Chunks in, a result out."""

    def __init__(self, request_id: str = "") -> None:
        self._result = Result([], request_id=request_id)

    def add(self, chunk: Chunk) -> None:
        result = self._result
        while len(result.choices) <= chunk.index:
            result.choices.append(Choice(len(result.choices)))
        result.choices[chunk.index].add(chunk)
        result.usage = chunk.usage
        result.timing = chunk.timing or result.timing
        result.total_s = chunk.at_s
        if chunk.prompt_logprobs is not None:
            result.prompt_logprobs = chunk.prompt_logprobs
        if result.first_content_s is None and chunk.has_content:
            result.first_content_s = chunk.at_s

    def result(self) -> Result:
        result = self._result
        return replace(result, choices=result.choices or [Choice()])


@dataclass(frozen=True)
class ModelInfo:
    """One line of the repository index."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""

    @property
    def ready(self) -> bool:
        return self.state == "READY"
