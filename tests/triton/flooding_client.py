"""COUNT requests with the prompt TEXT at once to ADDRESS; prints, as JSON, each one's error (empty where there is none).

A process of its own: in the process that measures other streams it would be its own threads that delay them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc
from wire_client import build


async def flood(address: str, count: int, text: str) -> list[str]:
    async def one(stub: Any) -> str:
        error = ""
        async for message in stub.ModelStreamInfer(iter([build(text, stream=True)])):
            error = message.error_message or error
        return error

    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(10)]
    stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]
    await asyncio.gather(*[channel.channel_ready() for channel in channels])
    print("connected", flush=True)
    sys.stdin.readline()
    try:
        return list(await asyncio.gather(*[one(stubs[i % 10]) for i in range(count)]))
    finally:
        for channel in channels:
            await channel.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(flood(sys.argv[1], int(sys.argv[2]), sys.argv[3]))))
