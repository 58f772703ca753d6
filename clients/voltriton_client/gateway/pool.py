"""The tritonservers behind the gateway: which are healthy, what they have, and which is least busy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import NamedTuple

from voltriton_client.aio import AsyncClient
from voltriton_client.errors import AnswerCut, ConnectionFailed, ModelNotFound, ModelNotReady, VoltritonError
from voltriton_client.gateway.settings import Settings
from voltriton_client.gateway.telemetry import Telemetry
from voltriton_client.request import Request
from voltriton_client.types import Chunk

log = logging.getLogger("voltriton.gateway")
_ENGINE_INPUTS = frozenset({"text_input", "stream", "sampling_parameters", "exclude_input_in_output"})
_CONNECT_TIMEOUT_S = 2.0
# A server that is busy may be late with an answer to "are you well?".
_FAILURES_TO_BE_DOWN = 3


class Target(NamedTuple):
    """What a public model name stands for."""

    model: str
    lora: str | None


class Upstream:
    """One tritonserver."""

    def __init__(
        self, address: str, settings: Settings, telemetry: Telemetry, look_now: asyncio.Event
    ) -> None:
        self.address = address
        self.look_now = look_now
        self.healthy = False
        self.problem = "not asked yet"
        self.open_requests = 0
        self._failures = 0
        self._said = ""
        # Inputs of the models that are ready.
        self.models: dict[str, frozenset[str]] = {}
        self._engines: set[str] = set()
        self._shown = frozenset(settings.models)
        self._telemetry = telemetry
        self._client = AsyncClient(
            address,
            tls=settings.tls,
            api_key=settings.upstream_key,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            # Another server, or a 503 that says when to come again, is better than waiting here.
            retries=False,
        )

    async def close(self) -> None:
        await self._client.close()

    async def check(self) -> None:
        """Ask what is ready. Never raises: a failure is a state."""
        try:
            await self._look()
        except VoltritonError as error:
            self._failures += 1
            is_down = isinstance(error, ConnectionFailed) or self._failures >= _FAILURES_TO_BE_DOWN
            if is_down or not self.healthy:
                self.mark_down(str(error))
            return
        self._failures = 0
        self.healthy, self.problem = True, ""
        self._say(
            logging.INFO, f"healthy, with {', '.join(sorted(self.engines())) or 'no model that is ready'}"
        )
        self._telemetry.server_up.labels(self.address).set(1)

    async def _look(self) -> None:
        names = [model.name for model in await self._client.models() if model.ready]
        ready = [name for name in names if await self._client.model_ready(name)]
        for name in self.models.keys() - set(ready):
            del self.models[name]
        for name in ready:
            if name not in self.models:
                metadata = await self._client.metadata(name)
                self.models[name] = frozenset(tensor.name for tensor in metadata.inputs)
                self._sort(name, metadata.platform)

    def _sort(self, name: str, platform: str) -> None:
        """Whether a model is one to show: an engine, not a step of the way to it."""
        is_engine = self.models[name] >= _ENGINE_INPUTS and platform != "ensemble"
        if name in self._shown or (not self._shown and is_engine):
            self._engines.add(name)

    def engines(self) -> set[str]:
        return self._engines & self.models.keys()

    def mark_down(self, problem: str) -> None:
        self._say(logging.WARNING, f"down: {problem}")
        self.healthy, self.problem = False, problem
        self.models.clear()
        self._telemetry.server_up.labels(self.address).set(0)

    def _say(self, level: int, state: str) -> None:
        """Log a state when it is another than before."""
        if state != self._said:
            self._said = state
            log.log(level, "server %s is %s", self.address, state)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.open_requests += 1
        self._telemetry.server_open.labels(self.address).set(self.open_requests)
        try:
            async with aclosing(self._client.stream(request, stream=request.stream)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ConnectionFailed as error:
            self.mark_down(str(error))
            self.look_now.set()
            raise
        except (AnswerCut, ModelNotReady):
            # The server may be well all the same: a look tells.
            self.look_now.set()
            raise
        finally:
            self.open_requests -= 1
            self._telemetry.server_open.labels(self.address).set(self.open_requests)


class Pool:
    """All servers, looked after by one task."""

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._aliases = settings.alias_of()
        self._task: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        self.upstreams: list[Upstream] = []

    async def start(self) -> None:
        """Must run in the event loop that the gateway serves from."""
        self.upstreams = [
            Upstream(server, self._settings, self._telemetry, self._look_now)
            for server in self._settings.servers
        ]
        await self._check_all()
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(upstream.close() for upstream in self.upstreams))

    async def _check_all(self) -> None:
        await asyncio.gather(*(upstream.check() for upstream in self.upstreams))

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), self._settings.health_interval_s)
            self._look_now.clear()
            await self._check_all()

    def names(self) -> list[str]:
        """Public names of what can be asked now."""
        ready = set().union(*(upstream.engines() for upstream in self.upstreams if upstream.healthy))
        return sorted(
            ready | {alias.name for alias in self._settings.aliases if alias.model in self._all_ready()}
        )

    def _all_ready(self) -> set[str]:
        return set().union(*(upstream.models.keys() for upstream in self.upstreams if upstream.healthy))

    def resolve(self, name: str) -> Target:
        """ModelNotFound or ModelNotReady where nothing can answer to the name."""
        alias = self._aliases.get(name)
        target = Target(alias.model, alias.lora) if alias else Target(name, None)
        if name in self.names():
            return target
        if not any(upstream.healthy for upstream in self.upstreams):
            problems = "; ".join(f"{upstream.address}: {upstream.problem}" for upstream in self.upstreams)
            raise ModelNotReady(f"no server is healthy ({problems})")
        if alias:
            raise ModelNotReady(f"model {name!r} (served by {alias.model!r}) is not ready at any server")
        raise ModelNotFound(f"no model {name!r}; there are: {', '.join(self.names()) or 'none ready'}")

    def takes(self, model: str) -> frozenset[str]:
        """The inputs of a model that is ready somewhere."""
        return next((up.models[model] for up in self._having(model)), frozenset())

    def _having(self, model: str, but: Iterable[Upstream] = ()) -> list[Upstream]:
        return [up for up in self.upstreams if up.healthy and model in up.models and up not in but]

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """The answer of the least busy server; another one is asked when that refuses before it has begun."""
        tried: list[Upstream] = []
        while True:
            upstream = self._pick(request.model, tried)
            tried.append(upstream)
            begun = False
            try:
                async with aclosing(upstream.stream(request)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except VoltritonError as error:
                if begun or error.code != "UNAVAILABLE" or not self._having(request.model, tried):
                    raise
                log.warning("server %s: %s; asking another", upstream.address, error)
                self._telemetry.failovers.labels(upstream.address).inc()
                request = replace(request)

    def _pick(self, model: str, tried: list[Upstream]) -> Upstream:
        candidates = self._having(model, tried)
        if not candidates:
            raise ModelNotReady(f"model {model!r} is not ready at any server")
        chosen = min(candidates, key=lambda upstream: upstream.open_requests)
        # Servers that are equally busy take turns.
        self.upstreams.remove(chosen)
        self.upstreams.append(chosen)
        return chosen
