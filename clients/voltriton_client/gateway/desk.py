"""What the routes share: whole and streamed answers of one request or several, counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from voltriton_client.gateway.answers import Part
from voltriton_client.gateway.pool import Pool
from voltriton_client.gateway.settings import Settings
from voltriton_client.gateway.telemetry import Telemetry
from voltriton_client.request import Request
from voltriton_client.types import Chunk, Collector, Result

# Of one request with many prompts; the others wait, so that it does not fill the servers by itself.
_PROMPTS_AT_ONCE = 16


class Gateway:
    """What the routes share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.telemetry = Telemetry()
        self.pool = Pool(settings, self.telemetry)
        self.started = int(time.time())

    def left(self, path: str) -> None:
        self.telemetry.disconnects.labels(path).inc()

    async def chunks(self, asked: Request) -> AsyncGenerator[Chunk, None]:
        """The answer's chunks, counted."""
        begun, usage = False, None
        try:
            async with aclosing(self.pool.stream(asked)) as chunks:
                async for chunk in chunks:
                    usage = chunk.usage
                    if chunk.has_content and not begun:
                        begun = True
                        self.telemetry.first_token.labels(asked.model).observe(chunk.at_s)
                    yield chunk
        finally:
            if usage:
                self.telemetry.tokens.labels(asked.model, "prompt").inc(usage.prompt_tokens)
                self.telemetry.tokens.labels(asked.model, "completion").inc(usage.completion_tokens)

    async def whole(self, asked: Request) -> Result:
        collector = Collector(asked.request_id)
        async with aclosing(self.chunks(asked)) as chunks:
            async for chunk in chunks:
                collector.add(chunk)
        return collector.result()

    async def all_whole(self, requests: Sequence[Request]) -> list[Result]:
        """All answers, in order; the first failure ends the others."""
        async with _unwrapped(), asyncio.TaskGroup() as group:
            turn = asyncio.Semaphore(_PROMPTS_AT_ONCE)
            tasks = [group.create_task(self._in_turn(turn, asked)) for asked in requests]
        return [task.result() for task in tasks]

    async def _in_turn(self, turn: asyncio.Semaphore, asked: Request) -> Result:
        async with turn:
            return await self.whole(asked)

    async def merged(self, requests: Sequence[Request]) -> AsyncGenerator[Part, None]:
        """The chunks of several answers as they come; one place in the queue keeps slow callers in step."""
        if len(requests) == 1:
            async with aclosing(self.chunks(requests[0])) as chunks:
                async for chunk in chunks:
                    yield Part(0, chunk)
            return
        queue: asyncio.Queue[Part] = asyncio.Queue(1)
        turn = asyncio.Semaphore(_PROMPTS_AT_ONCE)

        async def feed(number: int, asked: Request) -> None:
            async with turn, aclosing(self.chunks(asked)) as chunks:
                async for chunk in chunks:
                    await queue.put(Part(number, chunk))

        async def feed_all() -> None:
            async with _unwrapped(), asyncio.TaskGroup() as group:
                for number, asked in enumerate(requests):
                    group.create_task(feed(number, asked))

        feeding = asyncio.create_task(feed_all())
        try:
            async for part in _until_done(queue, feeding):
                yield part
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)


async def _until_done(queue: asyncio.Queue[Part], feeding: asyncio.Task[None]) -> AsyncIterator[Part]:
    while not feeding.done() or not queue.empty():
        getting = asyncio.create_task(queue.get())
        try:
            await asyncio.wait({getting, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done() and not queue.empty():
                await getting
            if getting.done():
                yield getting.result()
        finally:
            getting.cancel()
    feeding.result()


@asynccontextmanager
async def _unwrapped() -> AsyncIterator[None]:
    """A task group's first failure instead of the group of them."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
