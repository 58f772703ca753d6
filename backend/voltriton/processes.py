"""Linux processes: who is below whom, who lives, and dying with a parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> Callable[[], None]:
    """For `preexec_fn`: the kernel kills the child when the thread that made it ends."""
    libc = ctypes.CDLL(None, use_errno=True)

    def before_exec() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name (which may hold anything): state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def alive(pid: int) -> bool:
    """Running or stopped, but no zombie."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """All processes below a process, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found
