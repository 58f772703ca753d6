"""SIGTERM and SIGINT for a while: a measurement that is stopped keeps what it has, and stops what it started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def _handled(on_int: Any, on_term: Any) -> Iterator[None]:
    """Afterwards as before: what is ignored is so in every process that is started later."""
    handlers = {signal.SIGINT: on_int, signal.SIGTERM: on_term}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def as_interrupts() -> AbstractContextManager[None]:
    """Both raise KeyboardInterrupt. A plain SIGTERM would leave servers and results behind, and shells start background
    jobs with SIGINT ignored."""
    # By way of SIGINT, whose handling asyncio takes over while it runs.
    return _handled(signal.default_int_handler, lambda *_: signal.raise_signal(signal.SIGINT))


def ignored() -> AbstractContextManager[None]:
    return _handled(signal.SIG_IGN, signal.SIG_IGN)
