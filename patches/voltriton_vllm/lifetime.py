"""Engine processes end with their parent, also when that was killed and could tell nobody."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent ends; leave at once if it has ended.

    Called first thing in an engine core or worker process. The signal is bound to the *thread* that started
    this process (prctl(2)): whoever starts an engine must do so in a thread that stays, which vLLM does.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent.pid and not _alive(parent.pid):  # ended before prctl: no signal will come
        os._exit(1)


def _alive(pid: int | None) -> bool:
    """Asked only when someone else is our parent: a fork server (fine, it ends with its own), or init."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
