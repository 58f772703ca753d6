"""The engine dies, stops, stalls or does not start: what its clients see, and that it comes back by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from follow import Follow, follow, script
from server import Server, fake_repository, shm_files, wait_for
from voltriton.processes import alive, shared_memory
from wire_client import ask

LONG = script(repeat=["w ", 3000], delay_ms=20)
# The scripted engine's time limits in these tests, short so that the tests are.
STUCK_S, SILENT_S = 1.0, 2.0


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine may be broken: each test waits until it is back."""
    folder = tmp_path_factory.mktemp("broken")
    repository = fake_repository(
        folder / "repository",
        {
            "stuck_timeout_s": STUCK_S,
            "silent_timeout_s": SILENT_S,
            "max_restarts": 100,
            "restart_pause_s": 0.1,
        },
    )
    with Server(repository, folder / "log") as server:
        yield server
        children = server.children()
        files = shared_memory(children)
    wait_for(lambda: not any(map(alive, children)), 10, "all children to be gone")
    assert not files & shm_files()


def wait_until_back(server: Server) -> None:
    wait_for(lambda: ask(server.grpc_url, "a b", stream=True).text == "a b", 60, "the engine to be back")


def check_ends(streams: list[Follow], since: float, limit_s: float, cause: str) -> None:
    """Each open request ended once, in time, with UNAVAILABLE, its cause, and the text so far."""
    for stream in streams:
        stream.wait()
        stream.close()
        assert stream.answer.error is not None
        assert stream.answer.error.startswith("UNAVAILABLE: the engine died while the request was running")
        assert cause in stream.answer.error
        assert (stream.answer.errors, stream.answer.finals) == (1, 1)
        assert set(stream.text.split()) == {"w"}
        assert stream.ended - since < limit_s


def test_host_killed(broken: Server) -> None:
    restarts = broken.metric("voltriton:engine_restarts_total")
    streams = follow(broken.grpc_url, 8, LONG)
    whole = Follow(broken.grpc_url, LONG, stream=False)
    host = broken.host_pid()
    killed = time.monotonic()
    os.kill(host, signal.SIGKILL)
    # At once, also for who comes now.
    wait_for(lambda: "UNAVAILABLE" in (ask(broken.grpc_url, "a").error or ""), 2, "a refusal")
    check_ends(streams, killed, 2.0, "signal SIGKILL")
    whole.wait()
    assert whole.answer.error is not None
    assert whole.answer.error.startswith("UNAVAILABLE: ")
    wait_until_back(broken)
    assert broken.host_pid() != host
    assert broken.metric("voltriton:engine_restarts_total") == restarts + 1
    assert broken.metric("voltriton:engine_up") == 1
    assert "[vllm] engine down: the engine host ended with signal SIGKILL" in broken.log_text()


def test_temporary_files_go_with_a_killed_host(broken: Server) -> None:
    host = broken.host_pid()
    folder = temporary_folder(host)
    (folder / "left-behind").touch()
    os.kill(host, signal.SIGKILL)
    wait_until_back(broken)
    assert not folder.exists()
    assert temporary_folder(broken.host_pid()) != folder


def temporary_folder(pid: int) -> Path:
    values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(Path(v.removeprefix(b"TMPDIR=").decode()) for v in values if v.startswith(b"TMPDIR="))


def test_engine_core_dead(broken: Server) -> None:
    streams = follow(broken.grpc_url, 4, LONG)
    began = time.monotonic()
    streams.append(Follow(broken.grpc_url, script(repeat=["w ", 300], delay_ms=20, core_dies_at=2)))
    check_ends(streams, began, 4.0, "the core is dead")
    wait_until_back(broken)


def test_no_step_while_work_is_pending(broken: Server) -> None:
    host = broken.host_pid()
    stream = Follow(broken.grpc_url, script(tokens=["w "] * 9, stall_at=2))
    stream.wait_for_text()
    began = time.monotonic()
    check_ends([stream], began, STUCK_S + 4.0, f"stuck_timeout_s={STUCK_S:g}")
    wait_until_back(broken)
    assert not alive(host)


def test_host_stopped(broken: Server) -> None:
    """SIGSTOP: nothing dies, nothing ends; silence is what gives it away."""
    host = broken.host_pid()
    streams = follow(broken.grpc_url, 4, LONG)
    began = time.monotonic()
    os.kill(host, signal.SIGSTOP)
    check_ends(streams, began, SILENT_S + 4.0, f"silent_timeout_s={SILENT_S:g}")
    wait_until_back(broken)
    assert not alive(host)


def test_requests_while_the_engine_is_away_fail_at_once(broken: Server) -> None:
    os.kill(broken.host_pid(), signal.SIGKILL)
    wait_for(lambda: broken.metric("voltriton:engine_up") == 0, 5, "the gauge to fall")
    began = time.monotonic()
    ask(broken.grpc_url, "a")
    assert time.monotonic() - began < 5
    wait_until_back(broken)


def test_one_request_fails_alone(broken: Server) -> None:
    host = broken.host_pid()
    stream = Follow(broken.grpc_url, script(repeat=["w ", 50], delay_ms=10))
    failed = ask(broken.grpc_url, script(tokens=["a"] * 3, fail_at=1), stream=True)
    assert failed.error is not None
    assert failed.error.startswith("INTERNAL: RuntimeError: scripted fault")
    stream.wait()
    assert stream.answer.error is None
    assert len(stream.text.split()) == 50
    assert broken.host_pid() == host


def test_plain_tritonserver_killed(tmp_path: Path) -> None:
    """Without `voltriton serve` too: no process stays, and nothing in /dev/shm."""
    with Server(fake_repository(tmp_path / "repository"), tmp_path / "log") as server:
        children = server.children()
        files = shared_memory(children)
        assert files
        streams = follow(server.grpc_url, 3, LONG)
        assert server.process is not None
        server.process.kill()
        wait_for(lambda: not any(map(alive, children)), 10, "the end of the children")
        for stream in streams:
            stream.wait()
            assert stream.broken == "UNAVAILABLE"
    assert not files & shm_files()
