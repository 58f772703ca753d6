"""A child that asked for it ends when its parent is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, sys, time
def child(asks):
    from voltriton_vllm.lifetime import die_with_parent
    if asks:
        die_with_parent()
    import os
    print(os.getpid(), flush=True)
    time.sleep(60)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    context.Process(target=child, args=(sys.argv[2] == "asks",)).start()
    time.sleep(60)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.fixture
def parent(tmp_path):
    """Start PARENT with the given arguments; returns it and the pid of its child."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    started: list[int] = []
    parents: list[subprocess.Popen[str]] = []

    def start(method: str, asks: str) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, str(script), method, asks], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.stdout.close()
        started.append(pid)
        parents.append(process)
        return process, pid

    yield start
    for process in parents:
        process.kill()
        process.wait()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux system call")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_parent_takes_the_child_along(parent, method):
    process, child = parent(method, "asks")
    assert not gone(child)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux system call")
def test_without_asking_it_stays(parent):
    process, child = parent("fork", "not")
    process.kill()
    process.wait()
    assert not gone(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux system call")
def test_a_fork_server_in_between_is_not_taken_for_a_dead_parent(parent):
    _, child = parent("forkserver", "asks")
    assert not gone(child)


def test_a_process_without_such_a_parent_is_left_alone():
    code = "from voltriton_vllm.lifetime import die_with_parent; die_with_parent(); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"
