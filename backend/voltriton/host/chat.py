"""Checks of a chat before the model's own template sees it. The rendering itself is the engine's.

A template is a program that trusts its input: control tokens in user text would become turns of their own,
unknown switches would be ignored without a word, and the engine could be made to fetch what a URL names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from voltriton.errors import InvalidArgument, nearest
from voltriton.host.engine_api import EngineInfo

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Given to every template by the renderer, whatever the request says.
BUILT_IN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tool_choice"}
)


def check(chat: dict[str, Any], info: EngineInfo) -> None:
    """Raises InvalidArgument naming the place inside `messages`."""
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument(f"messages: got {_short(messages)}, a list of at least one message is needed")
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]", info)
    _check_kwargs(chat.get("chat_template_kwargs"), info)
    _check_list_of_objects(chat.get("tools"), "messages.tools")
    _check_list_of_objects(chat.get("documents"), "messages.documents")
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(chat.get(name, False), bool):
            raise InvalidArgument(f"messages.{name}: got {_short(chat[name])}, true or false is needed")


def check_tool_choice(chat: dict[str, Any], tool_parser: str | None) -> None:
    """A call that must be made cannot be told apart from text without a parser. Raises InvalidArgument."""
    choice = chat.get("tool_choice")
    if choice not in (None, "none", "auto") and tool_parser is None:
        raise InvalidArgument(
            f"messages.tool_choice: got {_short(choice)}, but voltriton.tool_parser is not set for this model "
            "(model.json), so only none and auto are allowed, and a call comes as text"
        )


def _check_message(message: Any, where: str, info: EngineInfo) -> None:
    if not isinstance(message, dict):
        raise InvalidArgument(f"{where}: got {_short(message)}, an object with role and content is needed")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidArgument(f"{where}.role: got {_short(role)}, one of {', '.join(ROLES)} is needed")
    content = message.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise InvalidArgument(f"{where}.content: missing")
    if content is not None and not isinstance(content, str | list):
        raise InvalidArgument(f"{where}.content: got {_short(content)}, a text or a list of parts is needed")
    for place, text in _texts(content, f"{where}.content"):
        _refuse_control_tokens(text, place, info)


def _texts(content: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        yield where, content
    elif isinstance(content, list):
        for i, part in enumerate(content):
            yield from _part_texts(part, f"{where}[{i}]")


def _part_texts(part: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(part, str):
        yield where, part
        return
    if not isinstance(part, dict):
        raise InvalidArgument(f"{where}: got {_short(part)}, a part with a type is needed")
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        if not isinstance(part.get("text"), str):
            raise InvalidArgument(f"{where}.text: got {_short(part.get('text'))}, a text is needed")
        yield f"{where}.text", part["text"]
    elif kind == "image_url":
        _check_image_url(part.get("image_url"), f"{where}.image_url")
    else:
        raise InvalidArgument(f"{where}.type: got {_short(kind)}, text or image_url is allowed")


def _check_image_url(value: Any, where: str) -> None:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url.startswith("data:image/"):
        # The server fetches nothing and opens no file for a request.
        raise InvalidArgument(f"{where}: got {_short(url)}, only data:image/...;base64,... is allowed")


def _refuse_control_tokens(text: str, where: str, info: EngineInfo) -> None:
    for token in info.control_tokens:
        if token in text:
            raise InvalidArgument(
                f"{where}: contains the control token {token!r}, which the model would take for a turn of its own; "
                "leave it out, or send a prompt of your own as text_input"
            )


def _check_kwargs(kwargs: Any, info: EngineInfo) -> None:
    where = "messages.chat_template_kwargs"
    if kwargs is None:
        return
    if not isinstance(kwargs, dict):
        raise InvalidArgument(f"{where}: got {_short(kwargs)}, an object is needed")
    if info.template_variables is None:
        return
    known = sorted(info.template_variables - BUILT_IN)
    for name in kwargs:
        if name not in known:
            raise InvalidArgument(
                f"{where}.{name}: the model's chat template reads no such variable{nearest(name, known)}"
                f" (it reads {', '.join(known) or 'none'})"
            )


def _check_list_of_objects(value: Any, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidArgument(f"{where}: got {_short(value)}, a list of objects is needed")


def _short(value: Any) -> str:
    return repr(value)[:80]
