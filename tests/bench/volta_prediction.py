"""What a V100 is predicted to reach: the sm_70 machine code of each kernel's main loop, counted by pipe.

    NVDISASM=/path/of/cuda12/nvdisasm python tests/bench/volta_prediction.py

needs NVRTC of CUDA 12 and nvdisasm of CUDA 12 or 13.0 (later ones do not read sm_70), no GPU. Prints Markdown.

Model: a V100 multiprocessor has four schedulers, one instruction a clock each; a warp's instruction takes the
float, integer, half and tensor pipes of its scheduler for two clocks; a 16-byte access of a warp takes the
load/store unit, which the four share, for four clocks. Values (weights; keys and values of attention) a clock from the
busiest of these, against what 900 GB/s bring (80 multiprocessors, 1.38 to 1.53 GHz). No latency, no launch: an upper
limit, not a measurement.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

from voltriton_vllm.sm70 import compile as compiling
from voltriton_vllm.sm70 import runtime, variants

BYTES_A_WEIGHT = 9 / 16
CLOCKS_GHZ = (1.38, 1.53)
PREFILL_KEYS = 32  # PK of csrc/sm70_prefill.cu
PIPES = {
    "float": ("FFMA", "FMUL", "FADD", "IMAD"),
    "half": ("HFMA2", "HMUL2", "HADD2"),
    "tensor": ("HMMA",),
    "memory": ("LDG", "LDS", "STS", "STG", "SHFL"),
}
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?P\w+ )?([A-Z][A-Z0-9_.]+)")


def pipe(operation: str) -> str:
    found = (name for name, kinds in PIPES.items() if operation.startswith(kinds))
    return next(found, "integer")


def main_loop(body: list[str], marker: str) -> list[str]:
    """The operations of the innermost backward branch that holds most of `marker`."""
    labels = {m[1]: i for i, line in enumerate(body) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    best: tuple[int, int, list[str]] = (0, 0, [])
    for i, line in enumerate(body):
        branch = re.search(r"BRA.*?`\((\.L_x_\d+)\)", line)
        if branch and labels.get(branch[1], i) < i:
            part = body[labels[branch[1]] : i + 1]
            rank = (sum(marker in text for text in part), -len(part))
            if rank > best[:2]:
                best = (*rank, part)
    return [m[1] for line in best[2] if (m := INSTRUCTION.search(line))]


def values_a_loop(variant: object) -> tuple[int, float, str]:
    """(values that a warp takes in one turn of the loop, bytes of one, what the loop is known by)."""
    if isinstance(variant, variants.Gemv | variants.MoeUp | variants.MoeDown):
        return 1024 * variant.r * variant.d, BYTES_A_WEIGHT, "HFMA2"
    if isinstance(variant, variants.Gemm | variants.MoeGemm):
        return 2048 * variant.nt * variant.d, BYTES_A_WEIGHT, "HMMA"
    if isinstance(variant, variants.HalfGemv):
        return 256 * variant.r * variant.d, 2, "FFMA"
    if isinstance(variant, variants.Decode):
        return 2 * 16 * variant.tiles * variant.size, 1 if variant.fp8 else 2, "HMMA"
    return 0, 0, ""


def clocks(operations: list[str]) -> int:
    """Of a scheduler, for one turn of the loop of one warp."""
    used = Counter(pipe(o) for o in operations)
    wide = sum(".128" in o for o in operations)
    pipes = (used["float"] + used["half"], used["integer"], used["tensor"])
    return max(len(operations), *(2 * n for n in pipes), 4 * 4 * wide)


def prefill_row(variant: variants.Prefill, operations: list[str]) -> str:
    """Beside what all multiprocessors reach that do nothing but multiply and add floats."""
    flops = 4 * PREFILL_KEYS * 16 * variant.size  # scores and output of a warp's 16 tokens
    used = Counter(pipe(o) for o in operations)
    limits = [flops / clocks(operations) * 4 * 80 * ghz / 1000 for ghz in CLOCKS_GHZ]
    ratio = flops / clocks(operations) / 32  # a scheduler multiplies and adds 16 floats a clock
    return f"| `{variant.name}` | {len(operations)} | {used['tensor']} | {limits[0]:.0f} to {limits[1]:.0f} | {ratio:.1f} |"


def row(
    name: str, operations: list[str], values: int, size: float, registers: int, threads: int, shared: int
) -> str:
    used = Counter(pipe(o) for o in operations)
    per_clock = 4 * values / clocks(operations)
    blocks = min(65536 // (-(-registers // 8) * 8 * threads), 98304 // max(shared, 1), 2048 // threads)
    limits = [per_clock * ghz * 80 * size / 900 for ghz in CLOCKS_GHZ]
    lanes = values / 32
    parts = " | ".join(f"{used[p] / lanes:.2f}" for p in ("float", "half", "integer", "tensor", "memory"))
    return (
        f"| `{name}` | {len(operations) / lanes:.2f} | {parts} | {registers} | {shared / 1024:.0f} | "
        f"{blocks * threads // 32} | {per_clock:.1f} | {limits[0]:.2f} to {limits[1]:.2f} |"
    )


def disassemble(image: bytes) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Lines of each kernel, and its registers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "k.cubin")
        path.write_bytes(image)
        tool = os.environ.get("NVDISASM", "nvdisasm")
        text = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    bodies, registers = {}, {}
    for part in re.split(r"\.section\s+\.text\.", text)[1:]:
        name = re.match(r"\w+", part)[0]  # type: ignore[index]
        bodies[name] = part.splitlines()
        found = re.search(r"REGISTERS=(\d+)|SHI_REGISTERS=(\d+)", part)
        registers[name] = int(next(g for g in found.groups() if g)) if found else 0
    return bodies, registers


def shape(variant: object) -> tuple[int, int]:
    """(threads a block, bytes of shared memory) at K = 4096."""
    if isinstance(variant, variants.Gemv | variants.MoeUp):
        return variant.nw * 32, variant.staging(4096)[1]
    if isinstance(variant, variants.HalfGemv):
        return variant.nw * 32, variant.shared_bytes(4096)
    if isinstance(variant, variants.MoeDown):
        return 256, variant.launch(768, 8)[1]
    if isinstance(variant, variants.Gemm | variants.MoeGemm):
        return variant.threads, variant.staging(4096, 70)[1]
    if isinstance(variant, variants.Decode):
        return variant.warps * 32, variant.shared_bytes
    raise TypeError(type(variant))


def main() -> int:
    bodies: dict[str, list[str]] = {}
    registers: dict[str, int] = {}
    for source in runtime.sources(70):
        for found, part in zip(
            (bodies, registers), disassemble(compiling.build(source, "sm_70")), strict=True
        ):
            found.update(part)
    columns = ("kernel", "instructions a value", *("float", "half", "integer", "tensor", "memory"))
    columns += ("registers", "shared KiB", "warps a multiprocessor", "values a clock", "limit / 900 GB/s")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for variant in variants.all_variants(70):
        values, size, marker = values_a_loop(variant)
        if values:
            operations = main_loop(bodies[variant.name], marker)
            ends = (values, size, registers[variant.name], *shape(variant))
            print(row(variant.name, operations, *ends))
    print(
        "\n| prefill | instructions a turn | HMMA | TFLOP/s at most | of float multiply-adds alone |\n"
        + "|---" * 5
        + "|"
    )
    for prefill in variants.PREFILL.values():
        print(prefill_row(prefill, main_loop(bodies[prefill.name], "HMMA")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
