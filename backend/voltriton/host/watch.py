"""Is the engine alive? Dead, or without a step while work is pending: then the host must end.

The host is disposable: it answers what is open, says why it dies, and exits; the stub starts another.
"""

from __future__ import annotations

import asyncio
import time

from voltriton.host.engine_api import Engine
from voltriton.host.service import Service

INTERVAL_S = 0.25


class Watch:
    def __init__(self, engine: Engine, service: Service, stuck_timeout_s: float) -> None:
        self._engine = engine
        self._service = service
        self._stuck_timeout_s = stuck_timeout_s

    async def run(self) -> str:
        """Returns the cause when the engine is dead or stuck."""
        idle_until = time.monotonic()
        while True:
            if self._engine.failure is not None:
                return self._engine.failure
            now = time.monotonic()
            if self._service.open_sequences == 0:
                idle_until = now
            quiet_s = now - max(idle_until, self._engine.last_step_at)
            if quiet_s > self._stuck_timeout_s:
                return (
                    f"the engine made no step for {quiet_s:.1f} s with {self._service.open_sequences} sequences open "
                    f"(stuck_timeout_s={self._stuck_timeout_s:g})"
                )
            await asyncio.sleep(min(INTERVAL_S, self._stuck_timeout_s / 4))
