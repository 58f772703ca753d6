"""How many decoupled responses a second Triton's Python backend carries to gRPC clients; see perf/ceiling.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voltriton_perf import proc
from voltriton_perf.targets import ROOT, Process, TargetError, free_port
from voltriton_perf.wires import Grpc

# What varies: delivery threads of tritonserver (its default is 32), sending threads of the model, elements a response.
CASES = ((32, 0, 1), (4, 0, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 2, 16))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ceiling.py", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--total", type=int, default=12000, help="responses of all streams together (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--root", type=Path, default=ROOT / ".voltriton", help="where tritonserver was laid out"
    )
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    try:
        for pool in dict.fromkeys(case[0] for case in CASES):
            with tempfile.TemporaryDirectory() as folder:
                rows += _pool(args, pool, Path(folder))
    except (TargetError, KeyboardInterrupt) as error:
        print(f"ceiling.py: {error or 'interrupted; what was measured is kept'}", file=sys.stderr)
    print(table(rows))
    if args.out and rows:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows else 1


def _pool(args: argparse.Namespace, pool: int, folder: Path) -> list[dict[str, Any]]:
    """All cases of one size of tritonserver's pool, which is set at its start."""
    http, grpc, metrics = free_port(), free_port(), free_port()
    command = [
        str(args.root / "bin" / "tritonserver"), f"--model-repository={ROOT / 'tests' / 'bench' / 'ceiling_repo'}",
        f"--backend-directory={args.root / 'backends'}", f"--backend-config=python,thread-pool-size={pool}",
        "--http-address=127.0.0.1", f"--http-port={http}", "--grpc-address=127.0.0.1", f"--grpc-port={grpc}",
        "--metrics-address=127.0.0.1", f"--metrics-port={metrics}",
    ]  # fmt: skip
    server = Process("tritonserver", command, f"http://127.0.0.1:{http}/v2/health/ready", folder)
    rows = []
    try:
        server.start()
        for turn in range(args.rounds):
            for _, threads, k in (case for case in CASES if case[0] == pool):
                for streams in args.streams:
                    plan = {"n": args.total // streams, "k": k, "threads": threads}
                    row = asyncio.run(_measure(f"127.0.0.1:{grpc}", server.pid, plan, streams))
                    rows.append({"pool": pool, "threads": threads, "k": k, "round": turn, **row})
    finally:
        server.stop()
    return rows


async def _measure(address: str, pid: int, plan: dict[str, int], streams: int) -> dict[str, Any]:
    clients = [await Grpc.open(address, "burst") for _ in range(streams)]
    await asyncio.gather(*(client.run(json.dumps({**plan, "n": 5}), 1) for client in clients))
    before, began = proc.cpu_s(proc.tree(pid)), time.perf_counter()
    times = await asyncio.gather(*(client.run(json.dumps(plan), 1) for client in clients))
    wall_s = time.perf_counter() - began
    used = proc.cpu_s(proc.tree(pid))
    used.subtract(before)
    await asyncio.gather(*(client.close() for client in clients))
    total = sum(len(each) for each in times)
    return {
        "streams": streams, "responses_s": round(total / wall_s), "load1": round(os.getloadavg()[0], 1),
        "cpu_us": {name: round(s / total * 1e6) for name, s in used.items() if s},
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: median [best] responses/s, and CPU microseconds of all server processes a response."""
    lines = ["| delivery threads | sending threads | elements | streams | responses/s | CPU us | load |"]
    lines.append("|" + " --- |" * 7)
    for key in dict.fromkeys((r["pool"], r["threads"], r["k"], r["streams"]) for r in rows):
        mine = [r for r in rows if (r["pool"], r["threads"], r["k"], r["streams"]) == key]
        speeds = [r["responses_s"] for r in mine]
        cpu = statistics.median(sum(r["cpu_us"].values()) for r in mine)
        load = statistics.median(r["load1"] for r in mine)
        threads = key[1] or "execute"
        lines.append(
            f"| {key[0]} | {threads} | {key[2]} | {key[3]} | {statistics.median(speeds):.0f} [{max(speeds)}] "
            f"| {cpu:.0f} | {load:.1f} |"
        )
    return "\n".join(lines)
