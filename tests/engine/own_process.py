"""An engine in a process of its own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from server import shm_files
from voltriton.processes import remove_shared_memory


def run_engine(
    command: list[str], timeout_s: float, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """What it prints, whatever its status; one at a time: two on a small machine only disturb each other.

    Ranks that are killed at their engine's end, or whose load is refused, leave their shared memory, which is removed
    here; in a server the host sweeps (`voltriton.claim`).
    """
    with Path(tempfile.gettempdir(), f"voltriton-test-engine-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = shm_files()
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
        )
        remove_shared_memory(name for name in shm_files() - before if name.startswith("vllm_dist_"))
        return done
