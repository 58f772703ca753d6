"""Many requests on one gRPC stream, for the blocking client."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

import grpc

from voltriton_client import core
from voltriton_client.errors import VoltritonError
from voltriton_client.request import Request, request_for
from voltriton_client.response import ResponseReader
from voltriton_client.types import Chunk, Collector, Result

if TYPE_CHECKING:
    from voltriton_client.client import Client


class SharedStream:
    """Many requests on one gRPC stream, told apart by their ids.

    An error belongs to its request and leaves the others alone. Triton can only cancel a stream as a whole:
    closing one answer stops listening to it, closing the stream cancels everything on it. Where single
    answers are to be cancelled, use `Client.stream`, which has a stream for each.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._router = core.Router()
        self._over: VoltritonError | None = None
        self._lock = threading.Lock()
        self._call = client._stub.ModelStreamInfer(
            iter(self._requests.get, None), metadata=client.target.call_metadata
        )
        self._reader = threading.Thread(target=self._read, name="voltriton-stream", daemon=True)
        self._reader.start()

    def stream(self, prompt: str | Request | None = None, **options: Any) -> Iterator[Chunk]:
        """Send a request now; the chunks of its answer."""
        request = request_for(prompt, **options)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        reader = self._send(request, answers.put)
        return self._chunks(request, reader, answers)

    def generate(self, prompt: str | Request | None = None, **options: Any) -> Result:
        request = request_for(prompt, stream=False, **options)
        collector = Collector(request.request_id)
        for chunk in self.stream(request, stream=False):
            collector.add(chunk)
        return collector.result()

    def generate_many(
        self, requests: Iterable[Request], concurrency: int = 8
    ) -> Iterator[tuple[int, Result | VoltritonError]]:
        """At most `concurrency` requests at a time; yields (number, answer or its error) as they end."""
        waiting = enumerate(requests)
        ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        open_: dict[int, tuple[Request, ResponseReader, Collector]] = {}
        while True:
            while len(open_) < concurrency and (item := next(waiting, None)):
                number, request = item[0], request_for(item[1], stream=False)
                try:
                    reader = self._send(request, lambda message, number=number: ended.put((number, message)))
                except VoltritonError as error:
                    yield number, error
                    continue
                open_[number] = (request, reader, Collector(request.request_id))
            if not open_:
                return
            number, message = ended.get()
            if number in open_ and (outcome := self._step(message, *open_[number])):
                self._router.drop(open_.pop(number)[0].request_id)
                yield number, outcome

    def close(self) -> None:
        """Cancel what is still open, and the stream."""
        self._requests.put(None)
        if len(self._router):
            self._call.cancel()
        self._reader.join(timeout=self._client.target.connect_timeout_s)
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, request: Request, put: Any) -> ResponseReader:
        message = core.message_for(request, self._client._takes(request.model))
        with self._lock:
            if self._over:
                raise self._over
            self._router.add(request.request_id, put)
        self._requests.put(message)
        return ResponseReader(request.request_id)

    def _read(self) -> None:
        error: Any = None
        try:
            for message in self._call:
                self._router.route(message)
        except grpc.RpcError as failure:
            error = failure
        with self._lock:
            self._over = core.over(error, self._client.target)
            self._router.fail(error)

    def _feed(self, message: Any, request: Request, reader: ResponseReader) -> list[Chunk]:
        if message is None:
            reader.end("the server closed the stream")
            return []
        if isinstance(message, grpc.RpcError):
            raise core.stream_failure(message, self._client.target, request, reader)
        return reader.feed(message)

    def _step(
        self, message: Any, request: Request, reader: ResponseReader, collector: Collector
    ) -> Result | VoltritonError | None:
        try:
            for chunk in self._feed(message, request, reader):
                collector.add(chunk)
        except VoltritonError as error:
            return error
        return collector.result() if reader.final else None

    def _chunks(
        self, request: Request, reader: ResponseReader, answers: queue.SimpleQueue[Any]
    ) -> Iterator[Chunk]:
        try:
            while not reader.final:
                yield from self._feed(answers.get(), request, reader)
        finally:
            self._router.drop(request.request_id)
