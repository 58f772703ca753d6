"""Responses of one request -> chunks, without any network: the same for gRPC, shared streams and HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from voltriton_client.errors import AnswerCut, Internal, from_text
from voltriton_client.tensors import unpack
from voltriton_client.types import Chunk, Timing, Usage


def is_last(message: Any) -> bool:
    """Whether nothing follows this ModelStreamInferResponse for its request."""
    if message.error_message:
        return True
    parameters = message.infer_response.parameters
    return bool(parameters["triton_final_response"].bool_param) if parameters else False


class ResponseReader:
    """Feed it what comes; it gives chunks, raises the server's errors, and knows whether the end has come."""

    def __init__(self, request_id: str = "") -> None:
        self.request_id = request_id
        self.final = False
        self.started = False
        self._sent_at = time.perf_counter()
        self._usage = Usage()
        self._finished: set[int] = set()
        self._text = ""

    def feed(self, message: Any) -> list[Chunk]:
        """Chunks of one ModelStreamInferResponse; the error that it carries is raised."""
        if message.error_message:
            self.final = True
            raise from_text(message.error_message, self.request_id)
        return self.feed_outputs(_outputs(message.infer_response), is_last(message))

    def feed_outputs(self, outputs: Mapping[str, list[Any]], final: bool) -> list[Chunk]:
        """Chunks of one response given as lists by name; one for each sequence that has something new."""
        self.final = self.final or final
        texts = outputs.get("text_output", [])
        self._count(outputs)
        chunks = []
        tokens_at = 0
        for index in range(len(texts)):
            chunk, tokens_at = self._sequence(index, outputs, tokens_at)
            if chunk.has_content or chunk.num_tokens or chunk.finish_reason or len(texts) == 1:
                chunks.append(chunk)
        if final:
            chunks = self._close(chunks)
        self.started = True
        return chunks

    def end(self, why: str = "the connection was closed") -> None:
        """Call when nothing more comes. AnswerCut: that was too early."""
        if not self.final:
            raise AnswerCut(
                f"answer cut after {self._usage.completion_tokens} tokens ({why}): the server or what is "
                "before it went away; ask again, `voltriton status` says whether it is back",
                self.request_id,
                self._text,
            )

    def _sequence(self, index: int, outputs: Mapping[str, list[Any]], tokens_at: int) -> tuple[Chunk, int]:
        count = _at(outputs, "num_output_tokens", index, 0)
        finish = _at(outputs, "finish_reason", index, "None")
        ended = finish not in ("None", "", None)
        news = ended and index not in self._finished
        if ended:
            self._finished.add(index)
        text = outputs["text_output"][index]
        if index == 0:
            self._text += text
        ids = outputs.get("token_ids", [])[tokens_at : tokens_at + count]
        return (
            Chunk(
                text=text,
                index=index,
                token_ids=tuple(ids),
                num_tokens=count,
                finish_reason=finish if news else None,
                stop_reason=_json_at(outputs, "stop_reason", index) if news else None,
                reasoning=_at(outputs, "reasoning_output", index, ""),
                tool_calls=tuple(_json_at(outputs, "tool_calls", index) or ()),
                logprobs=tuple(_json_at(outputs, "logprobs", index) or ()),
                cumulative_logprob=_at(outputs, "cumulative_logprob", index, None),
                prompt_logprobs=_json_at(outputs, "prompt_logprobs", index),
                usage=self._usage,
                timing=_timing(outputs),
                at_s=time.perf_counter() - self._sent_at,
            ),
            tokens_at + count,
        )

    def _count(self, outputs: Mapping[str, list[Any]]) -> None:
        old = self._usage
        cached = outputs.get("num_cached_tokens")
        self._usage = Usage(
            prompt_tokens=sum(outputs.get("num_input_tokens", [])) or old.prompt_tokens,
            completion_tokens=old.completion_tokens + sum(outputs.get("num_output_tokens", [])),
            cached_tokens=sum(cached) if cached is not None else old.cached_tokens,
        )

    def _close(self, chunks: list[Chunk]) -> list[Chunk]:
        """Mark the last chunk; where the flag came alone, there is an empty one to carry it."""
        at_s = time.perf_counter() - self._sent_at
        last = chunks[-1] if chunks else Chunk(usage=self._usage, at_s=at_s)
        return [*chunks[:-1], replace(last, final=True)]


def _outputs(response: Any) -> dict[str, list[Any]]:
    pairs = zip(response.outputs, response.raw_output_contents, strict=False)
    try:
        return {output.name: unpack(output.datatype, raw) for output, raw in pairs}
    except ValueError as error:
        raise Internal(f"the server's answer cannot be read: {error}", response.id) from error


def _at(outputs: Mapping[str, list[Any]], name: str, index: int, default: Any) -> Any:
    values = outputs.get(name, [])
    return values[index] if index < len(values) else default


def _json_at(outputs: Mapping[str, list[Any]], name: str, index: int) -> Any:
    text = _at(outputs, name, index, None)
    if text in (None, ""):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Internal(f"the server's {name} is no JSON: {error}") from error


def _timing(outputs: Mapping[str, list[Any]]) -> Timing | None:
    values = _json_at(outputs, "timing", 0)
    return Timing.from_json(values) if isinstance(values, dict) else None
