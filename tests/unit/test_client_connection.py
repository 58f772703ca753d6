"""Servers that are not there, are something else, or have the wrong certificate: one clear line each."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import voltriton_client as vc
from certificates import certificate
from kserve import FakeServer


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
