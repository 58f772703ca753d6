"""The ceiling: vLLM's AsyncLLM in this process, with no server around it.

    engine_target.py --port 9100 --engine-args '{"model": ...}'

Waits on 127.0.0.1:PORT; each line of JSON that comes there (a `closed_loop.Plan`) is run in this process and
answered with a line of JSON, so the load generator's own CPU is in this target's figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from typing import Any

import uvloop
from voltriton_perf.closed_loop import Load, Plan


class InProcess:
    """A "connection" that calls the engine."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def run(self, prompt: str, tokens: int) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        return [
            time.perf_counter()
            async for _ in self._llm.generate({"prompt": prompt}, params, uuid.uuid4().hex)
        ]

    async def close(self) -> None:
        pass


async def main(port: int, engine_args: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))

    async def connect() -> InProcess:
        return InProcess(llm)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            row = await Load(Plan(**json.loads(line))).run(connect, os.getpid())
            writer.write(json.dumps(row).encode() + b"\n")
            await writer.drain()
        # The server's end waits for its connections.
        writer.close()

    await InProcess(llm).run("warm up", 2)
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    # The default action would leave the engine's files in /dev/shm.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.close)
    async with server:
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve_forever()
    llm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine-args", type=json.loads, required=True)
    args = parser.parse_args()
    uvloop.run(main(args.port, args.engine_args))
