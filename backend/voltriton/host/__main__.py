"""`python -m voltriton.host FD PARENT_PID`: the engine host, a child of Triton's stub.

It talks wire frames over the socket FD, and dies with its parent: by the kernel's parent-death signal, and
because the socket ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """SIGKILL when the parent's creating thread ends; at once where that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"voltriton host: the parent {parent} is gone")


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    # Ctrl-C is the server's to handle; it stops us by a frame.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from voltriton.host.main import run

    try:
        import uvloop
    except ImportError:
        loop_factory = None
    else:
        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        status = runner.run(run(socket.socket(fileno=fd)))
    sys.stdout.flush()
    # Threads of libraries must not hold up the end; everything of ours has been closed.
    os._exit(status)


if __name__ == "__main__":
    main()
