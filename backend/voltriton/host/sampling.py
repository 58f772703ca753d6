"""Sampling parameters: names, types and ranges, checked before the engine sees a request.

A table rather than the engine's own checks, because those name neither the field's allowed values nor the
nearest known name, and take the text "false" for true. Names are vLLM's `SamplingParams`; a test compares
the table with the pinned vLLM. Numbers may come as text, as older tools send them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from voltriton.errors import InvalidArgument, nearest

WHERE = "sampling_parameters"


@dataclass(frozen=True)
class Limits:
    """What the engine and the model's settings allow."""

    vocab_size: int
    max_logprobs: int
    max_model_len: int
    max_max_tokens: int | None = None
    max_grammar_chars: int = 65536
    # Most sequences of one request (vLLM's VLLM_MAX_N_SEQUENCES may be lower).
    max_n: int = 128


Check = Callable[[Any, str, Limits], Any]


def refuse(where: str, value: Any, allowed: str) -> InvalidArgument:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return InvalidArgument(f"{where}: got {shown[:200]}, allowed is {allowed}")


def integer(value: Any, where: str) -> int:
    if isinstance(value, bool):
        raise refuse(where, value, "a whole number")
    if isinstance(value, str):
        try:
            return int(value.strip())
        except ValueError:
            raise refuse(where, value, "a whole number") from None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        raise refuse(where, value, "a whole number")
    return value


def number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refuse(where, value, "a number")
    try:
        result = float(value)
    except ValueError:
        raise refuse(where, value, "a number") from None
    except OverflowError:
        raise refuse(where, value, "a finite number") from None
    if not math.isfinite(result):
        raise refuse(where, value, "a finite number")
    return result


def boolean(value: Any, where: str, limits: Limits) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise refuse(where, value, "true or false")


def between(least: float, most: float, open_left: bool = False) -> Check:
    left = f"{least:g} < x" if open_left else f"{least:g} <= x"
    allowed = left if most == math.inf else f"{left} <= {most:g}"

    def check(value: Any, where: str, limits: Limits) -> float:
        result = number(value, where)
        if result > most or result < least or (open_left and result == least):
            raise refuse(where, value, allowed)
        return result

    return check


def whole(
    least: int, most: Callable[[Limits], int | None] = lambda limits: None, extra: tuple[int, ...] = ()
) -> Check:
    """A whole number of least..most, or one of `extra`."""

    def check(value: Any, where: str, limits: Limits) -> int:
        result = integer(value, where)
        top = most(limits)
        if result in extra or (result >= least and (top is None or result <= top)):
            return result
        allowed = f"{least} or more" if top is None else f"{least} to {top}"
        raise refuse(where, value, " or ".join([*map(str, extra), allowed]))

    return check


def text(value: Any, where: str, limits: Limits) -> str:
    if not isinstance(value, str):
        raise refuse(where, value, "a text")
    return value


def texts(value: Any, where: str, limits: Limits) -> list[str]:
    """One text or a list of them, none empty. JSON text of a list is a list, as HTTP fields carry it."""
    if isinstance(value, str):
        value = _list_in_text(value) or [value]
    if not isinstance(value, list):
        raise refuse(where, value, "a text or a list of texts")
    for i, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise refuse(f"{where}[{i}]", item, "a text that is not empty")
    return value


def _list_in_text(value: str) -> list[Any] | None:
    if not value.startswith("["):
        return None
    try:
        parsed = json.loads(value)
    except ValueError:
        return None
    return parsed if isinstance(parsed, list) else None


def token_ids(value: Any, where: str, limits: Limits) -> list[int]:
    if isinstance(value, str):
        value = _list_in_text(value)
    if not isinstance(value, list):
        raise refuse(where, value, "a list of token ids")
    check = whole(0, lambda limits: limits.vocab_size - 1)
    return [check(item, f"{where}[{i}]", limits) for i, item in enumerate(value)]


def logit_bias(value: Any, where: str, limits: Limits) -> dict[int, float]:
    given = obj(value, where, limits)
    token = whole(0, lambda limits: limits.vocab_size - 1)
    bias = between(-100, 100)
    return {
        token(key, f"{where} key", limits): bias(item, f"{where}[{key}]", limits)
        for key, item in given.items()
    }


def obj(value: Any, where: str, limits: Limits) -> dict[str, Any]:
    """An object, or its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidArgument(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise refuse(where, value, "an object")
    return value


GRAMMARS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
GRAMMAR_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def structured_outputs(value: Any, where: str, limits: Limits) -> dict[str, Any]:
    """vLLM's StructuredOutputsParams: one kind of grammar, and options."""
    given = obj(value, where, limits)
    for name in given:
        if name not in GRAMMARS + GRAMMAR_OPTIONS:
            raise InvalidArgument(
                f"{where}.{name}: not known; known are {', '.join(GRAMMARS + GRAMMAR_OPTIONS)}"
                f"{nearest(name, GRAMMARS + GRAMMAR_OPTIONS)}"
            )
    kinds = [name for name in GRAMMARS if given.get(name) is not None]
    if len(kinds) != 1:
        raise InvalidArgument(f"{where}: got {len(kinds)} of {', '.join(GRAMMARS)}; exactly one is allowed")
    size = len(given[kinds[0]] if isinstance(given[kinds[0]], str) else json.dumps(given[kinds[0]]))
    if size > limits.max_grammar_chars:
        raise InvalidArgument(
            f"{where}.{kinds[0]}: {size} characters, at most max_grammar_chars={limits.max_grammar_chars} are allowed"
        )
    if kinds[0] == "choice":
        given["choice"] = texts(given["choice"], f"{where}.choice", limits)
    elif kinds[0] == "json_object":
        given["json_object"] = boolean(given["json_object"], f"{where}.json_object", limits)
    elif kinds[0] != "json" or not isinstance(given["json"], dict):
        text(given[kinds[0]], f"{where}.{kinds[0]}", limits)
    return given


def seed(value: Any, where: str, limits: Limits) -> int:
    result: int = whole(-(2**63), lambda limits: 2**63 - 1)(value, where, limits)
    return result


CHECKS: dict[str, Check] = {
    "n": whole(1, lambda limits: limits.max_n),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "repetition_penalty": between(0, math.inf, open_left=True),
    "temperature": between(0, 2),
    "top_p": between(0, 1, open_left=True),
    "top_k": whole(0, lambda limits: limits.vocab_size, extra=(-1,)),
    "min_p": between(0, 1),
    "seed": seed,
    "stop": texts,
    "stop_token_ids": token_ids,
    "bad_words": texts,
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "max_tokens": whole(1),
    "min_tokens": whole(0),
    "logprobs": whole(0, lambda limits: limits.max_logprobs, extra=(-1,)),
    "prompt_logprobs": whole(0, lambda limits: limits.max_logprobs, extra=(-1,)),
    "logprob_token_ids": token_ids,
    "detokenize": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "structured_outputs": structured_outputs,
    "logit_bias": logit_bias,
    "allowed_token_ids": token_ids,
    "extra_args": obj,
    "repetition_detection": obj,
    "thinking_token_budget": whole(0, extra=(-1,)),
    "stream_interval": whole(1),
    "lora_name": text,
}

# Fields of vLLM's SamplingParams that a request may not set, each with the reason.
NOT_OFFERED = {
    "output_kind": "the service chooses deltas or the whole answer by `stream`",
    "flat_logprobs": "a memory layout inside vLLM",
    "skip_clone": "an optimisation inside vLLM",
    "output_text_buffer_length": "derived from `stop`",
    "skip_reading_prefix_cache": "derived from `prompt_logprobs`",
    "watermarking": "needs a watermark key in the engine's configuration",
    "prompt_logprob_token_ids": "returned outside the outputs of the contract",
    "prompt_logprob_start": "goes with prompt_logprob_token_ids",
    "routed_experts_prompt_start": "returned outside the outputs of the contract",
    "trace_decode_token_ids": "a debugging aid of vLLM",
}


def parse(given: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Checked values by name; what is null is left out. Raises InvalidArgument by name, value and allowed."""
    result: dict[str, Any] = {}
    for name, value in given.items():
        check = CHECKS.get(name)
        if check is None:
            if name in NOT_OFFERED:
                raise InvalidArgument(f"{WHERE}.{name}: not allowed in a request: {NOT_OFFERED[name]}")
            raise InvalidArgument(f"{WHERE}.{name}: unknown parameter{nearest(name, CHECKS)}")
        if value is not None:
            result[name] = check(value, f"{WHERE}.{name}", limits)
    return result


def resolve_max_tokens(
    params: dict[str, Any], prompt_tokens: int, limits: Limits, default: int | None
) -> int:
    """max_tokens of a request whose prompt has so many tokens.

    A limit over what is left of the context is lowered to it (so a large "safety" limit does no harm); a
    prompt that leaves no room is refused with both numbers. `default` None means what is left.
    """
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        raise InvalidArgument(
            f"prompt: {prompt_tokens} tokens, at most {limits.max_model_len - 1} are allowed "
            f"(max_model_len is {limits.max_model_len}, and one token must be left to generate)"
        )
    asked = params.get("max_tokens")
    if asked is not None and limits.max_max_tokens is not None and asked > limits.max_max_tokens:
        raise refuse(f"{WHERE}.max_tokens", asked, f"1 to max_max_tokens={limits.max_max_tokens}")
    wanted = asked or default or limits.max_max_tokens or room
    result = min(wanted, room, limits.max_max_tokens or room)
    least = params.get("min_tokens", 0)
    if least > result:
        raise refuse(
            f"{WHERE}.min_tokens",
            least,
            f"0 to {result} (the request's max_tokens, or the room that is left)",
        )
    return int(result)
