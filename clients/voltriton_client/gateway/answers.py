"""Chunks and results -> OpenAI's answers, whole or as events of a stream."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from voltriton_client.types import Choice, Chunk, Result, Usage

# The finish reasons that OpenAI's clients know; whatever else an engine says is an end like any other.
_FINISHES = frozenset({"stop", "length", "tool_calls", "content_filter"})
# JSON has no minus infinity; OpenAI and vLLM write this for an impossible token.
IMPOSSIBLE = -9999.0


@dataclass(frozen=True)
class Head:
    """What every answer and event of one request begins with."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def event(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        base = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**base, "choices": choices, **more}


def finish_of(reason: str | None) -> str:
    return reason if reason in _FINISHES else "stop"


def usage_of(usages: Iterable[Usage]) -> dict[str, Any]:
    all_ = list(usages)
    prompt, completion = sum(u.prompt_tokens for u in all_), sum(u.completion_tokens for u in all_)
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    cached = [usage.cached_tokens for usage in all_ if usage.cached_tokens is not None]
    if cached:
        body["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return body


# Chat.


def chat_whole(head: Head, result: Result, logprobs: int | None) -> dict[str, Any]:
    choices = [_chat_choice(choice, logprobs) for choice in result.choices]
    return head.event("chat.completion", choices, usage=usage_of([result.usage]))


def _chat_choice(choice: Choice, logprobs: int | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    finish = finish_of(choice.finish_reason)
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_without_index(call) for call in choice.tool_calls]
        message["content"] = choice.text or None
        finish = "tool_calls" if finish == "stop" else finish
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if logprobs is None else chat_logprobs(choice.logprobs, choice.token_ids, logprobs),
        "finish_reason": finish,
        "stop_reason": choice.stop_reason,
    }


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}


async def chat_events(
    head: Head, chunks: AsyncIterator[Chunk], logprobs: int | None, with_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """OpenAI's events: the role first, then deltas, then the reason of the end, then the usage if asked for."""
    more = {"usage": None} if with_usage else {}
    begun: set[int] = set()
    called: set[int] = set()
    usage = Usage()
    async for chunk in chunks:
        usage = chunk.usage
        for delta, finish, probabilities in _chat_deltas(chunk, begun, called, logprobs):
            choice = {
                "index": chunk.index,
                "delta": delta,
                "logprobs": probabilities,
                "finish_reason": finish,
            }
            if finish is not None:
                choice["stop_reason"] = chunk.stop_reason
            yield head.event("chat.completion.chunk", [choice], **more)
    if with_usage:
        yield head.event("chat.completion.chunk", [], usage=usage_of([usage]))


def _chat_deltas(
    chunk: Chunk, begun: set[int], called: set[int], logprobs: int | None
) -> Iterable[tuple[dict[str, Any], str | None, Any]]:
    if chunk.index not in begun:
        begun.add(chunk.index)
        yield {"role": "assistant", "content": ""}, None, None
    delta: dict[str, Any] = {}
    if chunk.reasoning:
        delta["reasoning_content"] = chunk.reasoning
    if chunk.text:
        delta["content"] = chunk.text
    if chunk.tool_calls:
        called.add(chunk.index)
        delta["tool_calls"] = list(chunk.tool_calls)
    probabilities = None
    if logprobs is not None and chunk.logprobs:
        probabilities = chat_logprobs(chunk.logprobs, chunk.token_ids, logprobs)
    if delta or probabilities:
        yield delta or {"content": ""}, None, probabilities
    if chunk.finish_reason is not None:
        finish = finish_of(chunk.finish_reason)
        yield {}, "tool_calls" if finish == "stop" and chunk.index in called else finish, None


def chat_logprobs(steps: Sequence[dict[str, Any]], ids: Sequence[int], top: int) -> dict[str, Any]:
    content = []
    for step, token_id in zip(steps, ids, strict=False):
        best = sorted(step.values(), key=lambda entry: entry.get("rank") or 2**31)[:top]
        chosen = _token(step[str(token_id)]) if str(token_id) in step else _token(next(iter(step.values())))
        content.append({**chosen, "top_logprobs": [_token(entry) for entry in best]})
    return {"content": content, "refusal": None}


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    text = entry.get("decoded_token") or ""
    return {"token": text, "logprob": _finite(entry.get("logprob")), "bytes": list(text.encode("utf-8"))}


def _finite(value: Any) -> float:
    return max(float(value), IMPOSSIBLE) if isinstance(value, int | float) else IMPOSSIBLE


# Completions.


@dataclass(frozen=True)
class Part:
    """A chunk of the prompt with this number."""

    prompt: int
    chunk: Chunk


def completion_whole(
    head: Head, results: Sequence[Result], echo: Sequence[str], logprobs: int | None
) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for number, result in enumerate(results):
        for choice in result.choices:
            prefix = echo[number] if echo else ""
            choices.append(_completion_choice(choice, len(choices), prefix, logprobs))
    return head.event("text_completion", choices, usage=usage_of(result.usage for result in results))


def _completion_choice(choice: Choice, index: int, prefix: str, logprobs: int | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": prefix + choice.text,
        "logprobs": None
        if logprobs is None
        else completion_logprobs(choice.logprobs, choice.token_ids, logprobs, 0),
        "finish_reason": finish_of(choice.finish_reason),
        "stop_reason": choice.stop_reason,
    }


async def completion_events(
    head: Head,
    parts: AsyncIterator[Part],
    n: int,
    echo: Sequence[str],
    logprobs: int | None,
    with_usage: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    more = {"usage": None} if with_usage else {}
    usages: dict[int, Usage] = {}
    offsets: dict[int, int] = {}
    async for part in parts:
        chunk, index = part.chunk, part.prompt * n + part.chunk.index
        usages[part.prompt] = chunk.usage
        text = (echo[part.prompt] if echo and index not in offsets else "") + chunk.text
        at = offsets.get(index, 0)
        offsets[index] = at + len(text)
        if not text and chunk.finish_reason is None and not chunk.logprobs:
            continue
        choice = {
            "index": index,
            "text": text,
            "logprobs": None
            if logprobs is None
            else completion_logprobs(chunk.logprobs, chunk.token_ids, logprobs, at),
            "finish_reason": None if chunk.finish_reason is None else finish_of(chunk.finish_reason),
            "stop_reason": chunk.stop_reason,
        }
        yield head.event("text_completion", [choice], **more)
    if with_usage:
        yield head.event("text_completion", [], usage=usage_of(usages.values()))


def completion_logprobs(
    steps: Sequence[dict[str, Any]], ids: Sequence[int], top: int, at: int
) -> dict[str, Any]:
    body: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in chat_logprobs(steps, ids, top)["content"]:
        body["tokens"].append(entry["token"])
        body["token_logprobs"].append(entry["logprob"])
        body["top_logprobs"].append({other["token"]: other["logprob"] for other in entry["top_logprobs"]})
        body["text_offset"].append(at)
        at += len(entry["token"])
    return body


# Embeddings and models.


def embedding_whole(
    model: str, vectors: Sequence[list[float]], usages: Iterable[Usage], as_base64: bool
) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(usage.prompt_tokens for usage in usages)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "voltriton"}
