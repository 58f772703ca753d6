"""Server-sent events and the HTTP form: any split of the bytes gives the same events."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import voltriton_client as vc
from hypothesis import given
from hypothesis import strategies as st

BODY = (
    'data: {"text_output":"聪明","finish_reason":"None"}\n\n'
    ": a comment\r\n"
    'data: {"text_output":\r\ndata: "😀é","finish_reason":"stop"}\r\n\r\n'
    "event: x\rid: 3\rdata:no space\r\r"
    "data\n\n"
    "data: never ended"
).encode()
EVENTS = [
    '{"text_output":"聪明","finish_reason":"None"}',
    '{"text_output":\n"😀é","finish_reason":"stop"}',
    "no space",
    "",
]


def decode(pieces: list[bytes]) -> tuple[list[str], bool]:
    decoder = vc.SseDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events, decoder.flush()


def test_one_byte_at_a_time_gives_the_same_events() -> None:
    """C006."""
    assert decode([BODY]) == (EVENTS, True)
    assert decode([bytes([byte]) for byte in BODY]) == (EVENTS, True)


@pytest.mark.parametrize("at", range(len(BODY)))
def test_two_pieces_cut_anywhere(at: int) -> None:
    """C006."""
    assert decode([BODY[:at], BODY[at:]]) == (EVENTS, True)


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",))), max_size=5),
    st.data(),
)
def test_any_texts_in_any_pieces(texts: list[str], data: st.DataObject) -> None:
    body = "".join(f"data: {text}\n\n" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    pieces = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert decode(pieces) == (texts, False)


def test_byte_order_mark_is_no_text() -> None:
    assert decode([b"\xef\xbb", b"\xbfdata: x\n\n"]) == (["x"], False)


class Bytes(httpx.SyncByteStream):
    def __init__(self, pieces: list[bytes], error: Exception | None = None) -> None:
        self.pieces, self.error = pieces, error
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces
        if self.error:
            raise self.error

    def close(self) -> None:
        self.closed = True


def http_client(handler: Callable[[httpx.Request], httpx.Response]) -> vc.HttpClient:
    return vc.HttpClient("127.0.0.1:8000", transport=httpx.MockTransport(handler))


def event(text: str, finish: str = "None", **more: Any) -> bytes:
    body = {
        "text_output": text,
        "finish_reason": finish,
        "num_output_tokens": 1,
        "num_input_tokens": 2,
        **more,
    }
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def test_stream_over_http_one_byte_at_a_time() -> None:
    """C006, through the client."""
    body = event("聪") + event("明 ") + event("😀", "stop")
    client = http_client(lambda request: httpx.Response(200, stream=Bytes([bytes([byte]) for byte in body])))
    chunks = list(client.stream("x", max_tokens=5))
    assert "".join(chunk.text for chunk in chunks) == "聪明 😀"
    assert chunks[-1].final and chunks[-1].finish_reason == "stop"
    assert chunks[-1].usage == vc.Usage(2, 3)


def test_request_body_over_http() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(
            200, json={"text_output": "yes", "finish_reason": "stop", "num_output_tokens": 1}
        )

    client = http_client(answer)
    assert client.chat([{"role": "user", "content": "hé"}], max_tokens=3, timeout_s=2).text == "yes"
    body = json.loads(seen[0].content)
    assert seen[0].url.path == "/v2/models/vllm/generate"
    assert json.loads(body["messages"]) == [{"role": "user", "content": "hé"}]
    assert json.loads(body["sampling_parameters"]) == {"max_tokens": 3}
    assert (body["stream"], body["exclude_input_in_output"], body["timeout_ms"]) == (False, True, 2000)
    client.generate(token_ids=[7])
    assert json.loads(seen[1].content)["input_ids"] == [7]


def test_connection_that_ends_early_is_a_cut_answer() -> None:
    client = http_client(lambda request: httpx.Response(200, stream=Bytes([event("a"), event("b")])))
    with pytest.raises(vc.AnswerCut, match="after 2 tokens") as caught:
        list(client.stream("x"))
    assert caught.value.partial == "ab"


def test_broken_connection_is_a_cut_answer() -> None:
    broken = Bytes([event("a")], httpx.ReadError("Connection reset by peer"))
    with pytest.raises(vc.AnswerCut, match="reset by peer"):
        list(http_client(lambda request: httpx.Response(200, stream=broken)).stream("x"))


def test_closing_the_iterator_closes_the_connection() -> None:
    stream = Bytes([event("a")] * 100)
    chunks = http_client(lambda request: httpx.Response(200, stream=stream)).stream("x")
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert stream.closed


def test_error_inside_a_stream() -> None:
    body = event("a") + b'data: {"error":"UNAVAILABLE: engine restarting"}\n\n'
    with pytest.raises(vc.Unavailable, match=r"^engine restarting$"):
        list(http_client(lambda request: httpx.Response(200, content=body)).stream("x"))


UNARY = "HTTP end point doesn't support models with decoupled transaction policy"
LOADING = "Request for unknown model: 'x' has no available versions"


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": "INVALID_ARGUMENT: top_p: got 2"}, vc.InvalidArgument, r"^top_p: got 2$"),
        (404, {"error": "Request for unknown model: 'x' is not found"}, vc.ModelNotFound, "voltriton models"),
        (400, {"error": LOADING}, vc.ModelNotReady, "not ready"),
        (
            200,
            {"error": "generate expects model to produce exactly 1 response"},
            vc.InvalidArgument,
            "generate_stream",
        ),
        (501, {"error": UNARY}, vc.InvalidArgument, "generate_stream"),
        (503, "<html>Service Unavailable</html>", vc.Unavailable, "Service Unavailable"),
        (401, {"detail": "no"}, vc.Unauthenticated, "key"),
        (500, {}, vc.Internal, "500"),
        (200, "not json", vc.Internal, "no JSON"),
        (200, [1], vc.Internal, "no JSON object"),
    ],
)
def test_errors_over_http(status: int, body: Any, kind: type[vc.VoltritonError], words: str) -> None:
    """C054 among them: a plain `generate` that would give many responses."""
    made = httpx.Response(status, text=body) if isinstance(body, str) else httpx.Response(status, json=body)
    with pytest.raises(vc.VoltritonError, match=words) as caught:
        http_client(lambda request: made).generate("x")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that does one thing with every connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        # Closing alone does not wake accept().
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_real_sockets_split_at_every_byte() -> None:
    """C006, with the pieces as they come from a network."""
    body = event("聪明") + event("😀", "stop")

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(65536)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for byte in body:
            connection.sendall(b"1\r\n" + bytes([byte]) + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        # What was not read would make the close a reset.
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with raw_server(answer) as address, vc.HttpClient(address) as client:
        assert "".join(chunk.text for chunk in client.stream("x")) == "聪明😀"


def test_http_client_at_a_grpc_port() -> None:
    def settings_frame(connection: socket.socket) -> None:
        connection.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00")
        connection.recv(65536)

    with raw_server(settings_frame) as address, vc.HttpClient(address) as client:
        with pytest.raises(vc.WrongProtocol, match=r"HTTP port \(8000"):
            client.generate("x")
        with pytest.raises(vc.WrongProtocol):
            client.ready()


@pytest.mark.parametrize("by_reset", [False, True], ids=["end", "reset"])
def test_http_client_at_a_port_that_hangs_up(by_reset: bool) -> None:
    """A TLS port asked without TLS, and the other way round; which of the two closes comes is a race there."""

    def hang_up(connection: socket.socket) -> None:
        connection.recv(65536)
        if by_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with raw_server(hang_up) as address:
        with vc.HttpClient(address) as client, pytest.raises(vc.AnswerCut, match="as a TLS port does"):
            client.generate("x")
        with (
            vc.HttpClient(address, tls=vc.Tls()) as client,
            pytest.raises(vc.CertificateFailed, match="does not speak TLS"),
        ):
            client.generate("x")


def test_nobody_there_over_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with vc.HttpClient(address) as client, pytest.raises(vc.ConnectionFailed, match="nothing answers"):
        list(client.stream("x"))
