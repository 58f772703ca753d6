"""One request on a gRPC stream of its own, for both clients, and how to leave it before its end.

Triton 24.10 leaks the response and the connection of a stream that is reset just as its last response is sent. So where
the model takes `cancel`, the stream stays open for that one more request, and is read to its end. Only where that is no
use it is reset: the model has no such input, gRPC has not got the request yet, or the server does not end it in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self, TypeVar

import grpc

from voltriton_client import core
from voltriton_client.request import Request
from voltriton_client.response import is_last
from voltriton_client.types import Chunk


class _Talk:
    """What was said on a stream: its request (`message`), that one's end, and what cancels it (`cancel`)."""

    def __init__(self, message: Any, cancel: Any | None, put: Callable[[Any], None]) -> None:
        self._cancel = cancel
        self._put = put
        # Whether gRPC has got the request (the server may answer before gRPC says that it is sent), its last response
        # has come, the server will not cancel it.
        self.sent = self.ended = self.refused = False
        self._left = False
        put(message)
        if cancel is None:
            put(None)

    def hear(self, response: Any) -> bool:
        """Whether the response belongs to the request."""
        response_id = response.infer_response.id
        if self._left and response_id in ("", self._cancel and self._cancel.id):
            self.refused = bool(response.error_message)
            return False
        if is_last(response):
            self.ended = True
            self._put(None)
        return True

    def leave(self) -> bool:
        """Cancels the request unless it has ended; False: that cannot be said here, the stream must be reset."""
        self._left = True
        tells = self.sent and self._cancel is not None
        if tells and not self.ended:
            self._put(self._cancel)
        self._put(None)
        return tells or self.ended


class Call(Iterator[Any]):
    """The responses; for threads."""

    def __init__(self, open_stream: Callable[[Iterator[Any]], Any], message: Any, cancel: Any | None) -> None:
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._talk = _Talk(message, cancel, self._outgoing.put)
        self._reading = threading.Lock()
        self.left = False
        # By Ctrl-C in this thread, say: gRPC still reads a response, and another reader would break the call.
        self._interrupted = False
        self.over = threading.Event()
        self._call = open_stream(self._requests())
        self.when_over(self.over.set)

    def _requests(self) -> Iterator[Any]:
        for message in iter(self._outgoing.get, None):
            self._talk.sent = True
            yield message

    def when_over(self, then: Callable[[], None]) -> None:
        if not self._call.add_callback(then):
            then()

    def __next__(self) -> Any:
        while True:
            with self._reading:
                if self._interrupted:
                    raise StopIteration
                try:
                    response = next(self._call)
                except (StopIteration, grpc.RpcError):
                    self.over.set()
                    raise
                except BaseException:
                    self._interrupted = True
                    raise
            if self._talk.hear(response):
                return response
            if self._talk.refused:
                self._call.cancel()

    def leave(self) -> None:
        """Nobody wants the rest: cancels the request. `over` is set soon, in `core.LEAVE_S` at the latest."""
        if self.left:
            return
        self.left = True
        if not self._talk.leave():
            self._call.cancel()
        elif not self.over.is_set():
            self._read_out()

    def _read_out(self) -> None:
        """On a thread of its own: this one may be gRPC's, where the garbage collector found the stream."""
        try:
            threading.Thread(target=self._read_rest, name="voltriton-leave", daemon=True).start()
            limit = threading.Timer(core.LEAVE_S, self._call.cancel)
            limit.daemon = True
            limit.start()
            self.when_over(limit.cancel)
        except RuntimeError:  # the interpreter is ending
            self._call.cancel()

    def _read_rest(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for _ in self:
                pass


class Stream(Iterator[Chunk]):
    """The chunks of one answer. Closing it (or leaving its `with`) before the end cancels the request."""

    def __init__(self, chunks: Iterator[Chunk], cancel: Callable[[], None]) -> None:
        self._chunks = chunks
        self._cancel = cancel

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        """Cancel the request. Another thread that is iterating gets Cancelled."""
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncCall(AsyncIterator[Any]):
    """The responses; for asyncio.

    A task of its own reads them, for gRPC resets a stream whose reader is cancelled. It reads `READ_AHEAD` responses
    ahead at most: a slow caller holds back the server.
    """

    READ_AHEAD = 4

    def __init__(
        self, open_stream: Callable[[AsyncIterator[Any]], Any], message: Any, cancel: Any | None
    ) -> None:
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._talk = _Talk(message, cancel, self._outgoing.put_nowait)
        # Responses, then None or the grpc.RpcError.
        self._incoming: asyncio.Queue[Any] = asyncio.Queue(self.READ_AHEAD)
        self.left = False
        self._call = open_stream(self._requests())
        self._reader = asyncio.create_task(self._read())

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self._outgoing.get()) is not None:
            self._talk.sent = True
            yield message

    async def _read(self) -> None:
        end = None
        try:
            async for response in self._call:
                if not self._talk.hear(response):
                    if self._talk.refused:
                        self._call.cancel()
                elif not self.left:
                    await self._incoming.put(response)
        except grpc.RpcError as error:
            end = error
        except asyncio.CancelledError:
            # grpc.aio raises this in the reader, too, when the call is reset from this side.
            if not self._call.cancelled():
                raise
        await self._incoming.put(end)

    def when_over(self, then: Callable[[], None]) -> None:
        self._reader.add_done_callback(lambda _: then())

    async def __anext__(self) -> Any:
        response = await self._incoming.get()
        if response is None:
            raise StopAsyncIteration
        if isinstance(response, grpc.RpcError):
            raise response
        return response

    def leave(self) -> bool:
        """Nobody wants the rest: cancels the request. True: `read_rest` is to be awaited."""
        if self.left or self._reader.done():
            self._outgoing.put_nowait(None)
            return False
        self.left = True
        while not self._incoming.empty():  # the reader may wait for room
            self._incoming.get_nowait()
        if not self._talk.leave():
            self._call.cancel()
            return False
        return True

    async def read_rest(self) -> None:
        """Returns when the stream is over, after `core.LEAVE_S` at the latest."""
        await asyncio.wait([self._reader], timeout=core.LEAVE_S)
        self._call.cancel()


C = TypeVar("C", Call, AsyncCall)


def start(kind: type[C], client: Any, request: Request, message: Any, takes: frozenset[str]) -> C:
    """Send a request of a client, which knows the call until it is over."""
    limit_s = core.rpc_timeout_s(request, takes)
    metadata = client.target.call_metadata
    call = kind(
        lambda requests: client._stub.ModelStreamInfer(requests, metadata=metadata, timeout=limit_s),
        message,
        core.cancel_for(request, takes),
    )
    client._calls.add(call)
    call.when_over(lambda: client._calls.discard(call))
    return call
