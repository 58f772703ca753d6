"""The request contract (docs/contract.md) through a real tritonserver, with a scripted engine behind the service."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from server import Server, wait_for
from wire_client import Answer, WireClient, ask, build


def script(**values: Any) -> str:
    return json.dumps(values)


@pytest.fixture
def client(server: Server) -> Any:
    with WireClient(server.grpc_url) as connected:
        yield connected


# What the official backend promises.


@pytest.mark.parametrize(
    ("exclude", "expected"), [(None, "a b ca b c"), (False, "a b ca b c"), (True, "a b c")]
)
def test_prompt_is_in_front_unless_excluded(server: Server, exclude: bool | None, expected: str) -> None:
    inputs = {} if exclude is None else {"exclude_input_in_output": exclude}
    answer = ask(server.grpc_url, "a b c", **inputs)
    assert (answer.text, len(answer.responses), answer.finals) == (expected, 1, 1)


def test_streams_one_delta_a_token_without_the_prompt(server: Server) -> None:
    answer = ask(server.grpc_url, script(tokens=["one ", "two ", "three"], delay_ms=60), stream=True)
    assert [r["text_output"] for r in answer.responses] == [["one "], ["two "], ["three"]]
    assert answer.finals == 1


def test_streaming_refuses_to_repeat_the_prompt_with_the_official_sentence(server: Server) -> None:
    answer = ask(server.grpc_url, "a", stream=True, exclude_input_in_output=False)
    assert answer.error is not None
    assert (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
        in answer.error
    )


def test_optional_outputs_come_only_when_asked_for(server: Server) -> None:
    plain = ask(server.grpc_url, "a b")
    assert {name for name in plain.last if "." not in name} == {"text_output"}
    names = [
        "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens", "token_ids",
        "stop_reason", "num_cached_tokens", "timing",
    ]  # fmt: skip
    full = ask(
        server.grpc_url,
        "a b",
        **{f"return_{name}": True for name in names},
        sampling_parameters={"logprobs": 1},
    )
    assert {name for name in full.last if "." not in name} == {"text_output", *names}
    assert full.last["finish_reason"] == ["stop"]
    assert full.last["cumulative_logprob"] == [-1.0]
    assert full.last["num_input_tokens"] == [2]
    assert full.last["num_input_tokens.shape"] == [1]
    assert full.last["num_output_tokens"] == [2]
    assert full.last["token_ids"] == [100, 101]
    assert full.last["stop_reason"] == ["null"]
    assert full.last["num_cached_tokens"] == [3]
    assert [list(p) for p in json.loads(full.last["logprobs"][0])] == [["100"], ["100"]]
    assert set(json.loads(full.last["timing"][0])) == {"queue_ms", "prefill_ms", "first_token_ms", "total_ms"}


def test_logprobs_are_null_unless_the_sampling_parameters_ask(server: Server) -> None:
    assert ask(server.grpc_url, "a", return_logprobs=True).last["logprobs"] == ["null"]


def test_finish_reason_is_the_word_none_until_the_end(server: Server) -> None:
    answer = ask(
        server.grpc_url, script(tokens=["a", "b"], delay_ms=60), stream=True, return_finish_reason=True
    )
    assert answer.joined("finish_reason") == ["None", "stop"]


def test_sampling_parameters_as_tensor_and_as_request_parameters(server: Server) -> None:
    for inputs in ({"sampling_parameters": {"max_tokens": 2}}, {"parameters": {"max_tokens": 2}}):
        answer = ask(
            server.grpc_url, "a b c d", exclude_input_in_output=True, return_finish_reason=True, **inputs
        )
        assert (answer.text, answer.last["finish_reason"]) == ("a b ", ["length"])


def test_numbers_may_come_as_text(server: Server) -> None:
    answer = ask(server.grpc_url, "a b c d", sampling_parameters={"max_tokens": "2", "temperature": "0"})
    assert answer.error is None


def test_tritons_own_request_parameters_are_no_sampling_parameters(server: Server) -> None:
    assert ask(server.grpc_url, "a", parameters={"priority": 3, "max_tokens": 1}).error is None


def test_default_limit_is_sixteen_tokens_and_shows_as_length(server: Server) -> None:
    answer = ask(
        server.grpc_url, script(repeat=["x ", 40]), return_finish_reason=True, return_num_output_tokens=True
    )
    assert (answer.last["num_output_tokens"], answer.last["finish_reason"]) == ([16], ["length"])


def test_several_sequences_are_elements_of_every_output(server: Server) -> None:
    prompt = script(tokens=["{i}a", "{i}b"])
    whole = ask(
        server.grpc_url,
        prompt,
        exclude_input_in_output=True,
        return_finish_reason=True,
        sampling_parameters={"n": 3},
    )
    assert whole.last["text_output"] == ["0a0b", "1a1b", "2a2b"]
    assert whole.last["finish_reason"] == ["stop"] * 3
    streamed = ask(
        server.grpc_url, prompt, stream=True, return_num_output_tokens=True, sampling_parameters={"n": 3}
    )
    assert [streamed.texts(i) for i in range(3)] == ["0a0b", "1a1b", "2a2b"]
    assert sum(streamed.joined("num_output_tokens")) == 6
    assert streamed.finals == 1


def test_embedding_request(server: Server) -> None:
    answer = ask(server.grpc_url, embedding_request={"input": "a b"}, return_num_input_tokens=True)
    assert json.loads(answer.text) == [0.5, -0.25]
    assert answer.last["num_input_tokens"] == [2]


@pytest.mark.parametrize("way", ["tensor", "parameter", "generate"])
def test_unknown_adapter_is_refused_with_the_known_ones(server: Server, way: str) -> None:
    if way == "generate":
        code, text = server.post("/v2/models/vllm/generate", {"text_input": "a", "lora_name": "none"})
        assert code == 400
    else:
        inputs = (
            {"sampling_parameters": {"lora_name": "none"}}
            if way == "tensor"
            else {"parameters": {"lora_name": "none"}}
        )
        text = ask(server.grpc_url, "a", **inputs).error or ""
    assert "LoRA none is not supported, we currently support ['a', 'b']" in text


def test_known_adapter_is_taken(server: Server) -> None:
    assert ask(server.grpc_url, "a", sampling_parameters={"lora_name": "b"}).error is None


def test_adapters_are_loaded_and_unloaded_by_name(server: Server) -> None:
    def request(value: dict[str, Any]) -> Answer:
        return ask(server.grpc_url, lora_request=value)

    assert json.loads(request({}).text) == ["a", "b"]
    assert "got 'none', there are c" in (request({"load": "none"}).error or "")
    assert "got '../repository', there are c" in (request({"load": "../repository"}).error or "")
    assert json.loads(request({"load": "c"}).text) == ["a", "b", "c"]
    assert "is loaded already" in (request({"load": "c"}).error or "")
    assert ask(server.grpc_url, "x", sampling_parameters={"lora_name": "c"}).error is None
    assert json.loads(request({"unload": "c"}).text) == ["a", "b"]
    assert "LoRA c is not supported" in (request({"unload": "c"}).error or "")
    assert "got lod" in (request({"lod": "c"}).error or "")


# Ours.


def test_token_prompt(server: Server) -> None:
    answer = ask(server.grpc_url, input_ids=[7, 8, 9], return_num_input_tokens=True)
    assert (answer.text, answer.last["num_input_tokens"]) == ("<7> <8> <9>", [3])


def test_several_prompts(server: Server) -> None:
    answer = ask(
        server.grpc_url, prompts=["a b", "c"], return_num_input_tokens=True, return_finish_reason=True
    )
    assert answer.last["text_output"] == ["a ba b", "cc"]
    assert answer.last["num_input_tokens"] == [2, 1]
    streamed = ask(
        server.grpc_url,
        prompts=["a b", "c"],
        stream=True,
        return_token_ids=True,
        return_num_output_tokens=True,
    )
    assert [streamed.texts(i) for i in range(2)] == ["a b", "c"]
    assert (streamed.finals, sum(streamed.joined("num_output_tokens"))) == (1, 3)


def test_chat_messages(server: Server) -> None:
    parts = [{"type": "text", "text": "x "}, {"type": "text", "text": "y"}]
    for content in ("x y", parts):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}]
        assert ask(server.grpc_url, messages=messages).text == "x y"
    assert (
        ask(
            server.grpc_url,
            messages={"messages": messages, "chat_template_kwargs": {"enable_thinking": False}},
        ).error
        is None
    )


def test_render_only_gives_the_prompts_token_ids(server: Server) -> None:
    answer = ask(server.grpc_url, prompts=["a b", "c d e"], render_only=True)
    assert answer.last["token_ids"] == [1, 2, 1, 2, 3]
    assert answer.last["num_output_tokens"] == [2, 3]


def test_deadline_ends_the_work(server: Server) -> None:
    prompt = script(repeat=["x ", 1000], delay_ms=20)
    answer = ask(
        server.grpc_url, prompt, stream=True, timeout_ms=300, sampling_parameters={"max_tokens": 1000}
    )
    assert (answer.error or "").startswith("DEADLINE_EXCEEDED: ")
    assert 0 < len(answer.responses) < 100
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 10, "the engine to be idle")


def test_request_id_of_the_client_reaches_its_answer(client: WireClient) -> None:
    assert set(client.answers(build("a", id="one"), build("b", id="two"))) == {"one", "two"}


# Refusals: INVALID_ARG, by name, with value and allowed; nobody else is disturbed.

BAD = [
    ({"sampling_parameters": b'{"temperature": 0.5'}, "sampling_parameters: not JSON"),
    ({"sampling_parameters": b""}, "sampling_parameters: not JSON"),
    ({"sampling_parameters": b"[]"}, "sampling_parameters: got list"),
    ({"sampling_parameters": {"temprature": 0}}, "sampling_parameters.temprature: unknown parameter; did you mean 'temperature'?"),
    ({"sampling_parameters": {"ignore_eos": "maybe"}}, "sampling_parameters.ignore_eos: got \"maybe\", allowed is true or false"),
    ({"sampling_parameters": {"top_k": 0.01}}, "sampling_parameters.top_k: got 0.01"),
    ({"sampling_parameters": {"top_k": 9999999}}, "sampling_parameters.top_k: got 9999999, allowed is -1 or 0 to 1000"),
    ({"sampling_parameters": {"top_p": 1.7}}, "sampling_parameters.top_p: got 1.7, allowed is 0 < x <= 1"),
    ({"sampling_parameters": {"temperature": True}}, "sampling_parameters.temperature: got true, allowed is a number"),
    ({"sampling_parameters": {"logit_bias": {"99999999": 5}}}, "sampling_parameters.logit_bias key: got \"99999999\""),
    ({"sampling_parameters": {"stop_token_ids": [-1]}}, "sampling_parameters.stop_token_ids[0]: got -1"),
    ({"sampling_parameters": {"stop": [""]}}, "sampling_parameters.stop[0]: got \"\""),
    ({"sampling_parameters": {"max_tokens": 0}}, "sampling_parameters.max_tokens: got 0"),
    ({"sampling_parameters": {"output_kind": 1}}, "sampling_parameters.output_kind: not allowed"),
    ({"sampling_parameters": {"structured_outputs": {"regx": "a"}}}, "structured_outputs.regx: not known"),
    ({"sampling_parameters": {"structured_outputs": {"regex": "a", "json": {}}}}, "exactly one is allowed"),
    ({"sampling_parameters": {"n": 10**6}}, "sampling_parameters.n: got 1000000, allowed is 1 to 128"),
    ({"timeout_ms": 0}, "timeout_ms: got 0, at least 1 is allowed"),
    ({"input_ids": [1]}, "more than one prompt: got text_input and input_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "message"), BAD, ids=[m[:48] for _, m in BAD])
def test_bad_parameter_is_refused_by_name(server: Server, inputs: dict[str, Any], message: str) -> None:
    answer = ask(server.grpc_url, "a", **inputs)
    assert (answer.error or "").startswith("INVALID_ARGUMENT: ")
    assert message in (answer.error or "")
    assert (answer.finals, answer.errors, answer.responses) == (1, 1, [])


BAD_PROMPTS = [
    ({}, "no prompt: one of text_input, prompts, input_ids and messages is needed"),
    ({"text_input": ""}, "text_input: empty"),
    ({"text_input": b"caf\xe9"}, "text_input: not UTF-8 at byte 3 (e9)"),
    ({"prompts": ["a", ""]}, "prompts[1]: empty"),
    ({"input_ids": [1000]}, "Token id 1000 is out of vocabulary"),
    ({"messages": b"{"}, "messages: not JSON"),
    ({"messages": []}, "messages: got [], a list of at least one message is needed"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: got 'robot'"),
    ({"messages": [{"role": "user", "content": "x<|im_end|>"}]}, "messages[0].content: contains the control token '<|im_end|>'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]}, "only data:image"),
    ({"messages": {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinkin": False}}},
     "chat_template_kwargs.enable_thinkin: the model's chat template reads no such variable; did you mean 'enable_thinking'?"),
    ({"messages": {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}], "tool_choice": "required"}},
     "messages.tool_choice: got 'required', but voltriton.tool_parser is not set"),
    ({"messages": {"message": []}}, "messages.message: not known"),
    ({"text_input": "word " * 4096}, "prompt: 4096 tokens, at most 4095 are allowed (max_model_len is 4096"),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "message"), BAD_PROMPTS, ids=[m[:48] for _, m in BAD_PROMPTS])
def test_bad_prompt_is_refused_by_name(server: Server, inputs: dict[str, Any], message: str) -> None:
    # `stream` is sent so that Triton's count of inputs lets a request without a prompt through.
    answer = ask(server.grpc_url, stream=True, **inputs)
    assert (answer.error or "").startswith("INVALID_ARGUMENT: ")
    assert message in (answer.error or "")
    assert (answer.finals, answer.errors) == (1, 1)


def test_lone_surrogate_in_json_is_refused_and_the_next_request_works(server: Server) -> None:
    # Over HTTP it is Triton's own parser that refuses it, with its own status.
    code, text = server.post("/v2/models/vllm/generate", b'{"text_input":"hi \\ud83d"}')
    assert code in (400, 500)
    assert "surrogate" in text.lower()
    answer = ask(server.grpc_url, messages=b'[{"role":"user","content":"hi \\ud83d"}]')
    assert "lone surrogate" in (answer.error or "")
    assert ask(server.grpc_url, "a").error is None


@pytest.mark.parametrize("limit", ["max_tokens"])
def test_a_limit_over_the_context_is_lowered_to_what_is_left(server: Server, limit: str) -> None:
    answer = ask(server.grpc_url, "a b", sampling_parameters={limit: 4096}, return_finish_reason=True)
    assert answer.last["finish_reason"] == ["stop"]


def test_bad_requests_on_a_shared_stream_leave_the_good_ones_alone(client: WireClient) -> None:
    good = script(tokens=["g", "o", "o", "d"], delay_ms=20)
    answers = client.answers(
        build(good, id="1", stream=True),
        build("x", id="2", stream=True, sampling_parameters={"temprature": 1}),
        build(good, id="3", stream=True),
        build(script(tokens=["a", "b"], fail_at=1), id="4", stream=True),
        build(good, id="5"),
    )
    assert [answers[i].error is None for i in "12345"] == [True, False, True, False, True]
    assert answers["1"].text == answers["3"].text == "good"
    assert (answers["4"].error or "").startswith("INTERNAL: RuntimeError: scripted fault")
    assert answers["4"].text == "a"
    assert all(a.finals == 1 for a in answers.values())


def test_error_code_in_the_status_when_asked_for(server: Server) -> None:
    import grpc

    with WireClient(server.grpc_url, metadata=(("triton_grpc_error", "true"),)) as client:
        client.send(build("a", id="1", sampling_parameters={"top_p": 7}))
        with pytest.raises(grpc.RpcError) as failed:
            next(client.messages())
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# Text.


def test_a_character_of_several_tokens_comes_whole(server: Server) -> None:
    text = "造句：聪明 👩‍🔬 é"
    tokens = [f"{b:02x}" for b in text.encode()]
    answer = ask(
        server.grpc_url,
        script(hex=tokens),
        stream=True,
        return_num_output_tokens=True,
        sampling_parameters={"max_tokens": 99},
    )
    assert answer.text == text
    assert "�" not in answer.text
    assert all(r["text_output"][0] for r in answer.responses)
    assert sum(answer.joined("num_output_tokens")) == len(tokens)
    whole = ask(
        server.grpc_url,
        script(hex=tokens),
        exclude_input_in_output=True,
        sampling_parameters={"max_tokens": 99},
    )
    assert whole.text == text


def test_tokens_without_text_wait_and_are_counted(server: Server) -> None:
    tokens = ["", "", "a", "", "b"]
    answer = ask(
        server.grpc_url, script(tokens=tokens, delay_ms=30), stream=True, return_num_output_tokens=True
    )
    assert [r["text_output"][0] for r in answer.responses] == ["a", "b"]
    assert answer.joined("num_output_tokens") == [3, 2]


def test_an_end_without_text_carries_the_final_mark(server: Server) -> None:
    answer = ask(
        server.grpc_url, script(tokens=["a", ""], delay_ms=30), stream=True, return_num_output_tokens=True
    )
    assert [r["text_output"][0] for r in answer.responses] == ["a", ""]
    assert (answer.joined("num_output_tokens"), answer.finals) == ([1, 1], 1)


@pytest.mark.parametrize("streams", [1, 24])
def test_coalescing_loses_and_doubles_nothing(client: WireClient, streams: int) -> None:
    tokens = [f"{i}," for i in range(300)]
    requests = [
        build(
            script(tokens=tokens),
            id=str(i),
            stream=True,
            return_num_output_tokens=True,
            sampling_parameters={"max_tokens": 400},
        )
        for i in range(streams)
    ]
    answers = client.answers(*requests)
    for answer in answers.values():
        assert answer.text == "".join(tokens)
        assert sum(answer.joined("num_output_tokens")) == 300
        assert answer.finals == 1


# The end of a stream is visible, exactly once.


@pytest.mark.parametrize(
    "inputs",
    [
        {"text_input": "a b"},
        {"text_input": "a", "stream": True},
        {"stream": True},
        {"text_input": "a", "timeout_ms": 0},
    ],
    ids=["normal", "streamed", "refused", "refused by value"],
)
def test_exactly_one_final_mark(server: Server, inputs: dict[str, Any]) -> None:
    assert ask(server.grpc_url, **inputs).finals == 1


def test_cancelled_request_ends_in_the_engine(server: Server) -> None:
    with WireClient(server.grpc_url) as client:
        client.send(
            build(
                script(repeat=["x ", 4000], delay_ms=10),
                id="1",
                stream=True,
                sampling_parameters={"max_tokens": 4000},
            )
        )
        next(client.messages())
        wait_for(lambda: server.metric("vllm:num_requests_running") == 1, 10, "the request to run")
        client.cancel()
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 10, "the request to be aborted")
    wait_for(lambda: server.metric("voltriton:requests_total", outcome="cancelled") >= 1, 10, "the outcome")


@pytest.mark.parametrize("stream", [True, False])
def test_request_without_a_token_yet_can_be_cancelled(server: Server, stream: bool) -> None:
    with WireClient(server.grpc_url) as client:
        client.send(build(script(tokens=["x"], first_ms=60000), id="1", stream=stream))
        wait_for(lambda: server.metric("vllm:num_requests_running") == 1, 10, "the request to run")
        client.cancel()
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 10, "the request to be aborted")


# Cancelled by a request, on whatever connection it comes.


def endless(request_id: str, **inputs: Any) -> Any:
    return build(
        script(repeat=["x ", 4000], delay_ms=10),
        id=request_id,
        **{"stream": True, "sampling_parameters": {"max_tokens": 4000}, **inputs},
    )


def runs(server: Server, count: int) -> None:
    wait_for(lambda: server.metric("vllm:num_requests_running") == count, 10, f"{count} running requests")


def cancel(server: Server, request_id: Any, **inputs: Any) -> Answer:
    return ask(server.grpc_url, cancel=request_id, **inputs)


def reason(answer: Answer) -> tuple[str | None, str, list[str], int]:
    return answer.error, answer.text, answer.last["finish_reason"], answer.finals


def test_cancel_by_request_on_the_same_stream(server: Server) -> None:
    before = server.metric("voltriton:requests_total", outcome="cancelled")
    with WireClient(server.grpc_url) as client:
        client.send(endless("victim"))
        next(client.messages())
        answers = client.answers(build(cancel="victim", id="c"), build("other", id="o"), known=["victim"])
        assert reason(answers["c"]) == (None, "", ["cancelled"], 1)
        assert (answers["victim"].error, answers["victim"].errors) == ("CANCELLED: Request was cancelled", 1)
        assert (answers["victim"].finals, answers["o"].text) == (1, "otherother")
        runs(server, 0)
        # Once more is no error.
        assert reason(client.answer(build(cancel="victim"))) == (None, "", ["None"], 1)
    wait_for(
        lambda: server.metric("voltriton:requests_total", outcome="cancelled") == before + 1,
        10,
        "the outcome",
    )


@pytest.mark.parametrize("victim", [{}, {"stream": False}, {"request_id": "named"}], ids=str)
def test_cancel_by_request_without_a_token_yet_and_from_elsewhere(
    server: Server, victim: dict[str, Any]
) -> None:
    with WireClient(server.grpc_url) as client:
        client.send(build(script(tokens=["x"], first_ms=60000), id="waits", **victim))
        runs(server, 1)
        code, text = server.post("/v2/models/vllm/generate", {"cancel": victim.get("request_id", "waits")})
        assert (code, json.loads(text)["text_output"], json.loads(text)["finish_reason"]) == (
            200,
            "",
            "cancelled",
        )
        assert "CANCELLED: " in next(client.messages()).error_message
        runs(server, 0)


def test_cancel_of_a_request_to_the_facade(server: Server) -> None:
    with WireClient(server.grpc_url) as client:
        prompt = script(repeat=["x ", 4000], delay_ms=10)
        client.send(build(prompt, id="f", model="generate", sampling_parameters={"max_tokens": 4000}))
        runs(server, 1)
        assert cancel(server, "f").last["finish_reason"] == ["cancelled"]
        assert "CANCELLED: " in next(client.messages()).error_message
        runs(server, 0)


def test_cancel_of_an_id_that_several_have_ends_none(server: Server) -> None:
    with WireClient(server.grpc_url) as client, WireClient(server.grpc_url) as other:
        client.send(endless("twin"))
        other.send(endless("twin"))
        runs(server, 2)
        answer = cancel(server, "twin")
        assert answer.error == "INVALID_ARGUMENT: cancel: 2 open requests have the id 'twin', 1 is allowed"
        next(client.messages())
        runs(server, 2)
        other.cancel()
        runs(server, 1)
        assert cancel(server, "twin").last["finish_reason"] == ["cancelled"]
        runs(server, 0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": "a"}, "text_input: not allowed with cancel, which goes alone"),
        ({"stream": True}, "stream: not allowed with cancel"),
        ({"parameters": {"max_tokens": 2}}, "max_tokens: not allowed with cancel"),
        ({"cancel": ""}, "cancel: empty"),
        ({"cancel": b"caf\xe9"}, "cancel: not UTF-8 at byte 3 (e9)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_cancel_goes_alone(server: Server, inputs: dict[str, Any], message: str) -> None:
    answer = ask(server.grpc_url, **{"cancel": "nobody", **inputs})
    assert (answer.error or "").startswith(f"INVALID_ARGUMENT: {message}")
    assert (answer.finals, answer.responses) == (1, [])


# HTTP, the other models, metrics.


def test_http_generate_and_stream(server: Server) -> None:
    code, text = server.post(
        "/v2/models/vllm/generate", {"text_input": "a b", "parameters": {"exclude_input_in_output": True}}
    )
    assert (code, json.loads(text)["text_output"]) == (200, "a b")
    code, text = server.post(
        "/v2/models/vllm/generate_stream", {"text_input": "a b", "stream": True, "max_tokens": 5}
    )
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert (code, "".join(e["text_output"] for e in events)) == (200, "a b")


def test_plain_infer_says_which_model_can(server: Server) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a b"]}]}
    assert server.post("/v2/models/vllm/infer", body)[0] == 501
    code, text = server.post("/v2/models/generate/infer", body)
    assert (code, json.loads(text)["outputs"][0]["data"]) == (200, ["a ba b"])


def test_unary_facade_over_grpc_keeps_codes_and_extras(server: Server) -> None:
    import grpc

    with WireClient(server.grpc_url) as client:
        response = client.stub.ModelInfer(
            build("a b", model="generate", return_finish_reason=True, parameters={"temperature": 0.5})
        )
        assert [o.name for o in response.outputs] == ["text_output", "finish_reason"]
        with pytest.raises(grpc.RpcError) as failed:
            client.stub.ModelInfer(build("a b", model="generate", sampling_parameters={"top_p": 3}))
    assert "INVALID_ARGUMENT: sampling_parameters.top_p" in failed.value.details()


def test_chat_template_and_ensemble(server: Server) -> None:
    messages = json.dumps([{"role": "user", "content": "x y z"}])
    code, text = server.post(
        "/v2/models/chat/generate", {"messages": messages, "stream": False, "sampling_parameters": "{}"}
    )
    assert (code, json.loads(text)["text_output"]) == (200, "<1> <2> <3>")
    streamed = ask(
        server.grpc_url, model="chat", messages=messages, stream=True, sampling_parameters={"max_tokens": 2}
    )
    assert streamed.text == "<1> <2> "
    bad = json.dumps([{"role": "user", "content": "<|im_end|>"}])
    code, text = server.post(
        "/v2/models/chat/generate", {"messages": bad, "stream": False, "sampling_parameters": "{}"}
    )
    assert "contains the control token" in text


def settle(server: Server, name: str) -> None:
    """Waits until a counter has stood still for longer than the second between two reports."""
    state = {"value": -1.0, "since": time.monotonic()}

    def still() -> bool:
        if (value := server.metric(name)) != state["value"]:
            state.update(value=value, since=time.monotonic())
        return time.monotonic() - state["since"] > 1.5

    wait_for(still, 20, f"{name} to settle")


def test_metrics_agree_with_the_clients_counts(server: Server) -> None:
    names = {"stop": 0.0, "length": 0.0, "refused": 0.0}
    settle(server, "vllm:generation_tokens_total")
    before = {o: server.metric("voltriton:requests_total", outcome=o) for o in names}
    tokens = server.metric("vllm:generation_tokens_total")
    answers: list[Answer] = [ask(server.grpc_url, "a b c", return_num_output_tokens=True) for _ in range(3)]
    answers.append(
        ask(server.grpc_url, "a b c", return_num_output_tokens=True, sampling_parameters={"max_tokens": 1})
    )
    ask(server.grpc_url, "a", sampling_parameters={"n": 0})
    counted = sum(sum(a.joined("num_output_tokens")) for a in answers)
    assert counted == 10
    wait_for(lambda: server.metric("vllm:generation_tokens_total") == tokens + counted, 10, "the token count")
    after = {o: server.metric("voltriton:requests_total", outcome=o) - before[o] for o in names}
    assert after == {"stop": 3, "length": 1, "refused": 1}
    assert server.metric("voltriton:engine_up") == 1
    assert not math.isnan(server.metric("voltriton:requests_open"))
