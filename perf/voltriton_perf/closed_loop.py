"""The closed-loop load that every target of `perf/peers.py` is put under, and what is measured of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from voltriton_perf import proc
from voltriton_perf.stats import percentile
from voltriton_perf.wires import Connection

WORDS = [
    *("river", "stone", "light", "music", "garden", "winter", "engine", "paper", "silver", "cloud", "forest"),
    *("market", "window", "bridge", "island", "letter", "summer", "doctor", "kitchen", "mirror", "rocket"),
]


@dataclass(frozen=True)
class Plan:
    """`streams` clients, each of which sends `requests` prompts one after another."""

    streams: int
    requests: int
    tokens: int
    seed: int
    words: int = 6


def prompts(plan: Plan, count: int) -> list[str]:
    rng = random.Random(plan.seed)
    return [" ".join(rng.choice(WORDS) for _ in range(plan.words)) for _ in range(count)]


class Load:
    """One run of a plan against the processes below `pid`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ttft_s: list[float] = []
        self._per_token_s: list[float] = []
        self._gaps_s: list[float] = []
        self._messages = 0

    async def run(self, connect: Callable[[], Awaitable[Connection]], pid: int) -> dict[str, Any]:
        plan = self._plan
        clients = await asyncio.gather(*(connect() for _ in range(plan.streams)))
        texts = prompts(plan, plan.streams * (plan.requests + 1))
        # Connections, buffers and caches are warm before the clock starts.
        await asyncio.gather(*(c.run(texts[i], 2) for i, c in enumerate(clients)))
        pids = proc.tree(pid)
        before, own = proc.cpu_s(pids), time.process_time()
        began = time.perf_counter()
        await asyncio.gather(
            *(self._client(c, texts[plan.streams + i :: plan.streams]) for i, c in enumerate(clients))
        )
        wall_s = time.perf_counter() - began
        own = time.process_time() - own
        used = proc.cpu_s(pids)
        used.subtract(before)
        await asyncio.gather(*(c.close() for c in clients))
        return self._row(wall_s, dict(used), own, proc.pss_mib(pids))

    async def _client(self, client: Connection, texts: list[str]) -> None:
        for text in texts:
            began = time.perf_counter()
            times = await client.run(text, self._plan.tokens)
            self._ttft_s.append(times[0] - began)
            self._per_token_s.append((times[-1] - times[0]) / max(self._plan.tokens - 1, 1))
            self._gaps_s.extend(b - a for a, b in itertools.pairwise(times))
            self._messages += len(times)

    def _row(self, wall_s: float, used_s: dict[str, float], own_s: float, pss_mib: float) -> dict[str, Any]:
        plan = self._plan
        total = plan.streams * plan.requests * plan.tokens
        each = {name: round(s / total * 1e6) for name, s in used_s.items()}
        # vLLM names its engine's processes VLLM::EngineCore and VLLM::Worker; what is left is the server in front.
        engine = sum(v for k, v in each.items() if k.startswith("VLLM::"))
        return {
            "streams": plan.streams, "tokens": total, "wall_s": round(wall_s, 3), "tok_s": round(total / wall_s, 1),
            "ttft_mean_ms": round(statistics.mean(self._ttft_s) * 1e3, 2),
            "ttft_p95_ms": round(percentile(self._ttft_s, 95) * 1e3, 2),
            "tpot_mean_ms": round(statistics.mean(self._per_token_s) * 1e3, 3),
            "gap_p95_ms": round(percentile(self._gaps_s, 95) * 1e3, 2) if self._gaps_s else None,
            "tokens_message": round(total / self._messages, 2),
            "front_us_token": sum(each.values()) - engine, "engine_us_token": engine,
            "client_us_token": round(own_s / total * 1e6), "cpu_us_token": each,
            "pss_mib": round(pss_mib), "load1": round(os.getloadavg()[0], 2),
        }  # fmt: skip
