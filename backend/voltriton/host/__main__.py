"""`python -m voltriton.host FD STUB_PID`: the engine host, a child of Triton's stub.

It talks wire frames over the socket FD, and dies with its parent: by the kernel's parent-death signal, and
because the socket ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from voltriton.processes import die_with_parent, end_with, parent, set_name


def main() -> None:
    fd, stub = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(stub)()
    # A stub that is in a call to its dead server may hold Python's lock, and then ends neither itself nor us.
    end_with(parent(stub), stub)
    set_name("voltriton-host")
    # Ctrl-C is the server's to handle; it stops us by a frame.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A drain while the engine is being loaded: it is asked for again.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
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
