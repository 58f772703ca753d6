"""The asyncio client: the same methods as the blocking one; nothing here blocks the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from voltriton_client import core
from voltriton_client.calls import AsyncCall, start
from voltriton_client.channel import MAX_MESSAGE_BYTES, Target, Tls
from voltriton_client.errors import VoltritonError
from voltriton_client.request import Request, request_for
from voltriton_client.response import ResponseReader
from voltriton_client.types import Chunk, Collector, ModelInfo, Result


class AsyncClient:
    """As `voltriton_client.Client`. Make it and use it in one event loop."""

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
        self._channel = self.target.open_aio()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._inputs: dict[str, frozenset[str]] = {}
        self._calls: set[AsyncCall] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._shared: set[AsyncSharedStream] = set()

    async def close(self) -> None:
        """Cancel what is still open, and end the connection."""
        for call in list(self._calls):
            self._leave(call)
        if self._leaving:
            await asyncio.wait(self._leaving)
        for shared in list(self._shared):
            await shared.close()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def live(self) -> bool:
        return bool((await self._ask("ServerLive", core.LIVE)).live)

    async def ready(self) -> bool:
        return bool((await self._ask("ServerReady", core.READY)).ready)

    async def model_ready(self, model: str) -> bool:
        return bool((await self._ask("ModelReady", pb.ModelReadyRequest(name=model))).ready)

    async def models(self) -> list[ModelInfo]:
        """As `Client.models`."""
        try:
            return core.models_of(await self._ask("RepositoryIndex", core.INDEX))
        except VoltritonError as error:
            if not core.is_restricted(error):
                raise
        return core.loaded_models_of(await self._ask("ModelStatistics", core.STATISTICS))

    async def metadata(self, model: str) -> Any:
        """The ModelMetadataResponse of a model that is ready."""
        return await self._ask("ModelMetadata", pb.ModelMetadataRequest(name=model))

    async def stream(
        self, prompt: str | Request | None = None, **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Stream an answer; closing the iterator (`aclose`) or cancelling the task cancels the request."""
        async with aclosing(self._chunks(request_for(prompt, **options))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate(self, prompt: str | Request | None = None, **options: Any) -> Result:
        request = request_for(prompt, stream=False, **options)
        collector = Collector(request.request_id)
        async with aclosing(self._chunks(request)) as chunks:
            async for chunk in chunks:
                collector.add(chunk)
        return collector.result()

    async def chat(self, messages: Any, **options: Any) -> Result:
        return await self.generate(messages=messages, **options)

    async def embed(
        self, text: str | Sequence[int], *, model: str | None = None, **options: Any
    ) -> list[float]:
        return core.vector_of(await self.generate(core.embedding_request(text, model, options)))

    def open_stream(self) -> AsyncSharedStream:
        """One gRPC stream for many requests."""
        return AsyncSharedStream(self)

    async def _ask(self, method: str, message: Any) -> Any:
        retry = core.Retry(self.target)
        while True:
            try:
                return await getattr(self._stub, method)(
                    message, metadata=self.target.call_metadata, timeout=self.target.connect_timeout_s
                )
            except grpc.RpcError as error:
                if not retry.allows(error):
                    raise core.unary_failure(error, self.target) from error
            await asyncio.sleep(core.RETRY_PAUSE_S)

    async def _takes(self, model: str) -> frozenset[str]:
        if model not in self._inputs:
            self._inputs[model] = core.inputs_of(await self.metadata(model))
        return self._inputs[model]

    async def _chunks(self, request: Request) -> AsyncGenerator[Chunk, None]:
        takes = await self._takes(request.model)
        message = core.message_for(request, takes)
        reader = ResponseReader(request.request_id)
        try:
            async with aclosing(self._responses(request, message, takes, reader)) as responses:
                async for response in responses:
                    for chunk in reader.feed(response):
                        yield chunk
            reader.end()
        except VoltritonError:
            # The model may have been loaded anew with other inputs.
            self._inputs.pop(request.model, None)
            raise

    async def _responses(
        self, request: Request, message: Any, takes: frozenset[str], reader: ResponseReader
    ) -> AsyncGenerator[Any, None]:
        retry = core.Retry(self.target)
        while True:
            call = start(AsyncCall, self, request, message, takes)
            try:
                async for response in call:
                    yield response
                core.check_not_left(call.left, reader)
                return
            except grpc.RpcError as error:
                if not retry.allows(error):
                    raise core.stream_failure(error, self.target, request, reader) from error
            finally:
                self._leave(call)
            await asyncio.sleep(core.RETRY_PAUSE_S)

    def _leave(self, call: AsyncCall) -> None:
        """Cancels what has not ended; its stream is read to the end in the background."""
        if call.leave():
            task = asyncio.create_task(call.read_rest())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)


class AsyncSharedStream:
    """As `voltriton_client.SharedStream`: many requests on one gRPC stream."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._router = core.Router()
        self._over: VoltritonError | None = None
        self._call = client._stub.ModelStreamInfer(self._outgoing(), metadata=client.target.call_metadata)
        self._reader = asyncio.create_task(self._read())
        client._shared.add(self)

    async def stream(
        self, prompt: str | Request | None = None, **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Send a request; the chunks of its answer."""
        request = request_for(prompt, **options)
        takes = await self._client._takes(request.model)
        message = core.message_for(request, takes)
        if self._over:
            raise self._over
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self._router.add(request.request_id, answers.put_nowait, core.cancel_for(request, takes))
        self._requests.put_nowait(message)
        reader, deadline = ResponseReader(request.request_id), core.Deadline(request, takes)
        try:
            while not reader.final:
                try:
                    answer = await asyncio.wait_for(answers.get(), deadline.left_s)
                except TimeoutError:
                    raise deadline.error() from None
                for chunk in self._feed(answer, request, reader):
                    yield chunk
        finally:
            for cancel in self._router.drop(request.request_id):
                self._requests.put_nowait(cancel)

    async def generate(self, prompt: str | Request | None = None, **options: Any) -> Result:
        request = request_for(prompt, stream=False, **options)
        collector = Collector(request.request_id)
        async for chunk in self.stream(request, stream=False):
            collector.add(chunk)
        return collector.result()

    async def close(self) -> None:
        """Cancel what is still open, and end the stream."""
        self._client._shared.discard(self)
        cancels = self._router.cancels()
        for message in cancels:
            self._requests.put_nowait(message)  # None, where nothing cancels one, ends the sending
        self._requests.put_nowait(None)
        if None in cancels:
            self._call.cancel()
        limit_s = core.LEAVE_S if cancels else self._client.target.connect_timeout_s
        await asyncio.wait([self._reader], timeout=limit_s)
        self._call.cancel()
        await asyncio.wait([self._reader])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _outgoing(self) -> AsyncIterator[Any]:
        while (message := await self._requests.get()) is not None:
            yield message

    async def _read(self) -> None:
        error: Any = None
        try:
            async for message in self._call:
                self._router.route(message)
        except grpc.RpcError as failure:
            error = failure
        except asyncio.CancelledError:
            # grpc.aio raises this in the reader when the call is cancelled from this side.
            if not self._call.cancelled():
                raise
        self._over = core.over(error, self._client.target)
        self._router.fail(error)

    def _feed(self, message: Any, request: Request, reader: ResponseReader) -> list[Chunk]:
        if message is None:
            reader.end("the stream was closed")
            return []
        if isinstance(message, grpc.RpcError):
            raise core.stream_failure(message, self._client.target, request, reader)
        return reader.feed(message)
