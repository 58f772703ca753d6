"""Servers that are not there, are something else, or have the wrong certificate: one clear line each."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import voltriton_client as vc
from certificates import certificate
from kserve import FakeServer
from voltriton_client.channel import MAX_MESSAGE_BYTES, Target
from voltriton_client.core import unary_failure
from voltriton_client.errors import from_rpc


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeServer, Path]]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = certificate("127.0.0.1")
    (folder / "ca.pem").write_bytes(cert)
    (folder / "other.pem").write_bytes(certificate("127.0.0.1")[0])
    with FakeServer(credentials=grpc.ssl_server_credentials([(key, cert)])) as server:
        yield server, folder


def fails(client: vc.Client, kind: type[vc.VoltritonError], words: str) -> None:
    with client, pytest.raises(vc.VoltritonError, match=words) as caught:
        list(client.stream("x"))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_nobody_there() -> None:
    started = time.monotonic()
    fails(
        vc.Client(free_address(), connect_timeout_s=0.5),
        vc.ConnectionFailed,
        "nothing answers.*voltriton serve",
    )
    assert 0.4 < time.monotonic() - started < 3


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`http_proxy` is for the internet; gRPC would say that nothing answers at the server's address."""
    monkeypatch.setenv("http_proxy", f"http://{free_address()}")
    with FakeServer() as server, vc.Client(server.address, connect_timeout_s=2) as client:
        assert client.live()


def test_a_server_that_comes_up_late_is_found() -> None:
    """Nothing was sent before, so trying again is safe."""
    late = FakeServer()
    thread = threading.Timer(0.4, lambda: late.__enter__())
    with vc.Client(late.address, connect_timeout_s=10) as client:
        thread.start()
        assert client.generate("here").text == "here"
    assert len(late.asked) == 1
    thread.join()
    late.stop()


def test_http_port_for_grpc() -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"127.0.0.1:{server.server_port}"
        fails(vc.Client(address, connect_timeout_s=0.3), vc.WrongProtocol, r"speaks HTTP, not gRPC.*8001")
        server.shutdown()


def test_something_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        fails(vc.Client(address, connect_timeout_s=0.3), vc.ConnectionFailed, "gives no answer")


def test_tls_at_a_port_that_closes() -> None:
    """As Triton's HTTP port does; by a reset where it has not read all."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            client = vc.Client(address, tls=vc.Tls(), connect_timeout_s=0.3)
            fails(client, vc.CertificateFailed, "closes the connection where TLS begins")
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_busy_server_without_tls_has_no_trouble_with_tls() -> None:
    """gRPC's words of a connection that was begun and not finished in time (seen on a busy machine)."""
    words = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: tcp handshaker shutdown"
    error = from_rpc("UNAVAILABLE", words, "127.0.0.1:1")
    assert type(error) is vc.ConnectionFailed and "gives no answer" in str(error)


def test_no_such_host() -> None:
    fails(
        vc.Client("no-such-host.invalid:8001", connect_timeout_s=0.3),
        vc.ConnectionFailed,
        "no host of the name",
    )


def test_grpc_server_that_is_no_triton() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    fails(vc.Client(f"127.0.0.1:{port}"), vc.WrongProtocol, "no Triton server")
    server.stop(0).wait()


def test_tls_with_the_right_ca(tls_server: tuple[FakeServer, Path]) -> None:
    server, folder = tls_server
    with vc.Client(server.address, tls=vc.Tls(ca=str(folder / "ca.pem"))) as client:
        assert client.generate("safe").text == "safe"


def test_tls_with_another_ca(tls_server: tuple[FakeServer, Path]) -> None:
    server, folder = tls_server
    tls = vc.Tls(ca=str(folder / "other.pem"))
    client = vc.Client(server.address, tls=tls, connect_timeout_s=0.3)
    fails(client, vc.CertificateFailed, r"TLS with .* failed .*--tls-ca")


def test_tls_for_another_name(tmp_path: Path) -> None:
    cert, key = certificate("127.0.0.2")
    (tmp_path / "ca.pem").write_bytes(cert)
    with FakeServer(credentials=grpc.ssl_server_credentials([(key, cert)])) as server:
        client = vc.Client(server.address, tls=vc.Tls(ca=str(tmp_path / "ca.pem")), connect_timeout_s=0.3)
        fails(client, vc.CertificateFailed, "names this host")


def test_tls_at_a_plain_port() -> None:
    with FakeServer() as server:
        fails(
            vc.Client(server.address, tls=vc.Tls(), connect_timeout_s=0.3),
            vc.CertificateFailed,
            "not speak TLS",
        )


def test_plain_at_a_tls_port(tls_server: tuple[FakeServer, Path]) -> None:
    fails(vc.Client(tls_server[0].address, connect_timeout_s=0.3), vc.WrongProtocol, "wants TLS")


def test_tls_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(vc.InvalidArgument, match=r"no\.pem.*No such file"):
        vc.Client("127.0.0.1:1", tls=vc.Tls(ca=str(tmp_path / "no.pem")))
    with pytest.raises(vc.InvalidArgument, match="go together"):
        vc.Client("127.0.0.1:1", tls=vc.Tls(cert="x"))


@pytest.mark.parametrize("kind", [vc.Client, vc.HttpClient])
def test_tls_files_that_are_something_else(tmp_path: Path, kind: Any) -> None:
    text, cert, key, other = (str(tmp_path / name) for name in ("text", "cert.pem", "key.pem", "other.pem"))
    Path(text).write_text("no certificate\n")
    for path, content in zip((cert, key), certificate("127.0.0.1"), strict=True):
        Path(path).write_bytes(content)
    Path(other).write_bytes(certificate("127.0.0.1")[1])
    with pytest.raises(vc.InvalidArgument, match=r"text'?: no certificate in PEM form"):
        kind("127.0.0.1:1", tls=vc.Tls(ca=text))
    for pair in ((text, key), (cert, text), (cert, other)):
        with pytest.raises(vc.InvalidArgument, match="no certificate in PEM form with its key"):
            kind("127.0.0.1:1", tls=vc.Tls(None, *pair))
    with kind("127.0.0.1:1", tls=vc.Tls(cert, cert, key)):
        pass


@contextmanager
def tls_in_front_of_http(cert: str, key: str) -> Iterator[str]:
    """A web server by TLS, which answers every POST with what Triton's metrics port says to one."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(405)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # handshakes that fail are the test's
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_tls_over_http(tmp_path: Path) -> None:
    cert, key, other = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "other.pem"))
    for path, content in zip((cert, key), certificate("127.0.0.1"), strict=True):
        Path(path).write_bytes(content)
    Path(other).write_bytes(certificate("127.0.0.1")[0])
    with tls_in_front_of_http(cert, key) as address:
        for tls, error, words in (
            (vc.Tls(cert), vc.WrongProtocol, "takes no requests for models"),  # the handshake is well
            (vc.Tls(other), vc.CertificateFailed, "TLS with .* failed .*check the CA file"),
            (None, vc.AnswerCut, "as a TLS port does"),
        ):
            with vc.HttpClient(address, tls=tls) as client, pytest.raises(error, match=words) as caught:
                client.generate("x")
            assert type(caught.value) is error
    with (
        FakeServer() as server,
        vc.HttpClient(server.address, tls=vc.Tls(cert)) as client,
        pytest.raises(vc.CertificateFailed, match="does not speak TLS"),
    ):
        client.generate("x")


def test_a_command_says_one_line_where_grpc_says_many(tls_server: tuple[FakeServer, Path]) -> None:
    server, folder = tls_server
    argv = ["generate", "x", "--server", server.address, "--tls-ca", str(folder / "other.pem")]
    done = subprocess.run(
        [sys.executable, "-m", "voltriton.cli", *argv, "--connect-timeout", "0.3"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("voltriton generate: UNAVAILABLE: TLS with ")
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "address", ["", "host", "host:0", "host:70000", "http://host:1", "host:1/path", "a b:1"]
)
def test_addresses_are_checked(address: str) -> None:
    with pytest.raises(vc.InvalidArgument, match="HOST:PORT"):
        vc.Client(address)


def test_server_that_goes_away_in_mid_answer() -> None:
    server = FakeServer().__enter__()
    with vc.Client(server.address, connect_timeout_s=0.3) as client:
        stream = client.stream("!long")
        next(stream)
        server.stop()
        with pytest.raises((vc.AnswerCut, vc.Cancelled)):
            list(stream)
        with pytest.raises(vc.ConnectionFailed):
            client.generate("x")


class Broken(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = lambda: code, lambda: details


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.UNKNOWN, "Stream removed (POSIX error 104)"),
        (grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer"),
    ],
)
def test_a_server_that_goes_away_amid_a_call_says_what_to_do(code: grpc.StatusCode, details: str) -> None:
    """gRPC's words for it differ with the moment."""
    target = Target("127.0.0.1:8001", None, None, (), 5.0, MAX_MESSAGE_BYTES, True)
    failure = unary_failure(Broken(code, details), target)
    assert isinstance(failure, vc.Unavailable)
    assert "the connection to 127.0.0.1:8001 was lost" in str(failure) and "voltriton status" in str(failure)
