"""The plainest gRPC client: protobuf messages as they cross the wire, nothing hidden, nothing added."""

from __future__ import annotations

import contextlib
import json
import queue
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


def text_tensor(request: Any, name: str, *values: bytes | str) -> None:
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = name, "BYTES"
    tensor.shape.append(len(values))
    for value in values:
        tensor.contents.bytes_contents.append(value if isinstance(value, bytes) else value.encode())


def typed_tensor(request: Any, name: str, datatype: str, *values: Any) -> None:
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = name, datatype
    tensor.shape.append(len(values))
    field_name = {"BOOL": "bool_contents", "INT32": "int_contents", "INT64": "int64_contents"}[datatype]
    getattr(tensor.contents, field_name).extend(values)


def build(text: str | None = None, *, id: str = "", model: str = "vllm", **inputs: Any) -> Any:
    """A request. bool -> BOOL, int -> INT32, list of int -> INT64, list of text or text -> BYTES, dict -> its JSON."""
    request = service_pb2.ModelInferRequest(model_name=model, id=id)
    if text is not None:
        inputs = {"text_input": text, **inputs}
    parameters = inputs.pop("parameters", {})
    for name, value in parameters.items():
        kind = (
            "bool" if isinstance(value, bool) else {int: "int64", float: "double", str: "string"}[type(value)]
        )
        setattr(request.parameters[name], f"{kind}_param", value)
    for name, value in inputs.items():
        if isinstance(value, bool):
            typed_tensor(request, name, "BOOL", value)
        elif isinstance(value, int):
            typed_tensor(request, name, "INT32", value)
        elif isinstance(value, list) and value and isinstance(value[0], int):
            typed_tensor(request, name, "INT64", *value)
        elif isinstance(value, list) and name in ("prompts", "image"):
            text_tensor(request, name, *value)
        else:
            text_tensor(request, name, value if isinstance(value, str | bytes) else json.dumps(value))
    return request


@dataclass
class Answer:
    """All responses of one request, in order."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    finals: int = 0
    error: str | None = None
    errors: int = 0

    @property
    def text(self) -> str:
        return "".join(r["text_output"][0] for r in self.responses)

    def texts(self, index: int = 0) -> str:
        return "".join(r["text_output"][index] for r in self.responses)

    def joined(self, name: str) -> list[Any]:
        return [value for r in self.responses for value in r.get(name, [])]

    @property
    def last(self) -> dict[str, Any]:
        return self.responses[-1]


def decode(response: Any) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for i, output in enumerate(response.outputs):
        raw = response.raw_output_contents[i]
        if output.datatype == "BYTES":
            values[output.name] = list(_texts(raw))
        else:
            code = {"UINT32": "I", "INT32": "i", "FP32": "f", "INT64": "q"}[output.datatype]
            values[output.name] = list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))
        values[f"{output.name}.shape"] = list(output.shape)
    return values


def _texts(raw: bytes) -> Iterator[str]:
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        yield raw[position + 4 : position + 4 + length].decode("utf-8")
        position += 4 + length


def is_final(message: Any) -> bool:
    """Triton's own refusals (wrong types, unknown tensors) carry no mark; nothing follows them."""
    parameters = message.infer_response.parameters
    if "triton_final_response" in parameters:
        return bool(parameters["triton_final_response"].bool_param)
    return bool(message.error_message)


class WireClient:
    """One bidirectional stream; requests are told apart by id."""

    def __init__(self, address: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._all_answered = False
        self.call = self.stub.ModelStreamInfer(iter(self._requests.get, None), metadata=metadata)

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._requests.put(None)
        if self._all_answered:
            # Read to the end: Triton 24.10 never frees a response whose stream is reset just after the final mark,
            # and a model with such a response cannot be unloaded (docs/operations.md).
            with contextlib.suppress(grpc.RpcError):
                for _ in self.call:
                    pass
        self.channel.close()

    def send(self, request: Any) -> None:
        self._requests.put(request)

    def cancel(self) -> None:
        self.call.cancel()

    def messages(self) -> Iterator[Any]:
        yield from self.call

    def answers(self, *requests: Any, known: Sequence[str] = ()) -> dict[str, Answer]:
        """Sends all, and reads until each has its final response, as do those sent before (ids: `known`)."""
        answers = {request_id: Answer() for request_id in [*known, *(request.id for request in requests)]}
        self._all_answered = False
        for request in requests:
            # An empty final response is asked for: without, a flag-only end would be invisible.
            request.parameters["triton_enable_empty_final_response"].bool_param = True
            self.send(request)
        for message in self.call:
            answer = answers[message.infer_response.id]
            if message.error_message:
                answer.error = message.error_message
                answer.errors += 1
            elif message.infer_response.outputs:
                answer.responses.append(decode(message.infer_response))
            if is_final(message):
                answer.finals += 1
            if all(a.finals for a in answers.values()):
                self._all_answered = True
                break
        return answers

    def answer(self, request: Any) -> Answer:
        request.id = request.id or "only"
        return self.answers(request)[request.id]


def ask(address: str, text: str | None = None, **inputs: Any) -> Answer:
    """One request on a stream of its own."""
    with WireClient(address) as client:
        return client.answer(build(text, **inputs))
