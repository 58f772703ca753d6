"""Progress of long steps: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S = 5.0


class Meter:
    """Counts bytes from several threads and shows them."""

    def __init__(self, what: str, total_bytes: int):
        self._what, self._total = what, max(total_bytes, 1)
        self._done = 0
        self._began = self._told = time.monotonic()
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=self._total)
            self._bar.start()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
            elif time.monotonic() - self._told > LINE_EVERY_S:
                self._told = time.monotonic()
                print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        elapsed_s = time.monotonic() - self._began
        rate = self._done / elapsed_s
        left_s = (self._total - self._done) / rate if rate else 0.0
        return f"{self._what}: {self._done / self._total:.0%}, {rate / 1e6:.1f} MB/s, {left_s:.0f} s left"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def meter(what: str, total_bytes: int) -> Iterator[Meter]:
    shown = Meter(what, total_bytes)
    try:
        yield shown
    finally:
        shown.close()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what begins and how long it took."""
    began = time.monotonic()
    print(f"{what} ...", flush=True)
    yield
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)
