"""File systems of a command's own, for faults that only a mount can make."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def namespace(*mounts: str) -> list[str]:
    """What a command is started with so that these lines of shell are run before it, in a mount namespace of its own.

    The process keeps its id; /proc/PID/root is how it is looked into from outside.
    """
    unshare = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    )
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    return [*unshare, "sh", "-ec", "\n".join([*mounts, 'exec "$@"']), "sh"]


def read_only(folder: Path) -> str:
    return f"mount --bind '{folder}' '{folder}'; mount -o remount,ro,bind '{folder}'"


def small(folder: Path, kib: int) -> str:
    return f"mount -t tmpfs -o size={kib}k tmpfs '{folder}'"


def seen_by(pid: int, path: Path) -> Path:
    return Path(f"/proc/{pid}/root") / path.absolute().relative_to("/")
