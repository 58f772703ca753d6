"""For all tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, settings
from server import shm_files
from voltriton.claim import SUFFIX
from voltriton.processes import all_pids, is_tracker, shared_memory

# No test may depend on how fast or how busy the machine is.
settings.register_profile("voltriton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("voltriton")


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays_in_shared_memory() -> Iterator[None]:
    """Servers and engines are killed all the time here: what nobody has mapped any more has been forgotten."""
    before = shm_files()
    with Path(tempfile.gettempdir(), f"voltriton-tests-{os.getuid()}.lock").open("w") as runs:
        fcntl.flock(runs, fcntl.LOCK_SH)
        yield
        deadline = time.monotonic() + 10
        while left := {name for name in shm_files() - before if not in_use(name)}:
            if time.monotonic() > deadline:
                # Of ranks that have ended; the test that started them removes it. The last run to end sees all.
                if others_run(runs) and all(name.startswith("vllm_dist_") for name in left):
                    break
                pytest.fail(f"left in /dev/shm: {', '.join(sorted(left))}")
            time.sleep(0.2)


def others_run(runs: IO[str]) -> bool:
    """Whether another run of tests holds its lock, too."""
    try:
        fcntl.flock(runs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@pytest.fixture(autouse=True)
def _signals_stay_as_they_were() -> Iterator[None]:
    """What is ignored here is ignored by every process that a later test starts, and its Ctrl-C then does nothing."""

    def ignored() -> dict[str, bool]:
        return {s.name: signal.getsignal(s) is signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM)}

    before = ignored()
    yield
    assert ignored() == before


def in_use(name: str) -> bool:
    """By a process of anybody: other test runs may be going on."""
    if name.endswith(SUFFIX):
        # A claim is held by its lock.
        with contextlib.suppress(FileNotFoundError), (Path("/dev/shm") / name).open() as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False
    pids = all_pids()
    # Python's own are unlinked by their resource tracker, when the last process that uses it has ended.
    if name.startswith(("sem.mp-", "psm_")) and any(map(is_tracker, pids)):
        return True
    return name in shared_memory(pids)
