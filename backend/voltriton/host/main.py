"""The engine host's life: hello, load, serve frames, stop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from voltriton import settings as model_settings
from voltriton.errors import StartError, Unavailable, VoltritonError
from voltriton.host.engine_api import Engine
from voltriton.host.service import Service
from voltriton.host.watch import Watch
from voltriton.settings import ModelSettings
from voltriton.wire import VERSION, Decoder, Generation, encode

STATS_INTERVAL_S = 1.0


def find_engine(name: str) -> type[Engine]:
    """`module:Class`, or `path/to/file.py:Class`."""
    where, _, class_name = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location("voltriton_engine", where)
            if spec is None or spec.loader is None:
                raise ImportError(where)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        engine: type[Engine] = getattr(module, class_name)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise StartError(f"voltriton.engine: {name!r} cannot be imported: {error}") from error
    return engine


class Connection:
    """The socket to the stub. Frames leave in the order of `send`; a slow reader is waited for by the kernel's
    buffer and asyncio's, never by the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder()

    @classmethod
    async def open(cls, sock: socket.socket) -> Connection:
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        return cls(reader, writer)

    def send(self, frame: list[Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(frame))

    async def frames(self) -> AsyncIterator[list[Any]]:
        """Frames until the stub is gone."""
        while True:
            try:
                data = await self._reader.read(1 << 18)
            except ConnectionError:
                return
            if not data:
                return
            for frame in self._decoder.feed(data):
                yield frame

    async def flush(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 5.0)
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), 5.0)


async def run(sock: socket.socket) -> int:
    """Returns the exit status: 0 stopped as told, 1 could not start, 3 the engine died."""
    connection = await Connection.open(sock)
    frames = connection.frames()
    hello = await anext(frames, None)
    if hello is None:
        return 1
    try:
        engine, model = await load(hello)
    except Exception as error:
        connection.send(["failed", one_line(error)])
        await connection.flush()
        return 1
    status = await serve(connection, frames, engine, model)
    with contextlib.suppress(Exception):
        await engine.stop(model.settings.stop_timeout_s)
    return status


async def load(hello: list[Any]) -> tuple[Engine, ModelSettings]:
    if hello[0] != "hello" or hello[1] != VERSION:
        raise StartError(
            f"the stub speaks {hello[:2]}, this host version {VERSION}: one of them is of another release"
        )
    model = model_settings.load(Path(hello[2]["version_folder"]))
    engine = await find_engine(model.settings.engine).start(model)
    return engine, model


def one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, VoltritonError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


async def serve(
    connection: Connection, frames: AsyncIterator[list[Any]], engine: Engine, model: ModelSettings
) -> int:
    service = Service(engine, model.settings, connection.send)
    connection.send(["ready", {"about": engine.info.about, "max_model_len": engine.info.max_model_len}])
    watch = Watch(engine, service, model.settings.stuck_timeout_s)
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGUSR1, lambda: service.start_drain(model.settings.drain_grace_s)
    )
    tasks = [
        asyncio.create_task(report(connection, engine)),
        asyncio.create_task(read(frames, service)),
        asyncio.create_task(watch.run()),
    ]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    if tasks[2] in done:
        cause = tasks[2].result()
        service.fail_all(Unavailable(f"the engine died while the request was running ({cause})"))
        await service.finish(0.0)
        connection.send(["dying", cause])
        await connection.flush()
        return 3
    for task in done:
        task.result()
    await connection.flush()
    return 0


async def report(connection: Connection, engine: Engine) -> None:
    """Samples that changed, once a second. An empty report is a sign of life."""
    known: dict[tuple[str, str], float] = {}
    while True:
        changed = []
        for name, labels, value in engine.samples():
            key = (name, str(labels))
            if known.get(key) != value and value == value:
                known[key] = value
                changed.append([name, labels, value])
        connection.send(["stats", changed])
        await asyncio.sleep(STATS_INTERVAL_S)


async def read(frames: AsyncIterator[list[Any]], service: Service) -> None:
    """Acts on the stub's frames until it says stop, or is gone."""
    async for frame in frames:
        kind = frame[0]
        if kind == "submit":
            service.submit(Generation(**frame[1]))
        elif kind == "cancel":
            service.cancel(frame[1])
        elif kind == "drain":
            service.drain()
        elif kind == "stop":
            await service.finish(frame[1])
            return
    # The stub is gone: nobody is left to answer.
    service.fail_all(Unavailable("the server is gone"))
