"""vLLM's outputs as deltas of the wire, and its errors as ours."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from voltriton.errors import InternalError, InvalidArgument, Unavailable
from voltriton.host.vllm_engine import builds
from voltriton.host.vllm_engine.chat_output import ChatOutput
from voltriton.wire import Delta

# Strict JSON has no infinity; vLLM's own server writes this number for a forbidden token.
MINUS_INFINITY = -9999.0


def deltas(output: Any, wants: frozenset[str], chat: ChatOutput | None, first: bool) -> Iterator[Delta]:
    """One delta a sequence of a RequestOutput; `first` says that it is the prompt's first output."""
    for completion in output.outputs:
        delta = Delta(
            key=0,
            index=completion.index,
            text=completion.text,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if "token_ids" in wants:
            delta.token_ids = list(completion.token_ids)
        if completion.logprobs is not None and "logprobs" in wants:
            delta.logprobs = [logprobs_json(position) for position in completion.logprobs]
        if "cumulative_logprob" in wants and completion.cumulative_logprob is not None:
            delta.cumulative_logprob = finite(completion.cumulative_logprob)
        if chat is not None:
            chat.apply(delta, list(completion.token_ids))
        if first or completion.finish_reason is not None:
            delta.extra = _extra(output, wants, first, completion.finish_reason is not None)
            first = False
        yield delta


def _extra(output: Any, wants: frozenset[str], first: bool, ended: bool) -> dict[str, Any] | None:
    extra: dict[str, Any] = {}
    if first:
        extra["num_cached_tokens"] = output.num_cached_tokens or 0
        if output.prompt_logprobs is not None and "prompt_logprobs" in wants:
            extra["prompt_logprobs"] = [
                None if position is None else json.loads(logprobs_json(position))
                for position in output.prompt_logprobs
            ]
    if ended and "timing" in wants and output.metrics is not None:
        stats = output.metrics
        extra["timing"] = {
            "queue_ms": round((stats.scheduled_ts - stats.queued_ts) * 1000, 3),
            "prefill_ms": round((stats.first_token_ts - stats.scheduled_ts) * 1000, 3),
            "first_token_ms": round(stats.first_token_latency * 1000, 3),
        }
    return extra or None


def logprobs_json(position: Any) -> str:
    """One position's candidates: {token id: {logprob, rank, decoded_token}}, the official backend's form."""
    return json.dumps(
        {
            str(token): {
                "logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        },
        ensure_ascii=False,
    )  # fmt: skip


def finite(value: float) -> float:
    return MINUS_INFINITY if not math.isfinite(value) else value


def client_error(error: Any) -> InvalidArgument | Unavailable:
    if isinstance(error, builds.overload_errors()):
        return Unavailable(f"overloaded: {error}")
    return InvalidArgument(f"request: {' '.join(str(error).split())}")


def generate_error(error: BaseException) -> Exception:
    cause = error.__cause__
    if isinstance(cause, ValueError | TypeError):
        return InvalidArgument(f"request: {cause}")
    return InternalError(f"{type(cause).__name__}: {cause}" if cause is not None else str(error))
