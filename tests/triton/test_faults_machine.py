"""What a machine does to a server: a full disk, read-only folders, a small /dev/shm, a clock that jumps."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
from follow import Follow, script
from mounts import namespace, read_only, seen_by, small
from serve import Serve
from server import fake_repository, wait_for
from voltriton.processes import command_line
from voltriton.triton import Layout, default_root
from wire_client import ask


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_repository(tmp_path_factory.mktemp("machine") / "repository", {"restart_pause_s": 0.1})


def works(serve: Serve) -> bool:
    return ask(serve.grpc_url, "a b", stream=True).text == "a b"


def wait_for_words(serve: Serve, words: str, count: int = 1) -> None:
    wait_for(lambda: serve.said().count(words) >= count or serve._ended(), 60, words)


def test_full_disk(repository: Path, tmp_path: Path) -> None:
    """Neither log nor state can be written: it serves, repairs, says so once, and is well when there is room again."""
    run = Layout(default_root().absolute()).run
    run.mkdir(exist_ok=True)
    before = namespace(small(run, 64), f"cat /dev/zero > '{run}/fill' || true")
    serve = Serve(repository, tmp_path, f"--log={run}/triton.log", before=before)
    serve.start()
    try:
        wait_for_words(serve, "serve: ready")
        assert works(serve)
        assert serve.process is not None
        assert serve.said().count("the state cannot be written") == 1
        assert "(No space left on device)" in serve.said()
        serve.look()
        server = next(pid for pid in serve.children() if "bin/tritonserver" in command_line(pid))
        os.kill(server, signal.SIGKILL)
        wait_for_words(serve, "ready again")
        assert works(serve)
        seen_by(serve.process.pid, run / "fill").unlink()
        wait_for(lambda: serve.state() == "ready", 20, "the state to be written")
        assert serve.stop() == 0
    finally:
        serve.stop()
    serve.check_nothing_is_left()


def test_read_only_folders(repository: Path, tmp_path: Path) -> None:
    """A container with a read-only root: the installation, the models and the state."""
    before = namespace(read_only(default_root().absolute()), read_only(repository))
    serve = Serve(repository, tmp_path, before=before)
    serve.start()
    try:
        wait_for_words(serve, "serve: ready")
        assert works(serve)
        assert "the state cannot be written" in serve.said()
        assert "(Read-only file system)" in serve.said()
    finally:
        assert serve.stop() == 0
    serve.check_nothing_is_left()


def test_a_log_that_cannot_be_written(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    serve = Serve(repository, tmp_path, f"--log={folder}/log", before=namespace(read_only(folder)))
    serve.start()
    assert serve.process is not None
    assert serve.process.wait(30) == 1
    assert serve.said() == f"voltriton serve: --log {folder}/log cannot be written: Read-only file system\n"


def test_dev_shm_too_small(repository: Path, tmp_path: Path) -> None:
    """C078: refused at the start, with the size."""
    serve = Serve(repository, tmp_path, before=namespace(small(Path("/dev/shm"), 16 << 10)))
    serve.start()
    assert serve.process is not None
    assert serve.process.wait(30) == 1
    assert serve.said().count("\n") == 1
    assert "/dev/shm has 16 MiB free, 32 are needed at least" in serve.said()
    assert "--shm-size" in serve.said()


def test_dev_shm_full_while_serving(repository: Path, tmp_path: Path) -> None:
    """A request that finds no room is refused by Triton, with the cause; small ones go on, and it when there is room."""
    large = "word " * 1_000_000
    with Serve(repository, tmp_path, before=namespace(small(Path("/dev/shm"), 64 << 10))) as serve:
        assert serve.process is not None
        filler = seen_by(serve.process.pid, Path("/dev/shm/filler"))
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(64 << 20))
        for _ in range(3):
            assert "Failed to increase the shared memory pool" in (ask(serve.grpc_url, large).error or "")
            assert works(serve)
        filler.unlink()
        assert "at most" in (ask(serve.grpc_url, large).error or "")  # ours: more tokens than the model takes
        assert works(serve)
        assert serve.status()["repairs"] == 0


@pytest.fixture
def clock(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file with the seconds that the wall clock is off, and the environment of processes that see such a clock."""
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    library, step = tmp_path / "clock_step.so", tmp_path / "step"
    source = Path(__file__).with_name("clock_step.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    step.write_bytes(struct.pack("q", 0))
    return step, {"LD_PRELOAD": str(library), "CLOCK_STEP": str(step)}


def test_clock_step(repository: Path, tmp_path: Path, clock: tuple[Path, dict[str, str]]) -> None:
    """The wall clock jumps for supervisor and host, by a month and back: no limit runs out early or late."""
    step, env = clock
    with Serve(repository, tmp_path, "--canary-timeout-s=5", env=env) as serve:
        since = serve.status()["since"]
        for days in (30, -30):
            stream = Follow(serve.grpc_url, script(repeat=["w ", 150], delay_ms=20), timeout_ms=60_000)
            began = time.monotonic()
            limited = Follow(serve.grpc_url, script(repeat=["w ", 3000], delay_ms=20), timeout_ms=2000)
            for each in (stream, limited):
                each.wait_for_text()
            with step.open("r+b") as file:  # in place: it is mapped
                file.write(struct.pack("q", days * 86400))
            limited.wait()
            late = "DEADLINE_EXCEEDED: the request took longer than 2000 ms"
            assert (limited.broken, limited.answer.error) == (None, late)
            assert 2.0 <= limited.ended - began < 5.0
            stream.wait()
            assert (stream.answer.error, len(stream.text.split())) == (None, 150)
        assert works(serve)
        # Canaries, one a second, meanwhile.
        assert serve.status()["repairs"] == 0
        # The jump was there: what is written next has the new date.
        os.kill(serve.server_pid(), signal.SIGKILL)
        serve.wait_until_back()
        assert round((serve.status()["since"] - since) / 86400) == -30
        assert works(serve)
