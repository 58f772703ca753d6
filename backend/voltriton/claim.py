"""A server's claim on names in /dev/shm, so that what a killed one leaves there can be told from what is in use.

A claim is a file that is locked (`flock`) while anything of the server lives: the supervisor, tritonserver and its
stubs all hold the same open file. It gives the prefix of Triton's regions, and lists what the engines' processes have
mapped. A claim that nobody holds belongs to a dead server, whatever process ids say (containers that share /dev/shm
do not share those): its files may go.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from voltriton.errors import StartError
from voltriton.processes import SHARED_MEMORY, remove_shared_memory

SUFFIX = ".voltriton-claim"
# Triton takes 1 MiB for each of its stubs at least, and every rank of an engine its message buffers.
LEAST_BYTES = 32 << 20


class Claim:
    """Held until `release`, or until every process that has `fd` open is gone."""

    def __init__(self) -> None:
        """StartError where /dev/shm cannot be used."""
        token = secrets.token_hex(6)
        self.prefix = f"voltriton-{token}-"
        self._file = SHARED_MEMORY / f"{token}{SUFFIX}"
        self._noted: set[str] = set()
        try:
            check_room()
            # Locked before it has its name: nobody may take it for a dead server's.
            fresh = SHARED_MEMORY / f"{token}.voltriton-new"
            self.fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            fresh.rename(self._file)
        except OSError as error:
            raise StartError(f"{SHARED_MEMORY} cannot be used: {error.strerror}") from None

    def note(self, names: Iterable[str]) -> None:
        """Writes down what must go when the server is dead."""
        new = set(names) - self._noted
        if new:
            self._noted |= new
            # Where /dev/shm is full we still know them; only the sweep after a kill of ours would not.
            with contextlib.suppress(OSError):
                os.write(self.fd, "".join(f"{name}\n" for name in sorted(new)).encode())

    def clean(self) -> list[str]:
        """Removes what a killed server left; its processes must be gone."""
        return _clean(self.prefix, self._noted)

    def release(self) -> None:
        """Where a process that does not end has something mapped still, the claim stays for the next start's sweep."""
        self.clean()
        if not _existing(self.prefix, self._noted):
            self._file.unlink(missing_ok=True)
        os.close(self.fd)


def sweep() -> list[str]:
    """Removes what dead servers left; returns the names."""
    removed = []
    for file in sorted(SHARED_MEMORY.glob(f"*{SUFFIX}")):
        # Another user's, or gone in between.
        with contextlib.suppress(OSError):
            removed += _sweep(file)
    return removed


def _sweep(file: Path) -> list[str]:
    with file.open("r+") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return []
        prefix, noted = f"voltriton-{file.name.removesuffix(SUFFIX)}-", claim.read().split("\n")[:-1]
        removed = _clean(prefix, noted)
        if not _existing(prefix, noted):
            file.unlink(missing_ok=True)
        return removed


def _clean(prefix: str, noted: Iterable[str]) -> list[str]:
    return remove_shared_memory(_existing(prefix, noted))


def _existing(prefix: str, noted: Iterable[str]) -> set[str]:
    # A name with a slash would lead out of the folder: the file may have been written by anybody.
    names = {name for name in noted if name and "/" not in name and (SHARED_MEMORY / name).exists()}
    return names | {path.name for path in SHARED_MEMORY.glob(f"{prefix}*")}


def check_room() -> None:
    """StartError where /dev/shm is too small for any server."""
    room = os.statvfs(SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    if free < LEAST_BYTES:
        raise StartError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, {LEAST_BYTES >> 20} are needed at least: remove what is left "
            "there, or give the container more (docker: --shm-size=1g; `voltriton doctor` says how much)"
        )
