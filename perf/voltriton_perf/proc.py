"""Process trees, their CPU and memory, from /proc (the package of the server is not imported)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """The process and all its descendants; zombies, and what ended meanwhile, are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found, todo = [root], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def name(pid: int) -> str:
    """The process's own title; a Python that gave itself none is named by its command."""
    comm = Path(f"/proc/{pid}/comm").read_text().strip()
    if not comm.startswith("python"):
        return comm
    words = [
        w for w in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1:] if w and not w.startswith("-")
    ]
    return Path(words[0]).name[:40] if words else comm


def cpu_s(pids: Iterable[int]) -> Counter[str]:
    """CPU seconds so far, by the processes' names."""
    used: Counter[str] = Counter()
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            used[name(pid)] += (int(fields[11]) + int(fields[12])) / TICK  # type: ignore[assignment]
        except OSError:
            continue
    return used


def pss_mib(pids: Iterable[int]) -> float:
    """Proportional set size of the processes together."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024
