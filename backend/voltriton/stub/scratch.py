"""A folder for the temporary files of one engine host: they end with it, also where it is killed.

vLLM leaves its sockets and rendezvous files in the folder for temporary files when it is killed, and some of them when
it is not. Like a claim on /dev/shm, a folder belongs to whoever has it locked (`flock`), whatever process ids say:
what nobody holds is removed by the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from voltriton.errors import StartError

PREFIX, FRESH = "voltriton-host-", "voltriton-new-"


class Scratch:
    """Held until `remove`, or until every process that has `fd` open is gone."""

    def __init__(self, parent: str | None = None) -> None:
        """In `parent`, or where Python has its temporary files. StartError where nothing can be written there."""
        base = Path(parent or tempfile.gettempdir())
        _sweep(base)
        token = secrets.token_hex(6)
        self.path = base / f"{PREFIX}{token}"
        fresh = base / f"{FRESH}{token}"
        try:
            # Locked before it has its name: nobody may take it for a dead host's.
            fresh.mkdir(0o700)
            self.fd = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            fresh.rename(self.path)
        except OSError as error:
            raise StartError(
                f"temporary files cannot be written to {base} ({error.strerror}): mend that, or set TMPDIR"
            ) from None

    def remove(self) -> None:
        """A second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        # Another user's, or gone in between.
        with contextlib.suppress(OSError):
            _remove_dead(folder)


def _remove_dead(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(fd)
