"""`voltriton drain`: new requests are refused, open ones may finish. For a preStop hook: SIGTERM comes after it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from voltriton.processes import name
from voltriton.server import read_metric
from voltriton.supervisor import NAME, seconds, state_file
from voltriton.triton import default_root


def main(argv: list[str]) -> int:
    """0 when no request is open any more, 1 when some are after the timeout or nothing is being served."""
    parser = argparse.ArgumentParser(prog="voltriton drain", description=__doc__)
    parser.add_argument("--root", type=Path, default=default_root())
    parser.add_argument("--http-port", type=int, default=8000, help="of the server (%(default)s)")
    parser.add_argument("--timeout-s", type=seconds, default=60.0)
    args = parser.parse_args(argv)
    state = state_file(args.root, args.http_port)
    try:
        status = json.loads(state.read_text())
        # A killed one leaves its file, and its number may be another process's by now.
        if name(status["pid"]) != NAME:
            raise ProcessLookupError
        os.kill(status["pid"], signal.SIGUSR1)
    except (OSError, ValueError, KeyError):
        print(f"voltriton drain: no `voltriton serve` runs with {state}", file=sys.stderr)
        return 1
    deadline = time.monotonic() + args.timeout_s
    # The stubs report once a second: the first numbers after the drain began.
    time.sleep(min(1.5, args.timeout_s))
    while (left := _left(state, status["metrics"])) is not None and time.monotonic() < deadline:
        if name(status["pid"]) != NAME:
            print("drained: the server has ended")
            return 0
        time.sleep(0.2)
    if left is not None:
        print(f"voltriton drain: {left} after {args.timeout_s:g} s", file=sys.stderr)
        return 1
    print("drained: no request is open")
    return 0


def _left(state: Path, metrics: str) -> str | None:
    """What the drain still waits for; None when it is over."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        # No request is open and new ones are still taken: the supervisor is stopped, or at work on a repair.
        if (now := json.loads(state.read_text())["state"]) not in ("draining", "stopped"):
            return f"new requests are not refused yet (the server is {now})"
    open_now = _open(metrics)
    return None if open_now == "0" else f"{open_now} requests are still open"


def _open(metrics: str) -> str:
    """How many requests; that is not known where the server is just being started anew."""
    try:
        return f"{read_metric(metrics, 'voltriton:requests_open', timeout_s=5.0):.0f}"
    except OSError:
        return f"an unknown number of (no metrics at {metrics})"
