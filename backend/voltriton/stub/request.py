"""Triton request -> Generation: the only reader of tensors.

Everything is checked here that needs no engine: what is missing, what excludes what, UTF-8, JSON. The
names and ranges of sampling parameters are the host's to check (`voltriton.host.sampling`).
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from voltriton.errors import InvalidArgument, nearest
from voltriton.stub.contract import ASKABLE, is_reserved
from voltriton.wire import Generation

PROMPT_INPUTS = ("text_input", "prompts", "input_ids", "messages", "embedding_request", "lora_request")
CHAT_KEYS = (
    "messages", "tools", "tool_choice", "chat_template_kwargs", "documents", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip


class Parsed(NamedTuple):
    """A generation and what only the responder needs of the request."""

    generation: Generation
    # Put in front of a non-streaming answer, one text a prompt; None: nothing.
    prefixes: list[str] | None


class Reader:
    """Typed access to the tensors of one Triton request. Every error names the tensor."""

    def __init__(self, request: Any, pb_utils: Any) -> None:
        self._request = request
        self._get = pb_utils.get_input_tensor_by_name

    def values(self, name: str) -> list[Any] | None:
        """All elements of a tensor, or None where it was not sent."""
        tensor = self._get(self._request, name)
        if tensor is None:
            return None
        try:
            values: list[Any] = tensor.as_numpy().reshape(-1).tolist()
        except Exception as error:
            raise InvalidArgument(f"{name}: the tensor cannot be read: {error}") from None
        return values

    def one(self, name: str) -> Any:
        """The element of a tensor of one, or None where it was not sent."""
        values = self.values(name)
        if values is None:
            return None
        if len(values) != 1:
            raise InvalidArgument(f"{name}: got {len(values)} elements, 1 is needed")
        return values[0]

    def flag(self, name: str, default: bool) -> bool:
        value = self.one(name)
        return default if value is None else bool(value)

    def text(self, name: str) -> str | None:
        value = self.one(name)
        return None if value is None else decode(value, name)

    def texts(self, name: str) -> list[str] | None:
        values = self.values(name)
        return None if values is None else [decode(v, f"{name}[{i}]") for i, v in enumerate(values)]

    def json(self, name: str) -> Any:
        text = self.text(name)
        return None if text is None else parse_json(text, name)


def decode(value: Any, where: str) -> str:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = value[error.start : error.start + 4].hex(" ")
        raise InvalidArgument(f"{where}: not UTF-8 at byte {error.start} ({bad})") from None


def parse_json(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        # Half of a surrogate pair is legal in JSON text but is no character.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{where}: not JSON: {error.msg} at character {error.pos} of {len(text)}"
        ) from None
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{where}: a lone surrogate (\\u{ord(error.object[error.start]):04x}) is no character"
        ) from None
    except RecursionError:
        raise InvalidArgument(f"{where}: JSON nested too deeply") from None
    _refuse_infinite(value, where)
    return value


def _refuse_infinite(value: Any, where: str) -> None:
    """NaN and Infinity, which Python's parser takes, and what is too large for a float: no JSON can carry them on."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"{where}: got {value}, a finite number is needed")
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_infinite(item, f"{where}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _refuse_infinite(item, f"{where}[{i}]")


def parse_object(text: str, where: str) -> dict[str, Any]:
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where}: got {type(value).__name__}, a JSON object is needed")
    return value


def parse(request: Any, key: int, pb_utils: Any) -> Parsed:
    """Raises InvalidArgument with tensor, value and what is allowed."""
    read = Reader(request, pb_utils)
    source, generation = _prompt(read, key)
    generation.id = read.text("request_id") or request.request_id() or uuid.uuid4().hex
    generation.stream = read.flag("stream", False)
    generation.images = read.texts("image") or []
    generation.priority = int(read.one("priority") or 0)
    generation.timeout_ms = _timeout(read)
    generation.render_only = read.flag("render_only", False)
    generation.wants = [name for name in ASKABLE if read.flag(f"return_{name}", False)]
    generation.sampling = _sampling(read, request)
    if generation.render_only:
        generation.wants = ["token_ids", "num_output_tokens"]
    return Parsed(generation, _prefixes(read, source, generation))


def parse_cancel(request: Any, pb_utils: Any) -> str | None:
    """The id of the request that this one cancels; None where it is one for the engine.

    Raises InvalidArgument where it carries anything else.
    """
    read = Reader(request, pb_utils)
    victim = read.text("cancel")
    if victim is None:
        return None
    if not victim:
        raise InvalidArgument("cancel: empty, the request_id of an open request is needed")
    others = [tensor.name() for tensor in request.inputs() if tensor.name() != "cancel"]
    others += _sampling(read, request)
    if others:
        raise InvalidArgument(f"{others[0]}: not allowed with cancel, which goes alone")
    return victim


def _prompt(read: Reader, key: int) -> tuple[str, Generation]:
    given = [name for name in PROMPT_INPUTS if read.values(name) is not None]
    if not given:
        raise InvalidArgument("no prompt: one of text_input, prompts, input_ids and messages is needed")
    if len(given) > 1:
        raise InvalidArgument(f"more than one prompt: got {' and '.join(given)}, one of them is allowed")
    name = given[0]
    generation = Generation(key=key, id="")
    if name == "text_input":
        generation.prompts = [read.text(name) or ""]
    elif name == "prompts":
        generation.prompts = read.texts(name)
    elif name == "input_ids":
        generation.input_ids = [int(i) for i in read.values(name) or []]
    elif name == "messages":
        generation.chat = _chat(read.json(name))
    elif name == "embedding_request":
        generation.embedding = parse_object(read.text(name) or "", name)
    else:
        generation.lora = parse_object(read.text(name) or "", name)
    _refuse_empty(name, generation)
    return name, generation


def _refuse_empty(name: str, generation: Generation) -> None:
    """An empty prompt has no token to continue from (vLLM needs at least one)."""
    for where, prompt in _named_prompts(name, generation):
        if not prompt:
            raise InvalidArgument(f"{where}: empty, at least one token is needed")
    if name == "prompts" and not generation.prompts:
        raise InvalidArgument("prompts: empty, at least one prompt is needed")


def _named_prompts(name: str, generation: Generation) -> Iterator[tuple[str, Any]]:
    if generation.input_ids is not None:
        yield name, generation.input_ids
    for i, prompt in enumerate(generation.prompts or []):
        yield (name if name == "text_input" else f"{name}[{i}]"), prompt


def _chat(value: Any) -> dict[str, Any]:
    chat = {"messages": value} if isinstance(value, list) else value
    if not isinstance(chat, dict):
        raise InvalidArgument(
            f"messages: got {type(value).__name__}, a list of messages or an object is needed"
        )
    for name in chat:
        if name not in CHAT_KEYS:
            raise InvalidArgument(
                f"messages.{name}: not known; known are {', '.join(CHAT_KEYS)}{nearest(name, CHAT_KEYS)}"
            )
    return chat


def _timeout(read: Reader) -> int | None:
    value = read.one("timeout_ms")
    if value is None:
        return None
    if value < 1:
        raise InvalidArgument(f"timeout_ms: got {value}, at least 1 is allowed")
    return int(value)


def _sampling(read: Reader, request: Any) -> dict[str, Any]:
    text = read.text("sampling_parameters")
    if text is not None:
        return parse_object(text, "sampling_parameters")
    parameters = parse_object(request.parameters() or "{}", "request parameters")
    return {name: value for name, value in parameters.items() if not is_reserved(name)}


def _prefixes(read: Reader, source: str, generation: Generation) -> list[str] | None:
    """The official default puts the prompt in front of the answer, but never when streaming."""
    exclude = read.one("exclude_input_in_output")
    if exclude is not None and not exclude:
        if generation.stream:
            # The official backend's sentence, which clients search for.
            raise InvalidArgument(
                "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
            )
        if generation.prompts is None:
            raise InvalidArgument(
                f"exclude_input_in_output: got false with {source}, only a text prompt can be repeated"
            )
    if generation.stream or exclude:
        return None
    return generation.prompts
