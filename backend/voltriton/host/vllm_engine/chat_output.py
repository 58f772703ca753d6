"""Reasoning and tool calls told apart from content, by vLLM's own parsers (named in the model's settings).

Imports vLLM only through the engine that it is given: the parsers are looked up when a request needs them.
"""

from __future__ import annotations

from typing import Any

from voltriton.errors import InvalidArgument
from voltriton.host.vllm_engine import builds
from voltriton.settings import Settings
from voltriton.wire import Delta, Generation


class ChatOutput:
    """Parsers of one request, one a sequence."""

    def __init__(self, make_parser: Any, request: Any, prompt_token_ids: list[int], stream: bool) -> None:
        self._make_parser = make_parser
        self._parsers: dict[int, Any] = {}
        self._called: set[int] = set()  # sequences that made a call
        self._request = request
        self._prompt_token_ids = prompt_token_ids
        self._stream = stream

    def apply(self, delta: Delta, token_ids: list[int]) -> None:
        """Moves what is reasoning or a tool call out of the delta's text."""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._make_parser()
            builds.begin_parsing(parser, self._prompt_token_ids)
        if self._stream:
            self._apply_delta(parser, delta, token_ids)
        else:
            self._apply_whole(parser, delta, token_ids)

    def _apply_delta(self, parser: Any, delta: Delta, token_ids: list[int]) -> None:
        ended = delta.finish_reason is not None
        message = builds.parse_delta(
            parser, delta.text, token_ids, self._request, self._prompt_token_ids, finished=ended
        )
        delta.text = (message.content if message else None) or ""
        delta.reasoning = (message.reasoning if message else None) or None
        calls = (message.tool_calls if message else None) or []
        if calls:
            delta.tool_calls = [call.model_dump(exclude_none=True) for call in calls]
            self._called.add(delta.index)
        made = delta.index in self._called or parser_made_calls(parser)
        if ended and delta.finish_reason == "stop" and made:
            delta.finish_reason = "tool_calls"

    def _apply_whole(self, parser: Any, delta: Delta, token_ids: list[int]) -> None:
        reasoning, content, calls = builds.parse_whole(parser, delta.text, token_ids, self._request)
        delta.text, delta.reasoning = content or "", reasoning or None
        if calls:
            delta.tool_calls = [
                {
                    "index": i,
                    "id": getattr(call, "id", None) or f"call_{i}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(calls)
            ]
            if delta.finish_reason == "stop":
                delta.finish_reason = "tool_calls"


def parser_made_calls(parser: Any) -> bool:
    tool_parser = parser.tool_parser
    return bool(tool_parser is not None and getattr(tool_parser, "prev_tool_call_arr", None))


def make_chat_output(
    llm: Any, settings: Settings, generation: Generation, prompt_token_ids: list[int], values: dict[str, Any]
) -> ChatOutput:
    """May add to the sampling parameters what the parser needs (a grammar for a forced tool, special tokens kept)."""
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    chat = generation.chat or {}
    config = llm.vllm_config.model_config
    parser_class = builds.get_parser_class(
        llm.tokenizer,
        tool_parser_name=settings.tool_parser,
        reasoning_parser_name=settings.reasoning_parser,
        enable_auto_tools=settings.tool_parser is not None,
        model_name=config.model,
    )
    if parser_class is None:
        raise InvalidArgument("voltriton.reasoning_parser or tool_parser: no such parser in vLLM")
    fields = {name: chat[name] for name in ("tools", "tool_choice", "chat_template_kwargs") if chat.get(name)}
    try:
        request = ChatCompletionRequest(model=config.model, messages=chat["messages"], **fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(f"messages.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def make_parser() -> Any:
        return parser_class(
            llm.tokenizer,
            request.tools,
            model_config=config,
            chat_template_kwargs={
                **settings.chat_template_kwargs,
                **(chat.get("chat_template_kwargs") or {}),
            },
        )

    request = make_parser().adjust_request(request)
    if request.structured_outputs is not None and "structured_outputs" not in values:
        values["structured_outputs"] = {
            k: v
            for k, v in vars(request.structured_outputs).items()
            if v is not None and not k.startswith("_")
        }
    if not request.skip_special_tokens:
        values.setdefault("skip_special_tokens", False)
    return ChatOutput(make_parser, request, prompt_token_ids, generation.stream)
