"""The same over HTTP: Triton's /generate_stream and /generate, for places where gRPC does not get through.

HTTP says less than gRPC: the end of an answer shows in `finish_reason` alone, and a client that leaves a
non-streaming request is not noticed by every version of Triton. Prefer `Client` where it is possible.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx

from voltriton_client.channel import Target, Tls
from voltriton_client.errors import (
    AnswerCut,
    CertificateFailed,
    ConnectionFailed,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Unauthenticated,
    Unavailable,
    VoltritonError,
    WrongProtocol,
    from_text,
)
from voltriton_client.request import Request, request_for, to_json
from voltriton_client.response import ResponseReader
from voltriton_client.sse import SseDecoder
from voltriton_client.types import Chunk, Collector, Result

_BY_STATUS: dict[int, str] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    429: "UNAVAILABLE",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class HttpClient:
    """A Triton server's HTTP port: `HttpClient("127.0.0.1:8000").stream("Once")`."""

    def __init__(
        self,
        address: str = "127.0.0.1:8000",
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        connect_timeout_s: float = 5.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.target = Target(address, tls, api_key, connect_timeout_s=connect_timeout_s)
        self._client = httpx.Client(
            base_url=f"{'https' if tls else 'http'}://{address}",
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            verify=tls.context() if tls else True,
            trust_env=False,
            transport=transport,
        )

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> bool:
        """Whether the server takes requests."""
        try:
            return self._client.get("/v2/health/ready", timeout=self.target.connect_timeout_s).is_success
        except httpx.HTTPError as error:
            raise self._failure(error) from error

    def stream(self, prompt: str | Request | None = None, **options: Any) -> Iterator[Chunk]:
        """Stream an answer; closing the iterator closes the connection, which cancels the request."""
        request = request_for(prompt, **options)
        reader = ResponseReader(request.request_id)
        open_sequences = _Finishes(request)
        try:
            with self._client.stream(
                "POST",
                _path(request, "generate_stream"),
                json=to_json(request),
                timeout=self._timeout(request),
            ) as response:
                _check(response)
                for event in _events(response):
                    body = _parse(event, request.request_id)
                    open_sequences.see(body)
                    yield from reader.feed_outputs(body, final=open_sequences.all_ended)
        except httpx.HTTPError as error:
            raise self._failure(error, request, reader) from error
        reader.end("the connection was closed")

    def generate(self, prompt: str | Request | None = None, **options: Any) -> Result:
        """The whole answer at once."""
        request = request_for(prompt, stream=False, **options)
        reader = ResponseReader(request.request_id)
        try:
            response = self._client.post(
                _path(request, "generate"), json=to_json(request), timeout=self._timeout(request)
            )
        except httpx.HTTPError as error:
            raise self._failure(error, request, reader) from error
        _check(response)
        collector = Collector(request.request_id)
        for chunk in reader.feed_outputs(_parse(response.text, request.request_id), final=True):
            collector.add(chunk)
        return collector.result()

    def chat(self, messages: Any, **options: Any) -> Result:
        return self.generate(messages=messages, **options)

    def _timeout(self, request: Request) -> httpx.Timeout:
        return httpx.Timeout(request.timeout_s, connect=self.target.connect_timeout_s)

    def _failure(
        self, error: httpx.HTTPError, request: Request | None = None, reader: ResponseReader | None = None
    ) -> VoltritonError:
        address, text = self.target.address, str(error)
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            # A reset while connecting is one in the handshake: a closed port refuses instead.
            if any(sign in text for sign in ("UNEXPECTED_EOF", "WRONG_VERSION", "reset by peer")):
                return CertificateFailed(f"{address} does not speak TLS: leave it out, or give the TLS port")
            if "SSL" in text or "certificate" in text:
                return CertificateFailed(
                    f"TLS with {address} failed ({text}): check the CA file and the host name"
                )
            return ConnectionFailed(
                f"nothing answers at {address} ({text}): start the server, or check the address"
            )
        if isinstance(error, httpx.TimeoutException):
            limit = request.timeout_s if request else self.target.connect_timeout_s
            return DeadlineExceeded(f"{address} sent nothing for {limit} s")
        started = reader is not None and reader.started
        if isinstance(error, httpx.RemoteProtocolError) and "llegal" in text and not started:
            return WrongProtocol(
                f"{address} does not speak HTTP/1.1 ({text}): give Triton's HTTP port (8000 unless set), not "
                "its gRPC port (8001)"
            )
        # A TLS port that is sent plain text closes at once; whether the kernel says so by an end or by a
        # reset depends on which of the server's and our bytes crossed.
        closed = "without sending a response" in text or "reset by peer" in text
        if closed and self.target.tls is None and not started:
            text = f"{text.rstrip('.')}, as a TLS port does"
        if reader is not None:
            try:
                reader.end(text)
            except AnswerCut as cut:
                return cut
        return Unavailable(f"the connection to {address} broke: {text}")


class _Finishes:
    """Whether every sequence has told its end, which over HTTP is the only sign of a whole answer."""

    def __init__(self, request: Request) -> None:
        self._embedding = request.embedding is not None
        self._ended: dict[int, bool] = {}

    def see(self, outputs: Mapping[str, list[Any]]) -> None:
        for index, reason in enumerate(outputs.get("finish_reason", [])):
            self._ended[index] = self._ended.get(index, False) or reason not in ("None", "", None)

    @property
    def all_ended(self) -> bool:
        return self._embedding or (bool(self._ended) and all(self._ended.values()))


def _path(request: Request, form: str) -> str:
    if not request.model or "/" in request.model:
        raise InvalidArgument(f"model: got {request.model!r}, allowed: a name without a slash")
    return f"/v2/models/{request.model}/{form}"


def _events(response: httpx.Response) -> Iterator[str]:
    decoder = SseDecoder()
    for piece in response.iter_bytes():
        yield from decoder.feed(piece)


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = response.read().decode("utf-8", errors="replace")
    try:
        text = str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"HTTP status {response.status_code}: {' '.join(text.split())[:200]}"
    if response.status_code == 405:
        # Triton's metrics port, or some web server.
        address = f"{response.url.host}:{response.url.port}"
        raise WrongProtocol(
            f"{address} speaks HTTP and takes no requests for models: give Triton's HTTP port (8000 unless set)"
        )
    code = _BY_STATUS.get(response.status_code, "INTERNAL")
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        raise Unauthenticated(f"the server refuses the key: {text}")
    raise from_text(text, code=code)


def _parse(text: str, request_id: str) -> dict[str, list[Any]]:
    """Outputs as lists by name: Triton flattens lists of one."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise Internal(f"the server's answer is no JSON: {error}", request_id) from error
    if not isinstance(body, dict):
        raise Internal("the server's answer is no JSON object", request_id)
    if "error" in body:
        raise from_text(str(body["error"]), request_id)
    return {name: value if isinstance(value, list) else [value] for name, value in body.items()}
