"""NVFP4 linear layers on this CPU: our kernel beside vLLM's bfloat16 and float32 paths.

usage: OMP_NUM_THREADS=2 python tests/bench/cpu_linear.py [--layers 30] [--isa avx2]

The shapes are those of SmolLM2-135M. All layers of the model are walked through, so that weights come from
memory and not from a cache, as in decoding. Times are medians, taken in turn; one line a row count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 8, 64, 512)
Path = Callable[[torch.Tensor, int], torch.Tensor]


def random_nvfp4(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = (torch.rand(n, k // 16) + 0.1).to(torch.float8_e4m3fn)
    return packed, scale, torch.tensor(0.01)


def vllm_path(matrices: list[tuple[torch.Tensor, ...]], dtype: torch.dtype) -> tuple[Path, int]:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from voltriton_vllm.codec import dequantise

    layers = []
    size = 0
    for packed, scale, factor in matrices:
        layer = torch.nn.Module()
        weight = dequantise(packed, scale, factor, dtype)
        size += weight.numel() * weight.element_size()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        layers.append(layer)
    return (lambda x, i: layers[i].cpu_linear(x, layers[i].weight, None)), size


def our_path(matrices: list[tuple[torch.Tensor, ...]]) -> tuple[Path, int]:
    from voltriton_vllm.cpu import build, linear

    reason = build.load()
    if reason is not None:
        raise SystemExit(reason)
    layers = [linear.pack(*matrix) for matrix in matrices]
    return (lambda x, i: linear.linear(x, layers[i])), sum(layer.bytes() for layer in layers)


def step_ms(path: Path, inputs: list[torch.Tensor]) -> float:
    begin = time.perf_counter()
    for i, x in enumerate(inputs):
        path(x, i)
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--isa", help="avx2, avx512, avx512bf16 or amx instead of the best one")
    args = parser.parse_args()
    if args.isa:
        os.environ["VOLTRITON_CPU_ISA"] = args.isa
    torch.manual_seed(0)
    matrices = [random_nvfp4(*shape) for _ in range(args.layers) for shape in SHAPES.values()]
    widths = [shape[1] for _ in range(args.layers) for shape in SHAPES.values()]
    ours, our_bytes = our_path(matrices)
    paths: dict[str, tuple[Path, torch.dtype]] = {}
    sizes = {"ours": our_bytes}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        path, sizes[name] = vllm_path(matrices, dtype)
        paths[f"vllm {name}"], paths[f"ours {name}"] = (path, dtype), (ours, dtype)
    print(
        f"threads {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}, isa {args.isa or 'best'}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print("weights, MB: " + ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.items()))
    print(f"ours / bf16 memory: {sizes['ours'] / sizes['bf16']:.3f}")
    with torch.inference_mode():
        for rows in ROWS:
            report(rows, paths, widths)


def report(rows: int, paths: dict[str, tuple[Path, torch.dtype]], widths: list[int]) -> None:
    inputs = {dtype: [torch.randn(rows, width).to(dtype) for width in widths] for _, dtype in paths.values()}
    times: dict[str, list[float]] = {name: [] for name in paths}
    for turn in range(8 if rows > 64 else 24):
        for name, (path, dtype) in paths.items():
            spent = step_ms(path, inputs[dtype])
            if turn > 1:
                times[name].append(spent)
    median = {name: statistics.median(values) for name, values in times.items()}
    best_vllm = min(median["vllm bf16"], median["vllm fp32"])
    best_ours = min(median["ours bf16"], median["ours fp32"])
    row = "  ".join(f"{name} {value:8.2f} ms" for name, value in median.items())
    print(f"M={rows:4d}  {row}  best vllm / best ours {best_vllm / best_ours:.2f}")


if __name__ == "__main__":
    main()
