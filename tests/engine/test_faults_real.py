"""Real faults of a real engine: its core or a rank is killed or stopped while streams are open; files that are broken.

A tiny random Qwen3 with two ranks behind a real tritonserver. tests/triton/test_faults_engine.py has the same faults, and
more, with the scripted engine and tighter times.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import make_tiny
import pytest
from follow import Follow, follow
from repository import real_repository
from server import Server, command_line, wait_for
from voltriton.processes import alive
from wire_client import ask

# Long enough for every stream to be open when the fault comes: the model writes random tokens up to its context.
LONG = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}
STUCK_S = 6.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "qwen3"
    return make_tiny.make(folder, "qwen3", max_position_embeddings=4096) / "ct_w4a16"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("broken")
    settings = {"stuck_timeout_s": STUCK_S, "max_restarts": 100, "restart_pause_s": 0.1}
    repository = real_repository(
        folder / "repository", tiny, settings, tensor_parallel_size=2, max_model_len=3500
    )
    with Server(repository, folder / "log", ready_s=600) as server:
        yield server
        children = server.children()
    wait_for(lambda: not any(map(alive, children)), 30, "all children to be gone")


def process(server: Server, title: str) -> int:
    found = [pid for pid in server.children() if command_line(pid).startswith(title)]
    assert found, f"no {title} below the server"
    return found[0]


def open_streams(server: Server) -> list[Follow]:
    return follow(server.grpc_url, 4, "hello world", sampling_parameters=LONG)


def check(server: Server, streams: list[Follow], engine: list[int], limit_s: float) -> None:
    """Each stream ended once, with UNAVAILABLE and the text so far; the engine is gone whole, and another is there."""
    began = time.monotonic()
    for stream in streams:
        stream.wait()
        stream.close()
        assert (stream.answer.error or "").startswith("UNAVAILABLE: "), stream.answer.error
        assert (stream.answer.errors, stream.answer.finals) == (1, 1)
        assert stream.text
        assert stream.ended - began < limit_s
    wait_for(lambda: not any(map(alive, engine)), 20, "the broken engine's processes to be gone")
    request = {"sampling_parameters": {"max_tokens": 1}}
    wait_for(lambda: ask(server.grpc_url, "hello", **request).error is None, 240, "the engine to be back")


@pytest.mark.parametrize(
    ("title", "fault", "limit_s"),
    [
        ("VLLM::EngineCore", signal.SIGKILL, 10),
        ("VLLM::Worker", signal.SIGKILL, 30),
        ("VLLM::Worker", signal.SIGSTOP, 40),
    ],
    ids=["core killed", "rank killed", "rank stopped"],
)
def test_streams_end_and_the_engine_comes_back(
    broken: Server, title: str, fault: signal.Signals, limit_s: float
) -> None:
    streams = open_streams(broken)
    engine = [pid for pid in broken.children() if command_line(pid).startswith("VLLM::")]
    os.kill(process(broken, title), fault)
    check(broken, streams, engine, limit_s)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [("missing", "no-such-folder"), ("cut", "safetensors"), ("heads", "3"), ("memory", "Available memory")],
    ids=["no such folder", "file cut short", "ranks that do not divide the heads", "no memory"],
)
def test_load_that_cannot_be_is_refused_with_the_cause(
    tmp_path: Path, tiny: Path, breakage: str, message: str
) -> None:
    model, ranks = tmp_path / "model", 1
    if breakage == "missing":
        model = tmp_path / "no-such-folder"
    else:
        shutil.copytree(tiny, model)
    if breakage == "cut":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:20000])
    if breakage == "heads":
        ranks = 3
    settings = {"env": {"VLLM_CPU_KVCACHE_SPACE": "100000"}} if breakage == "memory" else None
    repository = real_repository(
        tmp_path / "repository", model, settings, tensor_parallel_size=ranks, max_model_len=256
    )
    with Server(repository, tmp_path / "log", "--model-control-mode=explicit", ready_s=60) as server:
        code, text = server.post("/v2/repository/models/vllm/load", {}, 200)
        assert code == 400
        assert "the engine did not start: " in text
        assert message in text
        # One line; what follows is Triton's own note of the place in the code.
        assert "\\n" not in text.partition("\\n\\nAt:")[0]
        wait_for(lambda: not server.children(), 20, "the stub and the host to be gone")
