"""One level of load by our own client: closed loop (concurrency) or open loop (Poisson arrivals)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from voltriton_client import AsyncClient, VoltritonError

from voltriton_perf.pa import Level
from voltriton_perf.stats import Record

# One HTTP/2 connection is read by one thread of gRPC; several keep it from being the limit.
CHANNELS = 4


@dataclass(frozen=True)
class Prompt:
    """A prompt, the kind of traffic it belongs to, and sampling parameters over the level's."""

    text: str
    kind: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)


async def run(
    level: Level,
    model: str,
    address: str,
    prompts: Sequence[Prompt],
    sampling: dict[str, Any],
    *,
    seed: int = 0,
    timeout_s: float | None = None,
    done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Records of the level, failed requests among them. What is open when the task is cancelled is cancelled."""
    clients = [AsyncClient(address) for _ in range(CHANNELS)]
    records: list[Record] = []

    async def one(number: int) -> None:
        prompt = prompts[number % len(prompts)]
        record = await request(clients[number % CHANNELS], model, prompt, sampling, timeout_s)
        records.append(record)
        done(record)

    try:
        if level.mode == "rate":
            await _open_loop(level, one, random.Random(seed))
        else:
            await _closed_loop(level, one)
    except asyncio.CancelledError:
        # Ctrl-C keeps what has ended.
        if not records:
            raise
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    return sorted(records, key=lambda record: record.sent_s)


async def _closed_loop(level: Level, one: Callable[[int], Any]) -> None:
    numbers = iter(range(level.requests))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(int(level.value), level.requests)):
            group.create_task(worker())


async def _open_loop(level: Level, one: Callable[[int], Any], rng: random.Random) -> None:
    due_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(level.requests):
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(one(number))
            due_s += rng.expovariate(level.value)


async def request(
    client: AsyncClient, model: str, prompt: Prompt, sampling: dict[str, Any], timeout_s: float | None
) -> Record:
    arrivals: list[float] = []
    tokens: list[int] = []
    error, prompt_tokens = None, None
    sent_s = time.perf_counter()
    try:
        stream = client.stream(
            prompt.text, model=model, timeout_s=timeout_s, sampling={**sampling, **prompt.sampling}
        )
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if chunk.num_tokens or chunk.has_content:
                    arrivals.append(time.perf_counter())
                    tokens.append(chunk.num_tokens)
                prompt_tokens = chunk.usage.prompt_tokens or prompt_tokens
    except VoltritonError as failure:
        error = f"{failure.code}: {failure}"
    return Record(sent_s, tuple(arrivals), tuple(tokens), error, prompt_tokens, prompt.kind)
