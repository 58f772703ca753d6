"""Linux processes: who is below whom, who lives, and dying with a parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
SHARED_MEMORY = Path("/dev/shm")
# How long Python's resource trackers have to unlink what killed processes left, before they are killed as well.
TRACKER_S = 2.0


def set_name(name: str) -> None:
    """For `ps -e`, `top` and the kernel's log: 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent(pid: int) -> Callable[[], None]:
    """For `preexec_fn`: the kernel kills the child when the thread that made it ends."""
    libc = ctypes.CDLL(None, use_errno=True)

    def before_exec() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != pid:
            os._exit(1)

    return before_exec


def end_with(leader: int, victim: int) -> None:
    """A thread that kills `victim` as soon as `leader` has ended, and removes what only the victim has in /dev/shm.

    For Triton's stubs, which see the end of their server themselves, but stay for ever where one of their threads is
    just in a call to it. The parent-death signal would not do: the server makes a stub in a thread that ends after
    loading.
    """
    threading.Thread(target=_end_with, args=(leader, victim), name="voltriton-parent", daemon=True).start()


def _end_with(leader: int, victim: int) -> None:
    # Linux before 5.3, or a container that forbids it, has no pidfd.
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(leader)
        select.select([fd], [], [])
    while alive(leader):
        time.sleep(0.1)
    # A server that is killed, or whose exit timeout is over, leaves the region that it had with its stub.
    remove_shared_memory(shared_memory([victim]), besides=victim)
    os.kill(victim, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name (which may hold anything): state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def parent(pid: int) -> int:
    """0 where there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields is not None else 0


def alive(pid: int) -> bool:
    """Running or stopped, but no zombie."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def survives(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores or handles a signal that ends others. One that was just started does not yet."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return False
    # Masks of 64 signals (proc(5)).
    return bool((int(fields["SigIgn"], 16) | int(fields["SigCgt"], 16)) >> (number - 1) & 1)


def name(pid: int) -> str:
    """What `set_name` gave it; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants(pid: int) -> list[int]:
    """All processes below a process, zombies left out."""
    children: dict[int, list[int]] = {}
    for each in all_pids():
        if (fields := _stat(each)) and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(each)
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def session(leader: int) -> list[int]:
    """All processes of a session, zombies left out: what a leader started, whoever its parents are by now."""
    found = []
    for each in all_pids():
        fields = _stat(each)
        if fields is not None and int(fields[3]) == leader and fields[0] not in "ZX":
            found.append(each)
    return found


def kill(pids: Iterable[int], trackers: bool = False) -> None:
    """SIGKILL.

    The resource trackers of Python's multiprocessing are spared unless asked for: when the last process that used one
    is gone, it unlinks the semaphores and the memory that were left in /dev/shm, and ends by itself.
    """
    for pid in pids:
        if trackers or not is_tracker(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def kill_all(find: Callable[[], Iterable[int]], timeout_s: float) -> set[int]:
    """SIGKILL for what `find` finds, until it finds nothing that lives; returns what is left when the time is over."""
    began = time.monotonic()
    while left := {pid for pid in find() if alive(pid)}:
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            break
        kill(left, trackers=waited_s > TRACKER_S)
        time.sleep(0.02)
    return left


def is_tracker(pid: int) -> bool:
    return "from multiprocessing.resource_tracker import main" in command_line(pid)


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm of what these processes have mapped; a process that is gone or not ours has none."""
    names: set[str] = set()
    mark = f"{SHARED_MEMORY}/"
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = line.partition(mark)[2]
                if path and not path.endswith(" (deleted)"):
                    names.add(path)
    return names


def remove_shared_memory(names: Iterable[str], besides: int = 0) -> list[str]:
    """Unlinks what nobody (`besides` one process) has mapped any more; returns what was removed."""
    left = {name for name in names if (SHARED_MEMORY / name).exists()}
    if left:
        left -= shared_memory({*all_pids()} - {besides})
    removed = []
    for name in sorted(left):
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / name).unlink()
            removed.append(name)
    return removed
