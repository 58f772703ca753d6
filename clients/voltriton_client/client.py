"""The blocking client: `Client("127.0.0.1:8001").generate("Once")`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from voltriton_client import core
from voltriton_client.calls import Call, Stream, start
from voltriton_client.channel import MAX_MESSAGE_BYTES, Target, Tls
from voltriton_client.errors import Cancelled, VoltritonError
from voltriton_client.request import Request, request_for
from voltriton_client.response import ResponseReader
from voltriton_client.shared import SharedStream
from voltriton_client.types import Chunk, Collector, ModelInfo, Result


class _CallHolder:
    """The call that a stream has going at the moment: it may be replaced while connecting."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.cancelled = False

    def take(self, call: Call) -> Call:
        self.call = call
        if self.cancelled:
            call.leave()
        return call

    def cancel(self) -> None:
        self.cancelled = True
        if self.call is not None:
            self.call.leave()


class Client:
    """A Triton server with voltriton's (or NVIDIA's vLLM backend's) models, over gRPC.

    Safe for several threads. Every call may raise what `voltriton_client.errors` lists.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        connect_timeout_s: float = 5.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        retries: bool = True,
    ) -> None:
        self.target = Target(address, tls, api_key, metadata, connect_timeout_s, max_message_bytes, retries)
        self._channel = self.target.open()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._inputs: dict[str, frozenset[str]] = {}
        self._calls: set[Call] = set()
        self._shared: set[SharedStream] = set()

    def close(self) -> None:
        """Cancel what is still open, and end the connection."""
        calls = list(self._calls)
        for call in calls:
            call.leave()
        for call in calls:
            call.over.wait(core.LEAVE_S)
        for shared in list(self._shared):
            shared.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def live(self) -> bool:
        return bool(self._ask("ServerLive", core.LIVE).live)

    def ready(self) -> bool:
        return bool(self._ask("ServerReady", core.READY).ready)

    def model_ready(self, model: str) -> bool:
        return bool(self._ask("ModelReady", pb.ModelReadyRequest(name=model)).ready)

    def models(self) -> list[ModelInfo]:
        """What the server's repository has, ready or not; only what is ready where the repository is restricted."""
        try:
            return core.models_of(self._ask("RepositoryIndex", core.INDEX))
        except VoltritonError as error:
            if not core.is_restricted(error):
                raise
        return core.loaded_models_of(self._ask("ModelStatistics", core.STATISTICS))

    def wait_ready(self, model: str, timeout_s: float) -> None:
        """Return once the model is ready; raise what was wrong when the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._takes(model)
                return
            except VoltritonError as error:
                if error.code not in ("UNAVAILABLE", "NOT_FOUND") or time.monotonic() >= deadline:
                    raise
            time.sleep(core.RETRY_PAUSE_S)

    def stream(self, prompt: str | Request | None = None, **options: Any) -> Stream:
        """Stream an answer (arguments: `request_for`). The request goes out at the first `next`."""
        holder = _CallHolder()
        return Stream(self._chunks(request_for(prompt, **options), holder), holder.cancel)

    def generate(self, prompt: str | Request | None = None, **options: Any) -> Result:
        """The whole answer at once. The arguments are those of `request_for`."""
        request = request_for(prompt, stream=False, **options)
        collector = Collector(request.request_id)
        for chunk in self._chunks(request, _CallHolder()):
            collector.add(chunk)
        return collector.result()

    def chat(self, messages: Any, **options: Any) -> Result:
        """The whole answer to a list of chat messages."""
        return self.generate(messages=messages, **options)

    def embed(self, text: str | Sequence[int], *, model: str | None = None, **options: Any) -> list[float]:
        """The embedding of a text or of token ids."""
        result = self.generate(core.embedding_request(text, model, options))
        return core.vector_of(result)

    def open_stream(self) -> SharedStream:
        """One gRPC stream for many requests."""
        return SharedStream(self)

    def generate_many(
        self, requests: Iterable[Request], concurrency: int = 8
    ) -> Iterator[tuple[int, Result | VoltritonError]]:
        """Answers as they come, each with the number of its request; all on one gRPC stream."""
        with self.open_stream() as shared:
            yield from shared.generate_many(requests, concurrency)

    # The call itself.

    def _ask(self, method: str, message: Any) -> Any:
        """A unary call; tried again while nothing could be sent."""
        retry = core.Retry(self.target)
        while True:
            try:
                return getattr(self._stub, method)(
                    message, metadata=self.target.call_metadata, timeout=self.target.connect_timeout_s
                )
            except grpc.RpcError as error:
                if not retry.allows(error):
                    raise core.unary_failure(error, self.target) from error
            time.sleep(core.RETRY_PAUSE_S)

    def _takes(self, model: str) -> frozenset[str]:
        if model not in self._inputs:
            metadata = self._ask("ModelMetadata", pb.ModelMetadataRequest(name=model))
            self._inputs[model] = core.inputs_of(metadata)
        return self._inputs[model]

    def _chunks(self, request: Request, holder: _CallHolder) -> Iterator[Chunk]:
        takes = self._takes(request.model)
        message = core.message_for(request, takes)
        reader = ResponseReader(request.request_id)
        try:
            for response in self._responses(request, message, takes, holder, reader):
                yield from reader.feed(response)
            reader.end()
        except VoltritonError:
            # The model may have been loaded anew with other inputs.
            self._inputs.pop(request.model, None)
            raise
        finally:
            holder.cancel()

    def _responses(
        self,
        request: Request,
        message: Any,
        takes: frozenset[str],
        holder: _CallHolder,
        reader: ResponseReader,
    ) -> Iterator[Any]:
        retry = core.Retry(self.target)
        while not holder.cancelled:
            call = holder.take(start(Call, self, request, message, takes))
            try:
                yield from call
                core.check_not_left(call.left, reader)
                return
            except grpc.RpcError as error:
                core.check_not_left(call.left, reader)
                if holder.cancelled or not retry.allows(error):
                    raise core.stream_failure(error, self.target, request, reader) from error
            finally:
                call.leave()
            time.sleep(core.RETRY_PAUSE_S)
        raise Cancelled("cancelled before it was sent", request.request_id)
