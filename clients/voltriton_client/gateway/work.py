"""Doing a request's work only as long as its caller is there and its time is not over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from voltriton_client.errors import VoltritonError
from voltriton_client.gateway.errors import ApiError, dump, from_client, respond

# The engine's own deadline answers first; this one is for what hangs in spite of it.
GRACE_S = 5.0
T = TypeVar("T")


class ClientLeft(Exception):
    """The caller closed the connection; nobody is there to be answered."""


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive, limit_s: float) -> T:
    """The work's result. It is cancelled when the caller leaves (ClientLeft) or the time is over (ApiError)."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, timeout=limit_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientLeft
        raise ApiError(504, f"no end within {limit_s:g} s", type_="server_error", code="timeout")
    finally:
        await _end(task, gone)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Answer(Response):
    """A JSON answer that is worked out while the caller waits."""

    def __init__(self, work: Awaitable[dict[str, Any]], limit_s: float, left: Callable[[], None]) -> None:
        self._work = work
        self._limit_s = limit_s
        self._left = left
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await while_connected(self._respond(), receive, self._limit_s)
        except ClientLeft:
            self._left()
            return
        except ApiError as error:
            response = respond(error)
        await response(scope, receive, send)

    async def _respond(self) -> Response:
        try:
            return Response(dump(await self._work), media_type="application/json")
        except VoltritonError as error:
            return respond(from_client(error))


class EventStream(Response):
    """Server-sent events. What fails before the first one is answered with a status of its own.

    Events are asked for one by one, so a caller that reads slowly holds back the engine's stream.
    """

    def __init__(
        self, events: AsyncGenerator[dict[str, Any], None], limit_s: float, left: Callable[[], None]
    ) -> None:
        self._events = events
        self._limit_s = limit_s
        self._left = left
        self._begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._run(scope, receive, send), receive, self._limit_s)
        except ClientLeft:
            self._left()
        except ApiError as error:
            await self._fail(error, scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._begin(send)
                    await _send(send, dump(event))
            await self._begin(send)
            await _send(send, b"[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except VoltritonError as error:
            await self._fail(from_client(error), scope, receive, send)

    async def _begin(self, send: Send) -> None:
        if self._begun:
            return
        self._begun = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # nginx would keep the events back otherwise.
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._begun:
            await respond(error)(scope, receive, send)
            return
        # No [DONE]: the answer is not whole.
        with suppress(OSError):
            await _send(send, dump(error.body))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
