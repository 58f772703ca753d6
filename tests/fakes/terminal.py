"""Our commands on a pseudo-terminal, as a person has them."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

# A terminal of its own, and no signal ignored, as a login shell starts programs: these tests may run in the background.
_LAUNCHER = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def command(*argv: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "voltriton.cli", *argv]


class Terminal:
    """A program on a pseudo-terminal: `say` types, `until` reads."""

    def __init__(self, argv: list[str]) -> None:
        self.master, slave = pty.openpty()
        # Ctrl-C is a signal only where the terminal is the session's own.
        launcher = [sys.executable, "-c", _LAUNCHER, *argv]
        self.process = subprocess.Popen(
            launcher, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def say(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, word: str, timeout_s: float = 20) -> str:
        """What came up to and with the word; it is then forgotten."""
        deadline = time.monotonic() + timeout_s
        while word not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {word!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended without {word!r}: {self.seen!r}") from None
        head, _, self.seen = self.seen.partition(word)
        return head + word

    def close(self) -> int:
        """The exit status; a program that goes on is killed, which is an error."""
        try:
            return self.process.wait(20)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            os.close(self.master)
