from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from voltriton.errors import InvalidArgument
from voltriton.host.sampling import CHECKS, Limits, parse, resolve_max_tokens

LIMITS = Limits(vocab_size=1000, max_logprobs=20, max_model_len=100, max_max_tokens=64, max_grammar_chars=20)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": "0"}, {"temperature": 0.0}),
        ({"max_tokens": "12"}, {"max_tokens": 12}),
        ({"top_k": 5.0}, {"top_k": 5}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"ignore_eos": "False"}, {"ignore_eos": False}),
        ({"ignore_eos": "true"}, {"ignore_eos": True}),
        ({"ignore_eos": 1}, {"ignore_eos": True}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": '["x", "y"]'}, {"stop": ["x", "y"]}),
        ({"stop": "[x"}, {"stop": ["[x"]}),
        ({"logit_bias": {"7": "1.5"}}, {"logit_bias": {7: 1.5}}),
        ({"structured_outputs": '{"choice": ["a", "b"]}'}, {"structured_outputs": {"choice": ["a", "b"]}}),
        (
            {"structured_outputs": {"json": {"type": "string"}}},
            {"structured_outputs": {"json": {"type": "string"}}},
        ),
        ({"seed": None, "n": 2}, {"n": 2}),
    ],
)
def test_values_are_taken_as_meant(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parse(given, LIMITS) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"structured_outputs": {"regex": "a" * 21}}, "21 characters, at most max_grammar_chars=20"),
        ({"structured_outputs": "x"}, "structured_outputs: not JSON"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar: got 5, allowed is a text"),
        ({"temperature": "nan"}, "allowed is a finite number"),
        ({"temperature": float("inf")}, "allowed is a finite number"),
        ({"temperature": "warm"}, 'got "warm", allowed is a number'),
        ({"seed": 2**63}, "sampling_parameters.seed"),
        ({"allowed_token_ids": "7"}, "allowed is a list of token ids"),
        ({"logprobs": 21}, "allowed is -1 or 0 to 20"),
        ({"ignore_eos": 2}, "allowed is true or false"),
        ({"bad_words": [1]}, "bad_words[0]: got 1"),
        ({"repetition_penalty": 0}, "allowed is 0 < x"),
        ({"guided_json": {}}, "guided_json: unknown parameter"),
    ],
)
def test_what_is_not_allowed_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse(given, LIMITS)
    assert message in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*CHECKS, "nonsense"]), JSON, max_size=4))
def test_anything_is_either_taken_or_refused_by_its_name(given_values: dict[str, Any]) -> None:
    try:
        parse(given_values, LIMITS)
    except InvalidArgument as refused:
        assert any(f"sampling_parameters.{name}" in str(refused) for name in given_values)


@pytest.mark.parametrize(
    ("params", "prompt", "default", "expected"),
    [
        ({}, 10, 16, 16),
        ({}, 90, 16, 10),
        ({}, 10, None, 64),
        ({"max_tokens": 60}, 90, 16, 10),
        ({"max_tokens": 5}, 10, None, 5),
    ],
)
def test_max_tokens_is_bounded_by_what_is_left(
    params: dict[str, Any], prompt: int, default: int | None, expected: int
) -> None:
    assert resolve_max_tokens(params, prompt, LIMITS, default) == expected


@pytest.mark.parametrize(
    ("params", "prompt", "message"),
    [
        ({}, 100, "prompt: 100 tokens, at most 99 are allowed (max_model_len is 100"),
        ({"max_tokens": 65}, 10, "max_tokens: got 65, allowed is 1 to max_max_tokens=64"),
        ({"min_tokens": 20, "max_tokens": 10}, 10, "min_tokens: got 20, allowed is 0 to 10"),
    ],
)
def test_limits_are_named_with_their_numbers(params: dict[str, Any], prompt: int, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        resolve_max_tokens(params, prompt, LIMITS, 16)
    assert message in str(refused.value)
