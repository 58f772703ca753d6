"""Who may ask for what: TLS, protocols behind a key, and requests that name files and URLs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import voltriton_client as vc
from certificates import certificate
from lure import Lure, check_that_nothing_is_fetched
from serve import Serve
from server import fake_repository
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from wire_client import ask

KEY = (("triton-grpc-protocol-user-key", "open sesame"),)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_repository(tmp_path_factory.mktemp("access") / "repository")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the server, of its one client, and of a stranger."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client", "stranger"):
        cert, key = certificate("127.0.0.1")
        (folder / f"{name}.pem").write_bytes(cert)
        (folder / f"{name}.key").write_bytes(key)
    return folder


@pytest.fixture(scope="module")
def guarded(
    repository: Path, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serve]:
    """gRPC by mutual TLS, and inference over it for those who have the key."""
    options = (
        "--grpc-use-ssl=true", "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={certificates}/server.pem", f"--grpc-server-key={certificates}/server.key",
        f"--grpc-root-cert={certificates}/client.pem", "--grpc-restricted-protocol=inference:user-key=open sesame",
    )  # fmt: skip
    with Serve(repository, tmp_path_factory.mktemp("guarded"), "--", *options) as serve:
        yield serve


def client(
    serve: Serve, folder: Path, name: str | None, metadata: tuple[tuple[str, str], ...] = KEY
) -> vc.Client:
    tls = vc.Tls(
        ca=str(folder / "server.pem"),
        cert=str(folder / f"{name}.pem") if name else None,
        key=str(folder / f"{name}.key") if name else None,
    )
    return vc.Client(serve.grpc_url, tls=tls, metadata=metadata, connect_timeout_s=1.0)


def test_mutual_tls_lets_its_client_in(guarded: Serve, certificates: Path) -> None:
    with client(guarded, certificates, "client") as well:
        assert well.generate("a b").text == "a b"


@pytest.mark.parametrize("name", [None, "stranger"])
def test_mutual_tls_refuses_others(guarded: Serve, certificates: Path, name: str | None) -> None:
    with client(guarded, certificates, name) as other, pytest.raises(vc.VoltritonError) as error:
        other.generate("a b")
    assert error.value.code == "UNAVAILABLE"
    test_mutual_tls_lets_its_client_in(guarded, certificates)


def test_plain_text_is_refused_where_tls_is_wanted(guarded: Serve) -> None:
    with (
        vc.Client(guarded.grpc_url, metadata=KEY, connect_timeout_s=1.0) as plain,
        pytest.raises(vc.WrongProtocol, match="wants TLS"),
    ):
        plain.generate("a b")


@pytest.mark.parametrize("metadata", [(), ((KEY[0][0], "another"),)])
def test_inference_behind_a_key(
    guarded: Serve, certificates: Path, metadata: tuple[tuple[str, str], ...]
) -> None:
    """The supervisor's canary goes over HTTP, which has a key of its own: nothing is repaired because of this one."""
    with client(guarded, certificates, "client", metadata) as keyless:
        with pytest.raises(vc.VoltritonError, match="This protocol is restricted"):
            keyless.generate("a b")
        assert keyless.live()
    assert guarded.status()["repairs"] == 0


@pytest.fixture(scope="module")
def plain(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(repository, tmp_path_factory.mktemp("plain")) as serve:
        yield serve


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="vllm")),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="vllm")),
        ("RepositoryIndex", pb.RepositoryIndexRequest()),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="x", key="/x", byte_size=1)),
    ],
)
def test_what_is_the_supervisors_alone(plain: Serve, method: str, request_: Any) -> None:
    with grpc.insecure_channel(plain.grpc_url) as channel, pytest.raises(grpc.RpcError) as error:
        getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)(request_, timeout=10)
    assert "This protocol is restricted" in str(error.value.details())
    assert ask(plain.grpc_url, "a b", stream=True).text == "a b"


@pytest.fixture
def lure(tmp_path: Path) -> Iterator[Lure]:
    lure = Lure(tmp_path)
    yield lure
    lure.close()


def test_urls_and_paths_in_requests_are_refused(plain: Serve, lure: Lure) -> None:
    check_that_nothing_is_fetched(plain, lure)


def test_paths_are_text_where_text_is_wanted(plain: Serve, lure: Lure) -> None:
    """A prompt or a schema that looks like a path is not one."""
    for name in (lure.url, str(lure.file)):
        assert ask(plain.grpc_url, name).text.endswith(name)
        ask(plain.grpc_url, "a", sampling_parameters={"structured_outputs": {"json": name}})
        ask(plain.grpc_url, "a", sampling_parameters={"structured_outputs": json.dumps({"grammar": name})})
    lure.check()
