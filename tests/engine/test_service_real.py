"""The contract where only a real engine can tell: the demo model in NVFP4 behind a real tritonserver."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from server import Server, wait_for
from wire_client import WireClient, ask, build

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}


def test_answers_in_sensible_english(server: Server) -> None:
    answer = ask(
        server.grpc_url, messages=PARIS, stream=True, sampling_parameters=GREEDY, return_finish_reason=True
    )
    assert "Paris" in answer.text
    assert answer.last["finish_reason"] == ["stop"]
    assert len(answer.responses) > 3


@pytest.mark.parametrize("prompt", ["Once upon a time", "def fibonacci(n):", "Ünïcödé 聪明 👩‍🔬 is"])
def test_streamed_and_whole_text_are_the_same(server: Server, prompt: str) -> None:
    parameters = {**GREEDY, "max_tokens": 40}
    whole = ask(server.grpc_url, prompt, exclude_input_in_output=True, sampling_parameters=parameters)
    streamed = ask(
        server.grpc_url, prompt, stream=True, sampling_parameters=parameters, return_num_output_tokens=True
    )
    assert streamed.text == whole.text
    assert sum(streamed.joined("num_output_tokens")) == 40
    assert "�" not in streamed.text


def test_no_piece_of_a_stop_string_is_sent(server: Server) -> None:
    prompt = "Count: one two three"
    free = ask(server.grpc_url, prompt, stream=True, sampling_parameters={**GREEDY, "max_tokens": 24}).text
    words = free.split()
    assert len(words) > 6
    stop = " ".join(words[3:6])
    parameters = {**GREEDY, "max_tokens": 24, "stop": [stop]}
    streamed = ask(
        server.grpc_url,
        prompt,
        stream=True,
        sampling_parameters=parameters,
        return_finish_reason=True,
        return_stop_reason=True,
    )
    whole = ask(server.grpc_url, prompt, exclude_input_in_output=True, sampling_parameters=parameters)
    assert streamed.text == whole.text == free[: free.index(stop)]
    assert streamed.last["finish_reason"] == ["stop"]
    assert json.loads(streamed.last["stop_reason"][0]) == stop


def test_text_held_back_for_a_long_stop_string_is_no_end(server: Server) -> None:
    parameters = {**GREEDY, "max_tokens": 30, "stop": ["x" * 40]}
    answer = ask(
        server.grpc_url,
        "Once upon a time",
        stream=True,
        sampling_parameters=parameters,
        return_num_output_tokens=True,
    )
    plain = ask(
        server.grpc_url, "Once upon a time", stream=True, sampling_parameters={**GREEDY, "max_tokens": 30}
    )
    assert answer.text == plain.text
    assert all(r["text_output"][0] for r in answer.responses)
    assert (sum(answer.joined("num_output_tokens")), answer.finals) == (30, 1)


def test_chat_stops_at_its_end_of_turn(server: Server) -> None:
    messages = [{"role": "user", "content": "Say OK."}]
    answer = ask(server.grpc_url, messages=messages, return_finish_reason=True, return_num_output_tokens=True,
                 sampling_parameters={**GREEDY, "max_tokens": 400})  # fmt: skip
    assert answer.last["finish_reason"] == ["stop"]
    assert answer.last["num_output_tokens"][0] < 200
    assert "<|im" not in answer.text


def test_chat_without_a_limit_goes_to_its_end(server: Server) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]
    answer = ask(
        server.grpc_url,
        messages=messages,
        return_finish_reason=True,
        return_num_output_tokens=True,
        sampling_parameters=GREEDY,
    )
    assert answer.last["finish_reason"] == ["stop"]
    assert answer.last["num_output_tokens"][0] > 16


def test_rendered_chat_sent_as_a_raw_prompt_is_not_templated_again(server: Server, demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = tokenizer.apply_chat_template(PARIS, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    raw = ask(server.grpc_url, text, return_num_input_tokens=True, sampling_parameters={"max_tokens": 1})
    chat = ask(
        server.grpc_url, messages=PARIS, return_num_input_tokens=True, sampling_parameters={"max_tokens": 1}
    )
    assert raw.last["num_input_tokens"] == chat.last["num_input_tokens"] == [len(ids)]
    assert ask(server.grpc_url, messages=PARIS, render_only=True).last["token_ids"] == ids


def test_text_token_and_chat_prompts_give_the_same_answer(server: Server) -> None:
    parameters = {**GREEDY, "max_tokens": 12}
    ids = ask(server.grpc_url, messages=PARIS, render_only=True).last["token_ids"]
    from_ids = ask(server.grpc_url, input_ids=ids, sampling_parameters=parameters)
    from_chat = ask(server.grpc_url, messages=PARIS, sampling_parameters=parameters)
    assert from_ids.text == from_chat.text
    body = {"messages": json.dumps(PARIS), "stream": False, "sampling_parameters": json.dumps(parameters)}
    assert json.loads(server.post("/v2/models/chat/generate", body)[1])["text_output"] == from_chat.text
    facade = {"messages": json.dumps(PARIS), **parameters}
    assert json.loads(server.post("/v2/models/generate/generate", facade)[1])["text_output"] == from_chat.text


def test_content_as_parts_is_the_same_prompt(server: Server) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": PARIS[0]["content"]}]}]
    plain = ask(server.grpc_url, messages=PARIS, render_only=True).last["token_ids"]
    assert ask(server.grpc_url, messages=parts, render_only=True).last["token_ids"] == plain


def test_several_sequences_are_whole(server: Server) -> None:
    parameters = {"n": 2, "temperature": 1, "seed": 1, "max_tokens": 24}
    streamed = ask(
        server.grpc_url,
        "Once upon a time",
        stream=True,
        sampling_parameters=parameters,
        return_num_output_tokens=True,
    )
    assert sum(streamed.joined("num_output_tokens")) == 48
    assert streamed.texts(0) != streamed.texts(1)
    assert all(len(streamed.texts(i)) > 24 for i in range(2))


def test_greedy_answer_in_company(server: Server) -> None:
    """Temperature 0 takes the likeliest token; company may change sums in their last bits, and so a close decision,
    never a clear one (docs/contract.md, "What greedy promises")."""
    parameters = {**GREEDY, "max_tokens": 24, "logprobs": 2}
    request = {"stream": True, "sampling_parameters": parameters, "return_logprobs": True}
    alone = ask(server.grpc_url, "The three primary colors are", **request)
    others = [build(f"Tell {i} stories about number {i}", id=str(i), **request) for i in range(15)]
    with WireClient(server.grpc_url) as client:
        answers = client.answers(build("The three primary colors are", id="x", **request), *others)
    steps = [
        [step for text in answer.joined("logprobs") for step in json.loads(text)]
        for answer in (alone, answers["x"])
    ]
    assert [len(s) for s in steps] == [24, 24]
    for one, other in zip(*steps, strict=True):
        first, second = sorted((v["logprob"] for v in one.values()), reverse=True)[:2]
        if first - second < 0.1:
            break
        (best,) = (token for token, v in one.items() if v["rank"] == 1)
        assert other[best]["rank"] == 1
        assert abs(other[best]["logprob"] - one[best]["logprob"]) < 0.05


def test_choice_and_json_schema_hold(server: Server) -> None:
    choice = ask(server.grpc_url, "Is water wet? ", exclude_input_in_output=True,
                 sampling_parameters={**GREEDY, "structured_outputs": {"choice": ["yes", "no"]}})  # fmt: skip
    assert choice.text in ("yes", "no")
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    parameters = {**GREEDY, "max_tokens": 60, "structured_outputs": {"json": schema}}
    text = ask(
        server.grpc_url, "A person as JSON: ", exclude_input_in_output=True, sampling_parameters=parameters
    ).text
    assert isinstance(json.loads(text)["age"], int)


@pytest.mark.parametrize(
    ("output", "pattern"),
    [
        ({"regex": "[A-C]-[0-9]{3}"}, "[A-C]-[0-9]{3}"),
        ({"grammar": 'root ::= ("red" | "blue") " " [0-9]'}, "(red|blue) [0-9]"),
    ],
    ids=["regex", "grammar"],
)
@pytest.mark.parametrize("stream", [True, False])
def test_patterns_hold(server: Server, output: dict[str, str], pattern: str, stream: bool) -> None:
    parameters = {**GREEDY, "max_tokens": 24, "structured_outputs": output}
    inputs = {} if stream else {"exclude_input_in_output": True}
    answer = ask(server.grpc_url, "A code: ", stream=stream, sampling_parameters=parameters, **inputs)
    assert re.fullmatch(pattern, answer.text), answer


def test_tokens_wanted_unwanted_and_last(server: Server) -> None:
    def ids(**more: Any) -> list[int]:
        parameters = {**GREEDY, "max_tokens": 12, "ignore_eos": True, **more}
        answer = ask(
            server.grpc_url, "Once upon a time", sampling_parameters=parameters, return_token_ids=True
        )
        assert answer.error is None
        return list(answer.last["token_ids"])

    free = ids()
    assert len(free) == 12
    assert free[0] not in ids(logit_bias={str(free[0]): -100})
    assert set(ids(allowed_token_ids=free[:2])) <= set(free[:2])
    assert ids(stop_token_ids=[free[5]]) == free[: free.index(free[5]) + 1]
    drawn = {"temperature": 1.2, "seed": 7}
    assert ids(**drawn) == ids(**drawn) != ids(**{**drawn, "seed": 8})


def test_forbidden_tokens_leave_strict_json(server: Server) -> None:
    parameters = {**GREEDY, "logprobs": 5, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = ask(server.grpc_url, "Is water wet? ", return_logprobs=True, sampling_parameters=parameters)

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    positions = json.loads(answer.last["logprobs"][0], parse_constant=refuse)
    values = [entry["logprob"] for position in positions for entry in position.values()]
    assert all(math.isfinite(v) for v in values)


def test_prompt_logprobs(server: Server) -> None:
    answer = ask(server.grpc_url, "The sky is blue", return_prompt_logprobs=True, return_num_input_tokens=True,
                 sampling_parameters={**GREEDY, "max_tokens": 1, "prompt_logprobs": 0})  # fmt: skip
    positions = json.loads(answer.last["prompt_logprobs"][0])
    assert len(positions) == answer.last["num_input_tokens"][0]
    assert positions[0] is None
    assert all(len(p) >= 1 for p in positions[1:])


BAD = [
    ({"logit_bias": {"99999999": 5}}, "logit_bias key"),
    ({"top_k": 9999999}, "top_k"),
    ({"structured_outputs": {"regex": "["}}, "regex"),
    ({"structured_outputs": {"json": {"type": "strin"}}}, "strin"),
    ({"stop_token_ids": [10**7]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "named"), BAD, ids=[n for _, n in BAD])
def test_what_would_harm_the_engine_never_reaches_it(
    server: Server, parameters: dict[str, Any], named: str
) -> None:
    answer = ask(server.grpc_url, "x", sampling_parameters=parameters)
    assert (answer.error or "").startswith("INVALID_ARGUMENT: ")
    assert named in (answer.error or "")
    assert ask(server.grpc_url, "x", sampling_parameters={"max_tokens": 1}).error is None


@pytest.mark.parametrize("prompt", [" ", "\n", "\u200b"])
def test_nearly_empty_prompts_are_answered_or_refused(server: Server, prompt: str) -> None:
    answer = ask(server.grpc_url, prompt, sampling_parameters={"max_tokens": 1})
    assert answer.finals == 1
    assert answer.error is None or answer.error.startswith("INVALID_ARGUMENT: ")
    assert ask(server.grpc_url, "x", sampling_parameters={"max_tokens": 1}).error is None


def test_prompt_over_the_limit_is_refused_with_both_numbers(server: Server) -> None:
    answer = ask(server.grpc_url, "word " * 2100)
    assert "at most 2047 are allowed (max_model_len is 2048" in (answer.error or "")


def test_prompt_that_ends_inside_a_character_is_not_repeated(server: Server, demo_model: Path) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(demo_model)("Hi 聪", add_special_tokens=False)["input_ids"]
    whole = ask(
        server.grpc_url, input_ids=ids[:-1], stream=True, sampling_parameters={**GREEDY, "max_tokens": 8}
    )
    assert "Hi" not in whole.responses[0]["text_output"][0]


@pytest.mark.parametrize("stream", [True, False])
def test_cancelled_request_leaves_the_engine_at_once(server: Server, stream: bool) -> None:
    parameters = {**GREEDY, "ignore_eos": True, "max_tokens": 1900}
    with WireClient(server.grpc_url) as client:
        client.send(build("Once", id="1", stream=stream, sampling_parameters=parameters))
        wait_for(lambda: server.metric("vllm:num_requests_running") == 1, 30, "the request to run")
        client.cancel()
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 30, "the request to be aborted")


def test_timing_adds_up(server: Server) -> None:
    began = time.monotonic()
    answer = ask(
        server.grpc_url,
        "Once",
        stream=True,
        return_timing=True,
        sampling_parameters={**GREEDY, "max_tokens": 8},
    )
    took_ms = (time.monotonic() - began) * 1000
    timing = json.loads(answer.last["timing"][0])
    assert 0 <= timing["queue_ms"] + timing["prefill_ms"] <= timing["first_token_ms"] + 1
    assert timing["first_token_ms"] <= timing["total_ms"] <= took_ms


def test_prefix_cache_shows(server: Server) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 60
    counts = [
        ask(
            server.grpc_url, prompt, return_num_cached_tokens=True, sampling_parameters={"max_tokens": 1}
        ).last["num_cached_tokens"][0]
        for _ in range(2)
    ]
    assert counts[0] == 0
    assert counts[1] > 100


def test_metrics_have_the_engines_numbers(server: Server) -> None:
    text = server.get("/metrics", server.metrics)[1]
    for name in (
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total", "vllm:time_per_output_token_seconds_count", "voltriton:requests_total",
        "voltriton:engine_up",
    ):  # fmt: skip
        assert f"{name}{{" in text, name


def test_token_counts_agree_with_the_clients(server: Server) -> None:
    def total() -> float:
        return server.metric("vllm:generation_tokens_total")

    wait_for(lambda: server.metric("voltriton:requests_open") == 0, 30, "nothing to be open")
    time.sleep(1.2)  # one report after the last token
    before = total()
    requests = [
        build(
            "Once",
            id=str(i),
            stream=True,
            return_num_output_tokens=True,
            sampling_parameters={**GREEDY, "ignore_eos": True, "max_tokens": 20},
        )
        for i in range(8)
    ]
    with WireClient(server.grpc_url) as client:
        answers = client.answers(*requests)
    assert [sum(a.joined("num_output_tokens")) for a in answers.values()] == [20] * 8
    wait_for(lambda: total() == before + 160, 30, "the counters to agree")
