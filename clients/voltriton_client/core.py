"""What the blocking and the asyncio client have in common; neither network nor threads here."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from voltriton_client.channel import Target
from voltriton_client.errors import (
    AnswerCut,
    Cancelled,
    DeadlineExceeded,
    Internal,
    Unavailable,
    VoltritonError,
    from_rpc,
    is_of_contract,
    nothing_was_sent,
)
from voltriton_client.request import DEFAULT_MODEL, Request, cancel_to_grpc, to_grpc
from voltriton_client.response import ResponseReader, is_last
from voltriton_client.types import ModelInfo, Result

# The server's own answer to a passed deadline says more than gRPC's, so it is given this much longer.
DEADLINE_GRACE_S = 2.0
RETRY_PAUSE_S = 0.2
# A stream that is left gets so long to end, once the server was told to cancel its request; then it is reset.
LEAVE_S = 1.0
_LOST_CODES = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "ABORTED")
_LOST = (
    "Socket closed",
    "Connection reset",
    "GOAWAY",
    "RST_STREAM",
    "Broken pipe",
    "recvmsg",
    "ping timeout",
    "Cancelling all calls",
    "Stream removed",
    "Internal error from Core",  # grpc.aio, of a connection that ended without a status
)


def rpc_timeout_s(request: Request, takes: frozenset[str]) -> float | None:
    """The limit for the call itself."""
    if request.timeout_s is None:
        return None
    return request.timeout_s + (DEADLINE_GRACE_S if "timeout_ms" in takes else 0.0)


class Deadline:
    """When a request on a shared stream is given up: gRPC itself limits only the stream as a whole."""

    def __init__(self, request: Request, takes: frozenset[str]) -> None:
        limit_s = rpc_timeout_s(request, takes)
        self._request = request
        self.until = math.inf if limit_s is None else time.monotonic() + limit_s

    @property
    def left_s(self) -> float | None:
        """The time that is left, for a wait; None: there is no limit."""
        return None if self.until == math.inf else max(0.0, self.until - time.monotonic())

    def error(self) -> DeadlineExceeded:
        return no_end_within(self._request)


def no_end_within(request: Request) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"no end of the answer within {request.timeout_s} s (timeout_s)", request.request_id
    )


def message_for(request: Request, takes: frozenset[str]) -> Any:
    return to_grpc(request, takes)


def cancel_for(request: Request, takes: frozenset[str]) -> Any | None:
    """The message that cancels a request; None: the model takes none, only a reset of the stream is left."""
    return cancel_to_grpc(request) if "cancel" in takes else None


def inputs_of(metadata: Any) -> frozenset[str]:
    """Names of a model's inputs, of a ModelMetadataResponse."""
    return frozenset(tensor.name for tensor in metadata.inputs)


def models_of(index: Any) -> list[ModelInfo]:
    """The lines of a RepositoryIndexResponse."""
    return [ModelInfo(model.name, model.version, model.state, model.reason) for model in index.models]


def is_restricted(error: VoltritonError) -> bool:
    """`voltriton serve` keeps the repository's calls, the index among them, to itself."""
    return "restricted" in str(error)


def loaded_models_of(statistics: Any) -> list[ModelInfo]:
    """The models of a ModelStatisticsResponse, which names those that are loaded and no others."""
    return [ModelInfo(model.name, model.version, "READY", "") for model in statistics.model_stats]


def stream_failure(error: Any, target: Target, request: Request, reader: ResponseReader) -> VoltritonError:
    """The exception for a stream that broke, given the grpc.RpcError."""
    code, details = code_of(error), error.details() or ""
    if code == "DEADLINE_EXCEEDED":
        return no_end_within(request)
    if _was_lost(code, details, anyhow=reader.started and not is_of_contract(details)):
        try:
            reader.end(f"the connection to {target.address} was lost")
        except AnswerCut as cut:
            return cut
    return from_rpc(code, details, target.address, request.request_id)


def _was_lost(code: str, details: str, anyhow: bool = False) -> bool:
    """Whether a connection ended amid a call, by gRPC's words, or `anyhow` by its code."""
    by_words = anyhow or any(word in details for word in _LOST)
    return code in _LOST_CODES and by_words and not nothing_was_sent(code, details)


def closed_here(request_id: str) -> Cancelled:
    return Cancelled("this side closed the answer before its end", request_id)


def check_not_left(left: bool, reader: ResponseReader) -> None:
    """Cancelled where this side left a stream, whose rest somebody else has read."""
    if left and not reader.final:
        raise closed_here(reader.request_id)


def code_of(error: Any) -> str:
    """The name of a grpc.RpcError's status code."""
    return str(error.code().name)


class Retry:
    """Says whether to try again: only while the time to connect lasts, and only what was never sent."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + (target.connect_timeout_s if target.retries else 0.0)

    def allows(self, error: Any) -> bool:
        return nothing_was_sent(code_of(error), error.details() or "") and self._clock() < self._until


class Router:
    """Sorts what comes on a stream of many requests to the one that it belongs to, by id."""

    def __init__(self) -> None:
        self._open: dict[str, Callable[[Any], None]] = {}
        # Requests that the server may be at work on, each with what cancels it (None: nothing does).
        self._unended: dict[str, Any | None] = {}

    def add(self, request_id: str, put: Callable[[Any], None], cancel: Any | None) -> None:
        if request_id in self._open or request_id in self._unended:
            raise ValueError(f"request id {request_id!r} is in use on this stream")
        self._open[request_id] = put
        self._unended[request_id] = cancel

    def drop(self, request_id: str) -> list[Any]:
        """Listen no more; returns what is to be sent (at most one message), so that the server works no more."""
        cancel = self._unended.get(request_id) if self._open.pop(request_id, None) else None
        return [] if cancel is None else [cancel]

    def cancels(self) -> list[Any | None]:
        """What cancels the requests that have not ended, one for each."""
        return list(self._unended.values())

    def route(self, message: Any) -> None:
        """An error without an id can be anybody's: all are told, for waiting in vain is worse."""
        request_id = message.infer_response.id
        if is_last(message):
            self._unended.pop(request_id, None)
        if request_id:
            if put := self._open.get(request_id):
                put(message)
            return
        for put in list(self._open.values()):
            put(message)

    def fail(self, error: Any) -> None:
        """The stream is over: `error` is a grpc.RpcError, or None for an orderly end."""
        for put in list(self._open.values()):
            put(error)
        self._open.clear()


LIVE = pb.ServerLiveRequest()
READY = pb.ServerReadyRequest()
INDEX = pb.RepositoryIndexRequest()
STATISTICS = pb.ModelStatisticsRequest()


def unary_failure(error: Any, target: Target) -> VoltritonError:
    """The exception for a unary call that failed."""
    code, details = code_of(error), error.details() or ""
    if code == "DEADLINE_EXCEEDED":
        return Unavailable(
            f"{target.address} takes the connection and gives no answer within {target.connect_timeout_s} s: "
            "no gRPC server, or one that hangs"
        )
    if _was_lost(code, details):
        return Unavailable(
            f"the connection to {target.address} was lost: the server or what is before it went away; "
            "`voltriton status` says whether it is back"
        )
    return from_rpc(code, details, target.address)


def over(error: Any, target: Target) -> VoltritonError:
    """What to say to a request on a stream that has ended."""
    if error is None:
        return Unavailable("this stream is closed: open a new one")
    return from_rpc(code_of(error), error.details() or "", target.address)


def embedding_request(text: str | Sequence[int], model: str | None, pooling: Mapping[str, Any]) -> Request:
    """A request for an embedding; `pooling` are pooling parameters, as `dimensions`."""
    body: dict[str, Any] = {"input": text if isinstance(text, str) else list(text)}
    if pooling:
        body["pooling_params"] = dict(pooling)
    want = frozenset({"num_input_tokens"})
    return Request(model=model or DEFAULT_MODEL, embedding=body, want=want, stream=False)


def vector_of(result: Result) -> list[float]:
    """The numbers that an embedding's text output holds."""
    try:
        vector = json.loads(result.text)
    except json.JSONDecodeError as error:
        raise Internal(f"the embedding is no JSON: {error}") from error
    if not isinstance(vector, list):
        raise Internal("the embedding is no list of numbers")
    return vector
