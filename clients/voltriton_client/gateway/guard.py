"""What stands before every request: limits, keys, the whole body within its size and time, numbers."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from voltriton_client.gateway.errors import ApiError, respond
from voltriton_client.gateway.limits import Keys, RateLimit
from voltriton_client.gateway.settings import Settings
from voltriton_client.gateway.telemetry import Telemetry

log = logging.getLogger("voltriton.gateway")
_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/health",
    "/metrics",
    "/",
)
_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: Settings, telemetry: Telemetry, keys: Keys | None) -> None:
        self._app = app
        self._settings = settings
        self._telemetry = telemetry
        self._keys = keys
        self._per_key = _limit(settings.requests_per_minute_per_key)
        self._per_ip = _limit(settings.requests_per_minute_per_ip)
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Those that ask for work; whoever looks at /health or /metrics takes nobody's place.
        counted = int(scope["method"] == "POST")

        def answered() -> None:
            nonlocal counted
            self._count(-counted)
            counted = 0

        watched = _Watched(scope, send, answered)
        path = scope["path"] if scope["path"] in _PATHS else "other"
        started = time.perf_counter()
        self._count(counted)
        try:
            await self._admit(scope, receive, watched)
        finally:
            answered()
            self._telemetry.requests.labels(path, watched.status or "none").inc()
            self._telemetry.duration.labels(path).observe(time.perf_counter() - started)

    def _count(self, change: int) -> None:
        self._open += change
        self._telemetry.open.set(self._open)

    async def _admit(self, scope: Scope, receive: Receive, send: _Watched) -> None:
        try:
            if scope["path"].startswith("/v1/"):
                self._check(scope)
                if scope["method"] == "POST":
                    body = await self._body(Headers(scope=scope), receive)
                    if body is None:
                        return
                    receive = _replay(body, receive)
        except ApiError as error:
            await respond(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """The address's rate first, so that keys cannot be tried without end."""
        ip = (scope.get("client") or ("",))[0]
        _take(self._per_ip, ip, "address")
        if self._keys:
            _take(self._per_key, self._key_name(Headers(scope=scope)), "key")
        if scope["method"] == "POST" and self._open > self._settings.max_open_requests:
            raise ApiError(
                503,
                f"{self._open - 1} requests are open, at most {self._settings.max_open_requests} are taken: try later",
                type_="server_error",
                code="overloaded",
                retry_after_s=1.0,
            )

    def _key_name(self, headers: Headers) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not key or scheme.lower() != "bearer":
            raise ApiError(401, "a key is needed: Authorization: Bearer KEY", code="missing_api_key")
        name = self._keys.name_of(key.strip()) if self._keys else None
        if name is None:
            raise ApiError(401, "the key is not one of this gateway's", code="invalid_api_key")
        return name

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None when the caller left."""
        limit = self._settings.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise _too_large(int(length), limit)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await _read(receive, limit)
        except TimeoutError:
            raise ApiError(
                408, f"the body was not here within {self._settings.body_timeout_s:g} s", code="body_timeout"
            ) from None


class _Watched:
    """`send` that notes the status, gives every answer its request id, and says when its last bytes go out: before the
    caller has them and asks again."""

    def __init__(self, scope: Scope, send: Send, answered: Callable[[], None]) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.request_id
        self.status = ""
        self._send = send
        self._answered = answered

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = str(message["status"])
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            headers["x-content-type-options"] = "nosniff"
            if message["status"] == 401:
                headers["www-authenticate"] = "Bearer"
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self._answered()
        await self._send(message)


async def _read(receive: Receive, limit: int) -> bytes | None:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            raise _too_large(size, limit)
        if not message.get("more_body"):
            return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what comes after it."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


def _limit(per_minute: int | None) -> RateLimit | None:
    return RateLimit(per_minute) if per_minute else None


def _take(limit: RateLimit | None, caller: str, what: str) -> None:
    wait_s = limit.take(caller) if limit else 0.0
    if wait_s:
        raise ApiError(
            429,
            f"too many requests for this {what}: the next is taken in {wait_s:.1f} s",
            type_="requests",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(
        413, f"the body has {size} bytes or more, at most {limit} are taken", code="body_too_large"
    )
