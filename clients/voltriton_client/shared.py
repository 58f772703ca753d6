"""Many requests on one gRPC stream, for the blocking client."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import grpc

from voltriton_client import core
from voltriton_client.calls import Stream
from voltriton_client.errors import Cancelled, VoltritonError
from voltriton_client.request import Request, request_for
from voltriton_client.response import ResponseReader
from voltriton_client.types import Chunk, Collector, Result

if TYPE_CHECKING:
    from voltriton_client.client import Client


@dataclass(frozen=True)
class _Asked:
    """A request that was sent."""

    request: Request
    reader: ResponseReader
    deadline: core.Deadline


class SharedStream:
    """Many requests on one gRPC stream, told apart by their ids.

    An error belongs to its request and leaves the others alone. Closing one answer cancels it alone where the model
    takes `cancel`, and else only stops listening to it; closing the stream cancels everything on it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._router = core.Router()
        self._over: VoltritonError | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._call = client._stub.ModelStreamInfer(
            iter(self._requests.get, None), metadata=client.target.call_metadata
        )
        self._reader = threading.Thread(target=self._read, name="voltriton-stream", daemon=True)
        self._reader.start()
        client._shared.add(self)

    def stream(self, prompt: str | Request | None = None, **options: Any) -> Stream:
        """Send a request now; the chunks of its answer."""
        request = request_for(prompt, **options)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked = self._send(request, answers.put)

        def cancel() -> None:
            self._drop(asked)
            answers.put(core.closed_here(request.request_id))

        return Stream(self._chunks(asked, answers), cancel)

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
        open_: dict[int, tuple[_Asked, Collector]] = {}
        while True:
            while len(open_) < concurrency and (item := next(waiting, None)):
                number, request = item[0], request_for(item[1], stream=False)
                try:
                    asked = self._send(request, lambda message, number=number: ended.put((number, message)))
                except VoltritonError as error:
                    yield number, error
                    continue
                open_[number] = (asked, Collector(request.request_id))
            if not open_:
                return
            number, message = _next(ended, open_)
            if self._closed:
                raise Cancelled("this side closed the stream")
            if number in open_ and (outcome := self._step(message, *open_[number])):
                self._drop(open_.pop(number)[0])
                yield number, outcome

    def close(self) -> None:
        """Cancel what is still open, and end the stream."""
        self._closed = True
        self._client._shared.discard(self)
        with self._lock:
            cancels = self._router.cancels()
        for message in cancels:
            self._requests.put(message)  # None, where nothing cancels one, ends the sending
        self._requests.put(None)
        if None in cancels:
            self._call.cancel()
        self._reader.join(core.LEAVE_S if cancels else self._client.target.connect_timeout_s)
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, request: Request, put: Any) -> _Asked:
        takes = self._client._takes(request.model)
        message = core.message_for(request, takes)
        with self._lock:
            if self._over:
                raise self._over
            self._router.add(request.request_id, put, core.cancel_for(request, takes))
        self._requests.put(message)
        return _Asked(request, ResponseReader(request.request_id), core.Deadline(request, takes))

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

    def _feed(self, message: Any, asked: _Asked) -> list[Chunk]:
        if message is None:
            asked.reader.end("the server closed the stream")
            return []
        if isinstance(message, grpc.RpcError):
            raise core.stream_failure(message, self._client.target, asked.request, asked.reader)
        if isinstance(message, VoltritonError):
            raise message
        return asked.reader.feed(message)

    def _step(self, message: Any, asked: _Asked, collector: Collector) -> Result | VoltritonError | None:
        try:
            for chunk in self._feed(message, asked):
                collector.add(chunk)
        except VoltritonError as error:
            return error
        return collector.result() if asked.reader.final else None

    def _chunks(self, asked: _Asked, answers: queue.SimpleQueue[Any]) -> Iterator[Chunk]:
        try:
            while not asked.reader.final:
                yield from self._feed(_get(answers, asked.deadline), asked)
        finally:
            self._drop(asked)

    def _drop(self, asked: _Asked) -> None:
        """Listen no more, and cancel what has not ended."""
        for message in self._router.drop(asked.request.request_id):
            self._requests.put(message)


def _get(waiting: queue.SimpleQueue[Any], deadline: core.Deadline) -> Any:
    """What comes next; DeadlineExceeded, as a value, when nothing comes in time."""
    try:
        return waiting.get(timeout=deadline.left_s)
    except queue.Empty:
        return deadline.error()


def _next(
    ended: queue.SimpleQueue[tuple[int, Any]], open_: dict[int, tuple[_Asked, Collector]]
) -> tuple[int, Any]:
    """The number of the request that something is to be done about, and what."""
    number, (asked, _) = min(open_.items(), key=lambda item: item[1][0].deadline.until)
    found = _get(ended, asked.deadline)
    return found if isinstance(found, tuple) else (number, found)
