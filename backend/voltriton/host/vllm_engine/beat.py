"""A sign of life of vLLM's step loop."""

from __future__ import annotations

import time
from typing import Any


class Beat:
    """When the engine last made a step: vLLM calls its stat loggers after each."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.factory: Any = None

    def touch(self) -> None:
        self.at = time.monotonic()


def make_beat() -> Beat:
    from vllm.v1.metrics.loggers import StatLoggerBase

    beat = Beat()

    class BeatLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, *args: Any, **kwargs: Any) -> None:
            beat.touch()

        def log_engine_initialized(self) -> None:
            pass

    beat.factory = BeatLogger
    return beat
