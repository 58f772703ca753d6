"""Ending processes for good: nothing lives, and nothing of theirs stays in /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import wait_for
from voltriton.claim import Claim, sweep
from voltriton.processes import SHARED_MEMORY, alive, kill, kill_all, session, shared_memory

# What an engine does: a semaphore that its resource tracker knows of, and a child.
ENGINE = """
import multiprocessing, subprocess, sys, time
lock = multiprocessing.get_context("spawn").Lock()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(lock._semlock.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def engine() -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    file = SHARED_MEMORY / f"sem.{process.stdout.readline().decode().strip().lstrip('/')}"
    yield process, file
    kill(session(process.pid), trackers=True)
    process.wait()
    process.stdout.close()


def test_killed_processes_leave_no_semaphore(engine: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, file = engine
    assert file.exists()
    assert len(session(process.pid)) == 3  # it, its child, its resource tracker
    assert kill_all(lambda: session(process.pid), 10.0) == set()
    assert not file.exists()


def test_a_tracker_that_does_not_end_is_killed(
    engine: tuple[subprocess.Popen[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, file = engine
    monkeypatch.setattr("voltriton.processes.TRACKER_S", 0.0)
    assert kill_all(lambda: session(process.pid), 10.0) == set()
    file.unlink(missing_ok=True)


def test_a_claim_stays_while_somebody_has_its_files_mapped() -> None:
    """Where the owner cannot be ended, the next start's sweep finds what is left."""
    claim = Claim()
    region = SHARED_MEMORY / f"{claim.prefix}region"
    region.write_bytes(bytes(4096))
    code = f"import mmap, time; f = open('{region}', 'r+'); m = mmap.mmap(f.fileno(), 4096); print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            assert region.name in shared_memory([holder.pid])
            claim.release()
            assert region.exists()
        finally:
            holder.kill()
    wait_for(lambda: not alive(holder.pid))
    assert region.name in sweep()
    assert not list(SHARED_MEMORY.glob(f"{claim.prefix.split('-')[1]}*"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(claim.fd)
