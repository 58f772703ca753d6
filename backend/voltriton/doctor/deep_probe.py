"""Run by `voltriton doctor --deep` in a process of its own (it may hang: that is what it looks for).

Copies data between every pair of cards in both directions and compares it, then all-reduces over all cards with
NCCL, plainly and from a CUDA graph, and compares. One JSON line a test, at once, so that the last line
before a hang says where it hung. Needs PyTorch with CUDA and the cards free of other work; about 300 MiB a card.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from typing import Any

ELEMENTS = 1 << 24
# A decode step's all-reduce is [1, hidden]; a prefill step's is [2048, hidden].
SHAPES = ((1, 4096), (2048, 4096))


def say(test: str, ok: bool, detail: str = "") -> None:
    print(json.dumps({"test": test, "ok": ok, "detail": detail}), flush=True)


def main() -> None:
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count()
    for source in range(count):
        for target in range(count):
            if source != target:
                copy(torch, source, target)
    if count > 1:
        spawn(torch, count)


def copy(torch: Any, source: int, target: int) -> None:
    """The target reads what the source wrote; a checksum on each side, and the first difference named."""
    test = f"copy {source}->{target}"
    print(json.dumps({"begin": test}), flush=True)
    data = torch.randint(-(2**31), 2**31 - 1, (ELEMENTS,), dtype=torch.int32, device=f"cuda:{source}")
    received = data.to(f"cuda:{target}")
    torch.cuda.synchronize(target)
    wrong = int((received.cpu() != data.cpu()).sum())
    say(test, wrong == 0, f"{wrong} of {ELEMENTS} numbers differ" if wrong else "")


def spawn(torch: Any, count: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(json.dumps({"begin": "all-reduce"}), flush=True)
    torch.multiprocessing.spawn(rank, args=(count, port), nprocs=count)


def rank(index: int, count: int, port: int) -> None:
    torch = importlib.import_module("torch")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(index)
    group = torch.distributed
    group.init_process_group("nccl", rank=index, world_size=count, device_id=torch.device("cuda", index))
    for shape in SHAPES:
        plain, graph = all_reduce(torch, shape, index), graph_all_reduce(torch, shape, index)
        expected = float(sum(range(1, count + 1)))
        for name, found in (("plain", plain), ("graph", graph)):
            if index == 0:
                good = bool((found == expected).all())
                say(
                    f"all-reduce {name} {shape[0]}x{shape[1]}",
                    good,
                    "" if good else f"got {float(found.flatten()[0])}",
                )
    group.destroy_process_group()


def all_reduce(torch: Any, shape: tuple[int, int], index: int) -> Any:
    tensor = torch.full(shape, index + 1.0, dtype=torch.float16, device="cuda")
    torch.distributed.all_reduce(tensor)
    torch.cuda.synchronize()
    return tensor


def graph_all_reduce(torch: Any, shape: tuple[int, int], index: int) -> Any:
    """Captured once, replayed 20 times: the input is set anew before each, so a stale buffer shows."""
    tensor = torch.full(shape, index + 1.0, dtype=torch.float16, device="cuda")
    result = torch.empty_like(tensor)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.distributed.all_reduce(tensor.clone())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(tensor)
        torch.distributed.all_reduce(result)
    for _ in range(20):
        tensor.fill_(index + 1.0)
        graph.replay()
    torch.cuda.synchronize()
    return result


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        say("deep", False, f"{type(error).__name__}: {str(error).strip()[:400]}")
        sys.exit(1)
