"""A request as the contract (docs/contract.md) has it, and its two forms on the wire."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tritonclient.grpc import service_pb2

from voltriton_client.errors import InvalidArgument
from voltriton_client.tensors import pack

DEFAULT_MODEL = "vllm"
# Asked for unless the caller says otherwise: what usage, finish and timing need.
WANTED = frozenset(
    {"finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens", "timing"}
)


class Tensor(NamedTuple):
    name: str
    datatype: str
    values: Sequence[Any]


def new_request_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Request:
    """One request; exactly one of prompt, token_ids, prompts, messages, embedding is given.

    `messages` is a list of chat messages, or the object of the contract (`messages`, `tools`, ...).
    `sampling` holds names of vLLM's SamplingParams, and `lora_name`. `want` names optional outputs.
    """

    model: str = DEFAULT_MODEL
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    prompts: Sequence[str] | None = None
    messages: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None
    embedding: Mapping[str, Any] | None = None
    images: Sequence[str] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = True
    timeout_s: float | None = None
    priority: int | None = None
    want: frozenset[str] = WANTED
    request_id: str = field(default_factory=new_request_id)

    def __post_init__(self) -> None:
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidArgument(
                f"exactly one of {', '.join(_SOURCES)} is needed; got {', '.join(given) or 'none'}"
            )
        if self.timeout_s is not None and not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise InvalidArgument(f"timeout_s: got {self.timeout_s}, allowed: more than 0")

    def tensors(self, takes: Collection[str] | None = None) -> list[Tensor]:
        """The input tensors; optional asks that a model does not take (`takes`: its inputs) are left out.

        InvalidArgument: the model does not take something that matters.
        """
        needed = self._needed()
        if takes is not None:
            missing = [tensor.name for tensor in needed if tensor.name not in takes]
            if missing:
                raise InvalidArgument(
                    f"model {self.model!r} has no input {missing[0]!r}; it has: {', '.join(sorted(takes))}"
                )
        return needed + [tensor for tensor in self._optional() if takes is None or tensor.name in takes]

    def _needed(self) -> list[Tensor]:
        tensors = [self._source()]
        if self.images:
            tensors.append(Tensor("image", "BYTES", list(self.images)))
        if self.sampling:
            tensors.append(Tensor("sampling_parameters", "BYTES", [_json(self.sampling)]))
        if self.priority is not None:
            tensors.append(Tensor("priority", "INT32", [self.priority]))
        return tensors

    def _source(self) -> Tensor:
        if self.token_ids is not None:
            return Tensor("input_ids", "INT64", list(self.token_ids))
        if self.prompts is not None:
            return Tensor("prompts", "BYTES", list(self.prompts))
        if self.messages is not None:
            return Tensor("messages", "BYTES", [_json(self.messages)])
        if self.embedding is not None:
            return Tensor("embedding_request", "BYTES", [_json(self.embedding)])
        return Tensor("text_input", "BYTES", [self.prompt])

    def _optional(self) -> list[Tensor]:
        tensors = [Tensor(f"return_{name}", "BOOL", [True]) for name in sorted(self.want)]
        if self.embedding is None:
            tensors += [
                Tensor("stream", "BOOL", [self.stream]),
                Tensor("exclude_input_in_output", "BOOL", [True]),
            ]
        if not self.sampling:
            # Present even when empty: without it a model may take the request's parameters for sampling ones.
            tensors.append(Tensor("sampling_parameters", "BYTES", ["{}"]))
        if self.timeout_s is not None:
            tensors.append(Tensor("timeout_ms", "INT32", [min(math.ceil(self.timeout_s * 1000), 2**31 - 1)]))
        return tensors


_SOURCES = ("prompt", "token_ids", "prompts", "messages", "embedding")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"not JSON: {error}") from error


def to_grpc(request: Request, takes: Collection[str] | None = None) -> Any:
    """The ModelInferRequest."""
    return _message(request.model, request.request_id, request.tensors(takes))


def cancel_to_grpc(request: Request) -> Any:
    """The ModelInferRequest that cancels this request."""
    return _message(request.model, new_request_id(), [Tensor("cancel", "BYTES", [request.request_id])])


def _message(model: str, request_id: str, tensors: Sequence[Tensor]) -> Any:
    """It asks for the empty final response: every answer has a visible end."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[len(tensor.values)])
        try:
            message.raw_input_contents.append(pack(tensor.datatype, tensor.values))
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{tensor.name}: no valid text at character {error.start}: half a surrogate pair"
            ) from error
        except Exception as error:
            raise InvalidArgument(f"{tensor.name}: {error}") from error
    return message


def to_json(request: Request, takes: Collection[str] | None = None) -> dict[str, Any]:
    """The body for HTTP /generate and /generate_stream: tensors as top-level fields."""
    body: dict[str, Any] = {"id": request.request_id}
    for tensor in request.tensors(takes):
        single = len(tensor.values) == 1 and tensor.name not in _LISTS
        body[tensor.name] = tensor.values[0] if single else list(tensor.values)
    return body


_LISTS = {"image", "input_ids", "prompts"}


def request_for(
    prompt: str | Request | None = None,
    *,
    model: str | None = None,
    token_ids: Sequence[int] | None = None,
    prompts: Sequence[str] | None = None,
    messages: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    images: Sequence[str] = (),
    stream: bool = True,
    timeout_s: float | None = None,
    priority: int | None = None,
    want: Collection[str] = (),
    request_id: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    **more_sampling: Any,
) -> Request:
    """A request from the arguments that the clients' methods take.

    `want` adds optional outputs (`token_ids`, `logprobs`, ...) to the usual ones; every other keyword
    (`max_tokens`, `temperature`, `stop`, ...) is a sampling parameter.
    """
    if isinstance(prompt, Request):
        return prompt if prompt.stream == stream else replace(prompt, stream=stream)
    extras = {"tools": tools, "tool_choice": tool_choice, "chat_template_kwargs": chat_template_kwargs}
    given = {name: value for name, value in extras.items() if value is not None}
    if given and messages is None:
        raise InvalidArgument(f"{', '.join(given)}: only with messages")
    if given and isinstance(messages, Mapping):
        messages = {**messages, **given}
    elif given:
        messages = {"messages": messages, **given}
    return Request(
        model=model or DEFAULT_MODEL,
        prompt=prompt,
        token_ids=token_ids,
        prompts=prompts,
        messages=messages,
        images=images,
        sampling={**(sampling or {}), **more_sampling},
        stream=stream,
        timeout_s=timeout_s,
        priority=priority,
        want=WANTED.union(want),
        request_id=request_id or new_request_id(),
    )
