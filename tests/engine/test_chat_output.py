"""Reasoning and tool calls told apart from content, by vLLM's own parsers, without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from voltriton.errors import InvalidArgument
from voltriton.host.vllm_engine.chat_output import ChatOutput, make_chat_output
from voltriton.settings import Settings
from voltriton.wire import Delta, Generation

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def output(tokenizer: Any, prompt: str, stream: bool, tools: bool = True, **settings: Any) -> ChatOutput:
    config = SimpleNamespace(model="tiny", hf_config=SimpleNamespace(model_type="qwen3"), tokenizer="tiny")
    llm = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config), tokenizer=tokenizer)
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        **({"tools": TOOLS} if tools else {}),
    }
    generation = Generation(1, "id", chat=chat, stream=stream)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return make_chat_output(llm, Settings(**settings), generation, ids, {})


def run(tokenizer: Any, chat: ChatOutput, text: str, stream: bool) -> dict[str, Any]:
    """What a client puts together from the deltas of a text that comes token by token, or at once."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [[i] for i in ids] if stream else [ids]
    result: dict[str, Any] = {"text": "", "reasoning": "", "calls": {}, "finish": None}
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        delta = Delta(
            1, text=tokenizer.decode(piece), num_tokens=len(piece), finish_reason="stop" if last else None
        )
        chat.apply(delta, piece)
        result["text"] += delta.text
        result["reasoning"] += delta.reasoning or ""
        result["finish"] = delta.finish_reason
        for call in delta.tool_calls or []:
            known = result["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            function = call.get("function", {})
            known["name"] += function.get("name") or ""
            known["arguments"] += function.get("arguments") or ""
    return result


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("prompt", "text"), [("ask", "<think>because</think>four"), ("ask<think>", "because</think>four")],
    ids=["tag in the answer", "tag in the prompt"],
)  # fmt: skip
def test_reasoning_is_told_apart(tokenizer: Any, stream: bool, prompt: str, text: str) -> None:
    chat = output(tokenizer, prompt, stream, tools=False, reasoning_parser="deepseek_r1")
    result = run(tokenizer, chat, text, stream)
    assert (result["reasoning"].strip(), result["text"].strip()) == ("because", "four")


@pytest.mark.parametrize("stream", [True, False])
def test_tool_call_is_told_apart(tokenizer: Any, stream: bool) -> None:
    chat = output(tokenizer, "ask", stream, tool_parser="hermes")
    result = run(tokenizer, chat, CALL, stream)
    assert result["text"].strip() == ""
    assert [c["name"] for c in result["calls"].values()] == ["weather"]
    assert json.loads(result["calls"][0]["arguments"]) == {"city": "Paris"}
    assert result["finish"] == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
def test_plain_answer_stays_plain(tokenizer: Any, stream: bool) -> None:
    chat = output(tokenizer, "ask", stream, tool_parser="hermes")
    result = run(tokenizer, chat, "just text", stream)
    assert (result["text"], result["calls"], result["finish"]) == ("just text", {}, "stop")


def test_bad_tool_is_refused_by_its_place(tokenizer: Any) -> None:
    config = SimpleNamespace(model="tiny", hf_config=SimpleNamespace(model_type="qwen3"))
    llm = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config), tokenizer=tokenizer)
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
    with pytest.raises(InvalidArgument, match="tools"):
        make_chat_output(llm, Settings(tool_parser="hermes"), Generation(1, "id", chat=chat), [1], {})
