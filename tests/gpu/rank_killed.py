"""Kill one of several ranks while an answer streams: when does the stream end, and is anything left?

usage: rank_killed.py MODEL OUT.json RANKS     writes {"error", "stream_ended_s", "processes_ended_s", "left"}
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 60


async def stream(model: str, ranks: int) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model,
        dtype="float16",
        tensor_parallel_size=ranks,
        max_model_len=2048,
        enforce_eager=True,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 28,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    children = [p for p in psutil.Process().children(recursive=True) if "VLLM" in title(p)]
    victim = max((p for p in children if "Worker" in title(p)), key=lambda p: p.pid)
    wanted = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
    killed, error, tokens = 0.0, "", 0
    try:
        async for answer in engine.generate("hello world", wanted, request_id="one"):
            tokens = len(answer.outputs[0].token_ids)
            if tokens >= 10 and not killed:
                os.kill(victim.pid, signal.SIGKILL)
                killed = time.monotonic()
    except Exception as raised:  # what a caller sees is what is asked here
        error = f"{type(raised).__name__}: {raised}"[:200]
    ended = time.monotonic() - killed
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    gone = time.monotonic() - killed
    engine.shutdown()
    return {
        "error": error,
        "tokens_before": tokens,
        "stream_ended_s": round(ended, 2),
        "processes_ended_s": round(gone, 2),
        "left": [title(process) for process in alive],
    }


def title(process: psutil.Process) -> str:
    """vLLM titles its processes VLLM::EngineCore, VLLM::Worker_TP0, ..."""
    return " ".join(process.cmdline())


def main() -> None:
    model, out, ranks = sys.argv[1:]
    Path(out).write_text(json.dumps(asyncio.run(stream(model, int(ranks)))))


if __name__ == "__main__":
    main()
