"""A gRPC server in this process that follows docs/contract.md with scripted answers: no Triton, no engine.

The prompt (or the last message's text) says what happens:
    !error CODE text     the contract's error            !raw text     an error in Triton's own words
    !cut N               N tokens, then the connection's status is UNAVAILABLE
    !end N               N tokens, then an orderly end of the stream without the final flag
    !long                tokens until cancelled           !silent       nothing until cancelled
    !slow S text         S seconds before every token     !late S text  S seconds before the first token
    !big N               one token of N bytes             !think        reasoning, then an answer
    !tool                a call of the first tool given   !flag         final flag in a response of its own
    anything else        the text itself, word by word
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from voltriton_client.response import is_last
from voltriton_client.tensors import pack, unpack

CONTRACT_INPUTS = [
    "text_input",
    "image",
    "stream",
    "sampling_parameters",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "embedding_request",
    "input_ids",
    "messages",
    "prompts",
    "priority",
    "timeout_ms",
    "request_id",
    "cancel",
    "return_token_ids",
    "return_stop_reason",
    "return_num_cached_tokens",
    "return_timing",
    "return_prompt_logprobs",
]
OFFICIAL_INPUTS = CONTRACT_INPUTS[:11]
_GRPC = {code.name: code for code in grpc.StatusCode}


@dataclass
class Model:
    inputs: list[str] = field(default_factory=lambda: list(CONTRACT_INPUTS))
    state: str = "READY"
    platform: str = "vllm"
    reason: str = ""


class Asked(dict[str, Any]):
    """A request's inputs by name: single values as they are, lists as lists."""

    @property
    def text(self) -> str:
        if "messages" in self:
            messages = json.loads(self["messages"])
            last = (messages["messages"] if isinstance(messages, dict) else messages)[-1]["content"]
            return last if isinstance(last, str) else "".join(part.get("text", "") for part in last)
        if "input_ids" in self:
            return " ".join(f"t{number}" for number in self["input_ids"])
        return str(self.get("text_input", ""))

    @property
    def sampling(self) -> dict[str, Any]:
        return dict(json.loads(self.get("sampling_parameters", "{}")))


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`with FakeServer() as server: Client(server.address)`."""

    def __init__(self, options: list[tuple[str, Any]] | None = None, credentials: Any = None) -> None:
        self.models = {
            "vllm": Model(),
            "chat": Model(["messages", "sampling_parameters"], platform="ensemble"),
        }
        self.asked: list[Asked] = []
        self.metadata: list[dict[str, str]] = []
        self.cancelled: list[str] = []
        self.streams = 0
        # Streams that their client reset.
        self.resets = 0
        # When set, a request that cancels is answered and does nothing.
        self.deaf = False
        # Requests in work, by id: what ends them.
        self.open: dict[str, threading.Event] = {}
        # Requests in work now.
        self.active: set[int] = set()
        self.refuse_ready = False
        # As behind `voltriton serve`: the calls of the repository need a key.
        self.restricted = False
        # When set, every request is answered with this error.
        self.overload = ""
        # A stream of a client that left keeps its thread until its script ends: many must fit beside each other.
        self._pool = ThreadPoolExecutor(512)
        self._server = grpc.server(self._pool, options=options or [])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        if credentials:
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        else:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()

    # Unary calls.

    def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=not self.refuse_ready)

    def ModelReady(self, request: Any, context: Any) -> Any:
        model = self.models.get(request.name)
        return pb.ModelReadyResponse(ready=bool(model and model.state == "READY"))

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        self._refuse(request.name, context)
        answer = pb.ModelMetadataResponse(name=request.name, platform=self.models[request.name].platform)
        for name in self.models[request.name].inputs:
            answer.inputs.add(name=name, datatype="BYTES", shape=[-1])
        return answer

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        if self.restricted:
            # Triton's own words.
            words = "This protocol is restricted, expecting header 'triton-grpc-protocol-voltriton-key'"
            context.abort(grpc.StatusCode.UNAVAILABLE, words)
        answer = pb.RepositoryIndexResponse()
        for name, model in self.models.items():
            answer.models.add(name=name, version="1", state=model.state, reason=model.reason)
        return answer

    def ModelStatistics(self, request: Any, context: Any) -> Any:
        answer = pb.ModelStatisticsResponse()
        for name, model in self.models.items():
            if model.state == "READY":
                answer.model_stats.add(name=name, version="1")
        return answer

    def ModelInfer(self, request: Any, context: Any) -> Any:
        context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        )

    def _refuse(self, name: str, context: Any) -> None:
        model = self.models.get(name)
        if model is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        elif model.state != "READY":
            context.abort(
                grpc.StatusCode.UNAVAILABLE, f"Request for unknown model: '{name}' has no available versions"
            )

    # The stream.

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.streams += 1
        self.metadata.append(dict(context.invocation_metadata()))
        stream = OneStream(context, self._reset)
        threading.Thread(target=self._receive, args=(requests, stream), daemon=True).start()
        with_code = self.metadata[-1].get("triton_grpc_error") == "true"
        while (item := stream.out.get()) is not None:
            if isinstance(item, Status):
                stream.ended = True
                if item.code is grpc.StatusCode.OK:
                    return
                context.abort(item.code, item.text)
            if with_code and item.error_message:
                word = item.error_message.split(":")[0]
                stream.ended = True
                context.abort(_GRPC.get(word, grpc.StatusCode.INTERNAL), item.error_message)
            yield item
        stream.ended = True

    def _reset(self) -> None:
        self.resets += 1

    def _receive(self, requests: Iterator[Any], stream: OneStream) -> None:
        """Each request of the stream answers in a thread of its own, as instances of a decoupled model do."""
        workers = []
        # The client may leave: gRPC then ends the iterator with an exception of its own.
        with contextlib.suppress(Exception):
            for request in requests:
                worker = threading.Thread(target=self._work, args=(request, stream), daemon=True)
                worker.start()
                workers.append(worker)
        for worker in workers:
            worker.join()
        stream.out.put(None)

    def _work(self, request: Any, stream: OneStream) -> None:
        asked = read(request)
        self.asked.append(asked)
        if "cancel" in asked:
            stream.out.put(self._cancel(request, asked["cancel"]))
            return
        self.active.add(id(request))
        gone = self.open[request.id] = stream.begin()
        last = False
        try:
            for item in self._answer(request, asked, gone):
                if gone.is_set():
                    break
                stream.out.put(item)
                last = isinstance(item, Status) or is_last(item)
        except Exception as error:
            stream.out.put(failed(request.id, f"INTERNAL: fake: {error!r}"))
        finally:
            self.active.discard(id(request))
            self.open.pop(request.id, None)
        if gone.is_set() and not last:
            self.cancelled.append(request.id)
            stream.out.put(failed(request.id, "CANCELLED: Request was cancelled"))

    def _answer(self, request: Any, asked: Asked, gone: threading.Event) -> Iterator[Any]:
        if self.overload:
            yield failed(request.id, self.overload)
        else:
            yield from answer(request, asked, gone)

    def _cancel(self, request: Any, victim: str) -> Any:
        if "cancel" not in self.models[request.model_name].inputs:
            # Triton's own words; the client may have asked for the inputs before the model was loaded anew.
            return failed("", "unexpected inference input 'cancel' for model 'vllm'")
        if self.deaf:
            return response(request.id, {}, True)
        if gone := self.open.get(victim):
            gone.set()
        return response(request.id, {"text_output": ("BYTES", [""])}, True)


class OneStream:
    """A client's stream: what is to be sent on it, and what ends each of its requests."""

    def __init__(self, context: Any, on_reset: Callable[[], None]) -> None:
        self.out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = False
        self._context = context
        self._on_reset = on_reset
        self._requests: list[threading.Event] = []
        context.add_callback(self._over)

    def begin(self) -> threading.Event:
        gone = threading.Event()
        self._requests.append(gone)
        if not self._context.is_active():
            gone.set()
        return gone

    def _over(self) -> None:
        if not self.ended:
            self._on_reset()
        for gone in self._requests:
            gone.set()


@dataclass
class Status:
    code: Any
    text: str


def read(request: Any) -> Asked:
    asked = Asked()
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        values = unpack(tensor.datatype, raw)
        asked[tensor.name] = values if tensor.name in ("input_ids", "prompts", "image") else values[0]
    asked["_id"] = request.id
    asked["_model"] = request.model_name
    return asked


def failed(request_id: str, text: str) -> Any:
    message = pb.ModelStreamInferResponse(error_message=text)
    message.infer_response.id = request_id
    message.infer_response.parameters["triton_final_response"].bool_param = True
    return message


def response(request_id: str, outputs: dict[str, tuple[str, list[Any]]], final: bool) -> Any:
    message = pb.ModelStreamInferResponse()
    message.infer_response.id = request_id
    message.infer_response.parameters["triton_final_response"].bool_param = final
    for name, (datatype, values) in outputs.items():
        message.infer_response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        message.infer_response.raw_output_contents.append(pack(datatype, values))
    return message


def answer(request: Any, asked: Asked, gone: threading.Event) -> Iterator[Any]:
    text = asked.text
    word, _, rest = text.partition(" ")
    if "embedding_request" in asked:
        body = json.loads(asked["embedding_request"])
        length = len(body["input"])
        yield response(
            request.id,
            {
                "text_output": ("BYTES", [json.dumps([length, 0.5, -0.25])]),
                "num_input_tokens": ("UINT32", [length]),
            },
            True,
        )
    elif word == "!error":
        code, _, why = rest.partition(" ")
        yield failed(request.id, f"{code}: {why}")
    elif word == "!raw":
        yield failed(request.id, rest)
    elif word in ("!cut", "!end"):
        yield from tokens(request.id, asked, ["tok "] * int(rest), ended=False)
        yield Status(grpc.StatusCode.UNAVAILABLE if word == "!cut" else grpc.StatusCode.OK, "Socket closed")
    elif word in ("!long", "!silent"):
        yield from until_gone(request.id, asked, gone, word == "!long")
    elif word in ("!slow", "!late"):
        delay, _, said = rest.partition(" ")
        yield from slow(request.id, asked, words(said), float(delay), word == "!slow", gone)
    elif word == "!big":
        yield from tokens(request.id, asked, ["x" * int(rest)])
    elif word == "!think":
        yield from tokens(request.id, asked, ["", "It is 4."], reasoning=["Two and two. ", ""])
    elif word == "!tool":
        yield from tool_call(request.id, asked)
    elif word == "!flag":
        yield from tokens(request.id, asked, words("said before"), ended=False, finish_last=True)
        yield response(request.id, {}, True)
    else:
        yield from tokens(request.id, asked, words(text))


def words(text: str) -> list[str]:
    return re.findall(r"\S+\s*|\s+", text) or [""]


def tokens(
    request_id: str, asked: Asked, pieces: list[str], ended: bool = True, **more: Any
) -> Iterator[Any]:
    """The pieces as one token each, in n sequences that differ by their number in front."""
    limit = asked.sampling.get("max_tokens")
    reason = "length" if limit is not None and limit < len(pieces) else "stop"
    pieces = pieces[:limit]
    n = asked.sampling.get("n", 1)
    finish_last = more.pop("finish_last", ended)
    if not asked.get("stream"):
        more = {name: ["".join(values)] for name, values in more.items()}
        yield response(request_id, outputs(asked, ["".join(pieces)], 0, n, len(pieces), reason, more), ended)
        return
    for at, piece in enumerate(pieces):
        last = at == len(pieces) - 1
        here = {name: [values[at]] for name, values in more.items()}
        named = reason if last and finish_last else "None"
        yield response(request_id, outputs(asked, [piece], at, n, 1, named, here), last and ended)


def outputs(
    asked: Asked, pieces: list[str], at: int, n: int, count: int, finish: str, more: dict[str, list[str]]
) -> dict[str, Any]:
    texts = [pieces[0] if n == 1 or at else f"{index}:{pieces[0]}" for index in range(n)]
    made: dict[str, Any] = {"text_output": ("BYTES", texts)}
    ids = [100 + at + step for step in range(count)]
    wanted = {
        "finish_reason": ("BYTES", [finish] * n),
        "stop_reason": ("BYTES", ["null"] * n),
        "num_input_tokens": ("UINT32", [max(1, len(words(asked.text)))]),
        "num_output_tokens": ("UINT32", [count] * n),
        "num_cached_tokens": ("UINT32", [1]),
        "token_ids": ("INT32", ids * n),
        "logprobs": ("BYTES", [json.dumps([logprob(number, asked) for number in ids])] * n),
        "cumulative_logprob": ("FP32", [-0.5] * n),
    }
    if finish != "None":
        times = {"queue_ms": 1.0, "prefill_ms": 2.0, "first_token_ms": 3.0, "total_ms": 9.0}
        wanted["timing"] = ("BYTES", [json.dumps(times)])
    made.update({name: value for name, value in wanted.items() if asked.get(f"return_{name}")})
    if "reasoning" in more:
        made["reasoning_output"] = ("BYTES", more["reasoning"])
    if "tool_calls" in more:
        made["tool_calls"] = ("BYTES", more["tool_calls"])
        if finish != "None":
            made["finish_reason"] = ("BYTES", ["tool_calls"])
    return made


def logprob(number: int, asked: Asked) -> dict[str, Any]:
    """The chosen token and as many others as were asked for; the least likely one is impossible."""
    top = asked.sampling.get("logprobs") or 0
    chosen = {str(number): {"logprob": -0.5, "rank": 1, "decoded_token": f"<{number}>"}}
    others = {str(900 + at): {"logprob": -9999.0, "rank": at + 2, "decoded_token": "no"} for at in range(top)}
    return {**chosen, **others}


def until_gone(request_id: str, asked: Asked, gone: threading.Event, talk: bool) -> Iterator[Any]:
    limit_s = asked.get("timeout_ms", 30_000) / 1000
    until = time.monotonic() + limit_s
    at = 0
    while not gone.wait(0.01):
        if time.monotonic() > until:
            yield failed(request_id, f"DEADLINE_EXCEEDED: timeout_ms: no end within {limit_s * 1000:.0f} ms")
            return
        if talk and asked.get("stream"):
            yield response(request_id, outputs(asked, ["tick "], at, 1, 1, "None", {}), False)
            at += 1


def slow(
    request_id: str, asked: Asked, pieces: list[str], delay_s: float, each: bool, gone: threading.Event
) -> Iterator[Any]:
    for at, item in enumerate(tokens(request_id, asked, pieces)):
        if (at == 0 or each) and gone.wait(delay_s):
            return
        yield item


def tool_call(request_id: str, asked: Asked) -> Iterator[Any]:
    tool = json.loads(asked["messages"])["tools"][0]["function"]["name"]
    head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": tool, "arguments": ""}}
    if not asked.get("stream"):
        whole = {**head, "function": {"name": tool, "arguments": '{"city": "Bern"}'}}
        yield response(
            request_id, outputs(asked, [""], 0, 1, 5, "stop", {"tool_calls": [json.dumps([whole])]}), True
        )
        return
    parts = [{"index": 0, "function": {"arguments": text}} for text in ('{"city": ', '"Bern"}')]
    for at, delta in enumerate([head, *parts]):
        finish = "stop" if at == len(parts) else "None"
        yield response(
            request_id,
            outputs(asked, [""], at, 1, 1, finish, {"tool_calls": [json.dumps([delta])]}),
            finish != "None",
        )
