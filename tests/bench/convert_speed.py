"""GB/s and peak memory of `voltriton convert` on a synthetic bfloat16 checkpoint, beside llm-compressor's data-free
NVFP4A16 on the same files, one after the other.

    python tests/bench/convert_speed.py --gb 4 --llm-compressor DIR      # DIR: see docs/quality.md

Each tool runs in a process of its own; the start of Python and the imports are told apart. CPU seconds are given too:
they hold on a busy machine, where wall times do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
HIDDEN, INTERMEDIATE = 4096, 14336
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
LAYER_BYTES = 2 * sum(a * b for a, b in LINEARS.values())


def make_source(folder: Path, gb: float) -> float:
    """Layers of Llama-3-8B's shapes, one file a layer; returns the GB written.

    In a process of its own: a child's largest resident set counts that of the process that started it (execve(2) keeps
    ru_maxrss), so this one has to stay small.
    """
    layers = max(round(gb * 1e9 / LAYER_BYTES), 1)
    maker = multiprocessing.get_context("spawn").Process(target=write_source, args=(folder, layers))
    maker.start()
    maker.join()
    if maker.exitcode:
        sys.exit("the source could not be made")
    return layers * LAYER_BYTES / 1e9


def write_source(folder: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    weight_map = {}
    for i in range(layers):
        generator = torch.Generator().manual_seed(i)
        tensors = {
            f"model.layers.{i}.{name}.weight": torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
            for name, shape in LINEARS.items()
        }
        file = f"model-{i + 1:05}-of-{layers:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": layers * LAYER_BYTES}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": HIDDEN, "dtype": "bfloat16"}))


class Cost(NamedTuple):
    """Of one process: wall and CPU seconds, largest resident set. CPU seconds hold on a busy machine too."""

    wall_s: float
    cpu_s: float
    peak_gb: float


def run(command: list[str], environment: dict[str, str]) -> Cost:
    """Run a child process to its end; its output is shown when it fails."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - began
        if status:
            output.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{output.read()[-3000:]}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6)


def net(command: list[str], module: str, environment: dict[str, str]) -> tuple[Cost, Cost]:
    """The whole cost, and that without starting Python and importing the tool."""
    whole = run(command, environment)
    start = run([sys.executable, "-c", f"import {module}"], environment)
    return whole, Cost(whole.wall_s - start.wall_s, whole.cpu_s - start.cpu_s, whole.peak_gb)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gb", type=float, default=4.0)
    p.add_argument("--llm-compressor", type=Path, metavar="DIR", help="pip --target folder that holds it")
    p.add_argument("--work", type=Path, help="where the files go; default a temporary folder")
    args = p.parse_args()
    work = Path(tempfile.mkdtemp(prefix="convert_speed.", dir=args.work))
    try:
        measure(work, args.gb, args.llm_compressor)
    finally:
        shutil.rmtree(work)


def measure(work: Path, gb: float, peer: Path | None) -> None:
    size = make_source(work / "in", gb)
    ours = [sys.executable, "-m", "voltriton.cli", "convert", str(work / "in"), str(work / "ours")]
    rows = {"voltriton convert": net(ours, "voltriton.checkpoint.convert", {})}
    if peer is not None:
        theirs = [
            sys.executable,
            str(HERE / "peers.py"),
            "llm-compressor",
            str(work / "in"),
            str(work / "theirs"),
        ]
        rows["llm-compressor"] = net(theirs, "llmcompressor", {"PYTHONPATH": str(peer)})
    print(
        f"{size:.2f} GB of bfloat16 weights, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )
    for name, (whole, bare) in rows.items():
        wall = f"{whole.wall_s:.1f} s wall ({bare.wall_s:.1f} without imports, {size / bare.wall_s:.3f} GB/s)"
        print(f"{name}: {wall}, CPU {whole.cpu_s:.1f} s ({bare.cpu_s:.1f}), peak {whole.peak_gb:.2f} GB")
    if peer is not None:
        (_, a), (_, b) = rows.values()
        print(
            f"wall {b.wall_s / a.wall_s:.1f} times, CPU {b.cpu_s / a.cpu_s:.1f} times, memory {b.peak_gb / a.peak_gb:.1f} times ours"
        )


if __name__ == "__main__":
    main()
