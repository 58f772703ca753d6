"""Tool calls told apart from text, through gRPC and the gateway: the demo model behind Hermes' parser.

A grammar makes the model write what one that was trained to call tools writes, so that the parser reads a real engine's
tokens, and the same ones each time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import voltriton_client as vc
from repository import real_repository
from server import Server
from serving import gateway

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        # Without `strict` vLLM lets a forced call have any arguments.
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "London"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = {
    "regex": r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Paris|London)"\}\}\n</tool_call>'
}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("calling")
    repository = real_repository(folder / "repository", demo_model, {"tool_parser": "hermes"})
    with Server(repository, folder / "log", ready_s=600) as running:
        yield running


@pytest.fixture(scope="module")
def create(calling: Server) -> Iterator[Any]:
    with (
        gateway(calling.grpc_url, request_timeout_s=60) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield functools.partial(
            client.chat.completions.create,
            model="vllm",
            messages=ASK,
            temperature=0,
            max_tokens=90,
            tools=[WEATHER],
        )


def test_a_call_is_told_apart_over_grpc(calling: Server) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 90, "structured_outputs": CALL, "tools": [WEATHER]}
    with vc.Client(calling.grpc_url) as client:
        chunks = list(client.stream(messages=ASK, **asked))
        whole = client.chat(ASK, **asked)
    (call,) = whole.tool_calls
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "London")
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls", chunks
    assert not whole.text.strip() and not "".join(c.text for c in chunks).strip()


@pytest.mark.parametrize(
    "how",
    [
        {"extra_body": {"structured_outputs": CALL}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ],
    ids=["written", "required", "named"],
)
def test_a_call_is_told_apart_by_the_gateway(create: Any, how: dict[str, Any]) -> None:
    message = create(**how).choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.name == "weather"
    arguments = json.loads(message.tool_calls[0].function.arguments)
    assert arguments["city"] in ("Paris", "London")
    assert not (message.content or "").strip()
    name, streamed = "", ""
    for event in create(stream=True, **how):
        for choice in event.choices:
            for call in choice.delta.tool_calls or []:
                assert call.index == 0
                name += call.function.name or ""
                streamed += call.function.arguments or ""
    assert (name, json.loads(streamed)) == ("weather", arguments)


def test_what_the_tool_said_is_answered(create: Any) -> None:
    """The talk goes on with the call and its result, as every agent sends them."""
    call = create(tool_choice="required").choices[0].message.tool_calls[0].model_dump()
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "17 degrees, light rain"},
    ]
    assert create(messages=messages, max_tokens=8).choices[0].message.content.strip()
    events = create(messages=messages, max_tokens=8, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events).strip()
