"""The gateway as the `openai` package sees it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from kserve import FakeServer
from serving import gateway, wait_for
from voltriton_client.gateway.settings import Alias

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def url(server: FakeServer) -> Iterator[str]:
    with gateway(server.address, aliases=(Alias("sql", "vllm", "adapter"), Alias("org/name", "vllm"))) as url:
        yield url


@pytest.fixture
def client(server: FakeServer, url: str) -> Iterator[openai.OpenAI]:
    server.asked.clear()
    server.cancelled.clear()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_models_are_engines_and_aliases(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/name", "sql", "vllm"]
    assert client.models.retrieve("org/name").id == "org/name"
    assert client.models.retrieve("vllm").owned_by == "voltriton"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'; there are: org/name, sql, vllm"):
        client.models.retrieve("gpt")


def test_chat(client: openai.OpenAI, server: FakeServer) -> None:
    messages: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "you"}]},
    ]
    answer = client.chat.completions.create(
        model="vllm", messages=messages, temperature=0, top_p=0.9, seed=3, stop="x", max_completion_tokens=9,
        presence_penalty=1, frequency_penalty=-1, logit_bias={"5": 1}, user="ignored", extra_body={"top_k": 4},
    )  # fmt: skip
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "hello you"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 2)
    assert answer.usage.prompt_tokens_details and answer.usage.prompt_tokens_details.cached_tokens == 1
    assert server.asked[-1].sampling == {
        "temperature": 0, "top_p": 0.9, "seed": 3, "stop": "x", "max_tokens": 9, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"5": 1}, "top_k": 4,
    }  # fmt: skip
    sent = json.loads(server.asked[-1]["messages"])["messages"]
    assert sent[0] == {"role": "system", "content": "be kind"}
    assert server.asked[-1]["_id"] == answer.id


def test_length_is_said(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="vllm", messages=user("a b c"), max_tokens=2)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("a b ", "length")


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    events = list(
        client.chat.completions.create(
            model="vllm", messages=user("one two"), stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [event.choices[0].delta for event in events[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "one two"
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None, None, None, "stop"]
    assert events[-1].choices == [] and events[-1].usage and events[-1].usage.total_tokens == 4
    assert all(event.usage is None for event in events[:-1])
    assert len({event.id for event in events}) == 1


def test_raw_stream_ends_with_done(url: str) -> None:
    body = {"model": "vllm", "messages": user("x"), "stream": True}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(client: openai.OpenAI, stream: bool) -> None:
    """C045."""
    made: Any = client.chat.completions.create(model="vllm", messages=user("a b"), n=3, stream=stream)
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for event in made:
            texts[event.choices[0].index] += event.choices[0].delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in made.choices}
    assert texts == {0: "0:a b", 1: "1:a b", 2: "2:a b"}


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="vllm", messages=user("a b"), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content and [entry.token for entry in content] == ["<100>", "<101>"]
    assert content[0].logprob == -0.5 and bytes(content[0].bytes or []) == b"<100>"
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -9999.0]
    only = client.chat.completions.create(model="vllm", messages=user("a"), logprobs=True)
    assert only.choices[0].logprobs and only.choices[0].logprobs.content
    assert only.choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_a_stream(client: openai.OpenAI) -> None:
    events = client.chat.completions.create(
        model="vllm", messages=user("a b"), logprobs=True, top_logprobs=1, stream=True
    )
    found = [e.choices[0].logprobs.content for e in events if e.choices[0].logprobs]
    assert [entries[0].token for entries in found if entries] == ["<100>", "<101>"]


def test_tools_whole(client: openai.OpenAI, server: FakeServer) -> None:
    answer = client.chat.completions.create(
        model="vllm", messages=user("!tool"), tools=TOOLS, tool_choice="auto", parallel_tool_calls=False
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls and choice.message.tool_calls[0].function.arguments == '{"city": "Bern"}'  # type: ignore[union-attr]
    sent = json.loads(server.asked[-1]["messages"])
    assert (sent["tools"], sent["tool_choice"]) == (TOOLS, "auto")
    call: Any = choice.message.tool_calls[0].model_dump()
    follow: Any = [
        *user("!tool"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    assert client.chat.completions.create(model="vllm", messages=follow).choices[0].message.content == "sunny"


def test_tools_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="vllm", messages=user("!tool"), tools=TOOLS) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0]
    assert message.finish_reason == "tool_calls"
    assert (
        message.message.tool_calls and message.message.tool_calls[0].function.arguments == '{"city": "Bern"}'
    )


def test_reasoning_content(client: openai.OpenAI, server: FakeServer) -> None:
    answer: Any = client.chat.completions.create(
        model="vllm", messages=user("!think"), reasoning_effort="none"
    )
    assert answer.choices[0].message.reasoning_content == "Two and two. "
    assert answer.choices[0].message.content == "It is 4."
    assert json.loads(server.asked[-1]["messages"])["chat_template_kwargs"] == {"enable_thinking": False}
    deltas: Any = [
        event.choices[0].delta
        for event in client.chat.completions.create(model="vllm", messages=user("!think"), stream=True)
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Two and two. "


def test_response_format(client: openai.OpenAI, server: FakeServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(
        model="vllm",
        messages=user("x"),
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema, "strict": True},
        },
    )
    assert server.asked[-1].sampling["structured_outputs"] == {"json": schema}
    client.chat.completions.create(model="vllm", messages=user("x"), response_format={"type": "json_object"})
    assert server.asked[-1].sampling["structured_outputs"] == {"json_object": True}
    client.chat.completions.create(model="vllm", messages=user("x"), response_format={"type": "text"})
    assert "structured_outputs" not in server.asked[-1].sampling


def test_alias_with_an_adapter(client: openai.OpenAI, server: FakeServer) -> None:
    answer = client.chat.completions.create(model="sql", messages=user("x"))
    assert answer.model == "sql"
    assert (server.asked[-1]["_model"], server.asked[-1].sampling["lora_name"]) == ("vllm", "adapter")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a b", ["a b"]),
        (["a", "b c"], ["a", "b c"]),
        ([7, 8], ["t7 t8"]),
        ([[7], [8, 9]], ["t7", "t8 t9"]),
    ],
)
def test_completions_of_every_form(
    client: openai.OpenAI, prompt: Any, texts: list[str], stream: bool
) -> None:
    made: Any = client.completions.create(
        model="vllm",
        prompt=prompt,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    if stream:
        events = list(made)
        got = [""] * len(texts)
        for event in events[:-1]:
            got[event.choices[0].index] += event.choices[0].text
        usage = events[-1].usage
    else:
        got, usage = [choice.text for choice in made.choices], made.usage
    assert got == texts
    assert usage.completion_tokens == sum(len(text.split()) for text in texts)


def test_completions_echo_logprobs_and_default_length(client: openai.OpenAI, server: FakeServer) -> None:
    echoed = client.completions.create(model="vllm", prompt=["a b", "c"], echo=True)
    assert [choice.text for choice in echoed.choices] == ["a ba b", "cc"]
    assert server.asked[-1].sampling["max_tokens"] == 16
    streamed = client.completions.create(model="vllm", prompt="a b", echo=True, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == "a ba b"
    logprobs = client.completions.create(model="vllm", prompt="a b", logprobs=1).choices[0].logprobs
    assert logprobs and logprobs.tokens == ["<100>", "<101>"] and logprobs.text_offset == [0, 5]
    assert logprobs.top_logprobs and logprobs.top_logprobs[0] == {"<100>": -0.5}


def test_embeddings(client: openai.OpenAI) -> None:
    """The package asks for base64 by itself."""
    made = client.embeddings.create(model="vllm", input=["abc", "d"])
    assert [entry.embedding for entry in made.data] == [[3, 0.5, -0.25], [1, 0.5, -0.25]]
    floats = client.embeddings.create(model="vllm", input=[1, 2], encoding_format="float", dimensions=2)
    assert floats.data[0].embedding == [2, 0.5, -0.25]
    assert floats.usage.prompt_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "kind", "status", "code"),
    [
        (
            "!error INVALID_ARGUMENT sampling_parameters.top_k: got 3",
            openai.BadRequestError,
            400,
            "invalid_value",
        ),
        ("!error UNAVAILABLE full: 9 of 9", openai.InternalServerError, 503, "overloaded"),
        ("!error DEADLINE_EXCEEDED timeout_ms passed", openai.InternalServerError, 504, "timeout"),
        ("!error INTERNAL oops", openai.InternalServerError, 500, "internal_error"),
        ("!cut 0", openai.InternalServerError, 502, "answer_cut"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_status_and_shape(
    client: openai.OpenAI,
    prompt: str,
    kind: type[openai.APIStatusError],
    status: int,
    code: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as caught:
        list(client.chat.completions.create(model="vllm", messages=user(prompt), stream=stream))
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict) and caught.value.body["code"] == code
    assert caught.value.body["param"] == ("top_k" if status == 400 else None)
    assert ("retry-after" in caught.value.response.headers) == (status == 503)


def test_error_in_mid_stream_reaches_the_client(client: openai.OpenAI, url: str) -> None:
    texts = []
    with pytest.raises(openai.APIError, match="answer cut after 3 tokens"):
        for event in client.chat.completions.create(model="vllm", messages=user("!cut 3"), stream=True):
            texts.append(event.choices[0].delta.content or "")
    assert "".join(texts) == "tok tok tok "
    body = {"model": "vllm", "messages": user("!cut 3"), "stream": True}
    assert "[DONE]" not in httpx.post(f"{url}/v1/chat/completions", json=body).text


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels_the_engines_request(client: openai.OpenAI, server: FakeServer, stream: bool) -> None:
    """Before the first token, where only the closed connection tells."""
    with pytest.raises(openai.APITimeoutError):
        list(
            client.with_options(timeout=0.3).chat.completions.create(
                model="vllm", messages=user("!silent"), stream=stream
            )
        )
    wait_for(lambda: server.cancelled)


def test_leaving_in_mid_stream_cancels(client: openai.OpenAI, server: FakeServer) -> None:
    stream = client.chat.completions.create(model="vllm", messages=user("!long"), stream=True)
    for _, _event in zip(range(4), stream, strict=False):
        pass
    stream.close()
    wait_for(lambda: server.cancelled)


def test_leaving_cancels_all_prompts_of_a_completion(client: openai.OpenAI, server: FakeServer) -> None:
    stream = client.completions.create(
        model="vllm", prompt=["!long", "!long", "!silent"], stream=True, max_tokens=99
    )
    next(iter(stream))
    # What was not sent yet would not be there to be cancelled.
    wait_for(lambda: len(server.asked) == 3)
    stream.close()
    wait_for(lambda: len(server.cancelled) == 3)


def test_first_failure_of_several_prompts_is_the_answer(client: openai.OpenAI, server: FakeServer) -> None:
    with pytest.raises(openai.BadRequestError, match="bad"):
        client.completions.create(model="vllm", prompt=["!silent", "!error INVALID_ARGUMENT bad"])
    wait_for(lambda: not server.active)
    with pytest.raises(openai.APIError, match="bad"):
        list(
            client.completions.create(
                model="vllm", prompt=["!long", "!error INVALID_ARGUMENT bad"], stream=True
            )
        )


def test_many_at_a_time(url: str) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

            async def one(number: int) -> str:
                text = f"!slow 0.01 a{number} b c"
                events = await client.chat.completions.create(model="vllm", messages=user(text), stream=True)
                return "".join([event.choices[0].delta.content or "" async for event in events])

            return list(await asyncio.gather(*(one(number) for number in range(24))))

    assert asyncio.run(main()) == [f"a{number} b c" for number in range(24)]


def test_a_slow_reader_holds_back_and_gets_all(url: str) -> None:
    """Much more than the sockets take at once is read late and is whole."""
    body = {"model": "vllm", "messages": user("!big 3000000"), "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        time.sleep(0.2)
        size = sum(len(line) for line in response.iter_lines())
    assert size > 3_000_000


def test_openai_retries_what_is_overloaded(url: str, server: FakeServer) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=1) as client,
        pytest.raises(openai.InternalServerError),
    ):
        server.asked.clear()
        client.chat.completions.create(model="vllm", messages=user("!error UNAVAILABLE full"))
    assert len(server.asked) == 2
