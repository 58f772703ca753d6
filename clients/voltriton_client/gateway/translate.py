"""OpenAI's request bodies -> requests of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from voltriton_client.gateway.pool import Target
from voltriton_client.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Message,
    Sampling,
)
from voltriton_client.request import WANTED, Request

_SAME_NAMES = (
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
)
_OPENAI_COMPLETION_TOKENS = 16


def chat(body: ChatRequest, target: Target, request_id: str, timeout_s: float) -> Request:
    sampling = _sampling(body, target)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    if grammar := _grammar(body):
        sampling["structured_outputs"] = grammar
    return Request(
        model=target.model,
        messages=_chat_object(body),
        sampling=sampling,
        stream=bool(body.stream),
        timeout_s=timeout_s,
        priority=body.priority,
        want=WANTED | ({"logprobs", "token_ids"} if body.logprobs else frozenset()),
        request_id=request_id,
    )


def completions(body: CompletionRequest, target: Target, request_id: str, timeout_s: float) -> list[Request]:
    """One request for each prompt."""
    sampling = _sampling(body, target)
    sampling["max_tokens"] = body.max_tokens or _OPENAI_COMPLETION_TOKENS
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
    prompts = list(prompts_of(body.prompt))
    return [
        Request(
            model=target.model,
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            sampling=sampling,
            stream=bool(body.stream),
            timeout_s=timeout_s,
            priority=body.priority,
            want=WANTED | ({"logprobs", "token_ids"} if body.logprobs is not None else frozenset()),
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
        )
        for number, prompt in enumerate(prompts)
    ]


def embeddings(body: EmbeddingRequest, target: Target, request_id: str, timeout_s: float) -> list[Request]:
    """One request for each input."""
    pooling = {"pooling_params": {"dimensions": body.dimensions}} if body.dimensions else {}
    return [
        Request(
            model=target.model,
            embedding={"input": text, **pooling},
            stream=False,
            timeout_s=timeout_s,
            want=frozenset({"num_input_tokens"}),
            request_id=f"{request_id}-{number}",
        )
        for number, text in enumerate(prompts_of(body.input))
    ]


def prompts_of(value: Any) -> Iterator[str | list[int]]:
    """The single prompts of OpenAI's four forms: text, texts, token ids, lists of token ids."""
    if isinstance(value, str) or isinstance(value[0], int):
        yield value
    else:
        yield from value


def _sampling(body: Sampling, target: Target) -> dict[str, Any]:
    sampling = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    if sampling.get("stop") == []:
        del sampling["stop"]
    if target.lora:
        sampling["lora_name"] = target.lora
    return sampling


def _grammar(body: ChatRequest) -> dict[str, Any] | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    return {"json_object": True} if form.type == "json_object" else {"json": form.json_schema.schema_}


def _chat_object(body: ChatRequest) -> dict[str, Any]:
    chat: dict[str, Any] = {"messages": [_message(message) for message in body.messages]}
    if body.tools:
        chat["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if body.tool_choice is not None:
        choice = body.tool_choice
        chat["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        kwargs.setdefault("enable_thinking", False)
    elif body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    if kwargs:
        chat["chat_template_kwargs"] = kwargs
    return chat


def _message(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
    if message.role == "developer":
        # OpenAI's newer word for system; the templates of open models do not know it.
        plain["role"] = "system"
    return plain
