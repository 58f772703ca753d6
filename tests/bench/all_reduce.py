"""Microseconds of an all-reduce over all GPUs of a host: NCCL beside vLLM's custom all-reduce, in CUDA graphs.

    python tests/bench/all_reduce.py --out perf/results/all-reduce-h200x2

Sizes are those of a decoding step with hidden size 2560. A graph holds 100 in a row; the slowest rank counts. Every
result is compared with the sum. The custom all-reduce needs vLLM's compiled extension; without it NCCL alone is timed.
NVLink multicast is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHAPES = ((1, 2560), (8, 2560), (32, 2560), (512, 2560))
IN_A_GRAPH = 100
Reduce = Callable[[torch.Tensor], torch.Tensor]


def per_call_us(reduce: Reduce, x: torch.Tensor, capture: Any) -> float:
    """Of one call in a graph of many; the median of nine replays on this rank."""
    for _ in range(3):
        reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with capture, torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            y = reduce(x)
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / IN_A_GRAPH)
    if not bool(torch.isfinite(y).all()):
        raise SystemExit("a result is not finite")
    return sorted(times)[4]


def slowest(value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def check(reduce: Reduce, shape: tuple[int, int], rank: int, world: int) -> None:
    x = (
        torch.full(shape, float(rank + 1), dtype=torch.float16, device="cuda")
        + torch.arange(shape[1], device="cuda") % 7
    )
    want = world * (world + 1) / 2 + world * (torch.arange(shape[1], device="cuda") % 7)
    if not torch.equal(reduce(x.half()).float(), want.expand(shape).float()):
        raise SystemExit(f"rank {rank}: all-reduce of {shape} is wrong")


def work(rank: int, world: int, port: int, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    nccl = PyNcclCommunicator(dist.group.WORLD, torch.device("cuda", rank))
    if nccl.disabled:
        raise SystemExit(
            "vLLM's NCCL communicator is off: NCCL 2.29.7 or newer is needed (VLLM_NCCL_SO_PATH)"
        )
    custom = CustomAllreduce(dist.group.WORLD, torch.device("cuda", rank))
    with torch.no_grad():
        rows = [row(shape, nccl, custom, rank, world) for shape in SHAPES]
    if rank == 0:
        write(out, rows, world, nccl.nccl.ncclGetVersion())
    dist.barrier()


def row(shape: tuple[int, int], nccl: Any, custom: Any, rank: int, world: int) -> dict[str, Any]:
    x = torch.zeros(shape, dtype=torch.float16, device="cuda")
    check(nccl.all_reduce, shape, rank, world)
    found: dict[str, Any] = {
        "shape": shape,
        "nccl_us": slowest(per_call_us(nccl.all_reduce, x, nullcontext())),
    }
    if not custom.disabled and custom.should_custom_ar(x):
        check(custom.custom_all_reduce, shape, rank, world)
        found["custom_us"] = slowest(per_call_us(custom.custom_all_reduce, x, custom.capture()))
    return found


def write(out: Path, rows: list[dict[str, Any]], world: int, nccl: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "command": shlex.join(["python", *sys.argv]),
        "card": f"{world} x {torch.cuda.get_device_name()}",
        "nccl": nccl,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    lines = [f"{key}: {value}" for key, value in head.items()]
    for found in rows:
        custom = f"{found['custom_us']:7.2f} us" if "custom_us" in found else "not run"
        lines.append(f"{found['shape']!s:12s} float16: NCCL {found['nccl_us']:7.2f} us, custom {custom}")
    text = "\n".join(lines) + "\n"
    out.with_suffix(".txt").write_text(text)
    out.with_suffix(".json").write_text(json.dumps({**head, "rows": rows}, indent=1))
    sys.stdout.write(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="result files without their ending")
    args = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        print(f"all_reduce.py: needs two GPUs, found {world}", file=sys.stderr)
        return 1
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(work, args=(world, port, args.out), nprocs=world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
