"""Where a decoding step's time goes: the GPU's kernels by name, of a model with random weights in the real shape.

    python tests/bench/step_profile.py --out perf/results/step-profile-h200 --model qwen4_exp --way volta --layers 8
        [--batch 1 8] [--plain-vllm FOLDER]     a vLLM without compiled extensions, as a V100 has it

Decoding runs as the profile of a V100 box has it, in CUDA graphs; the profiler records the kernels in them. A model of
fewer layers starts faster, its layers are the real ones: what is once a step (embedding, logits, sampling) is told apart
by how often it ran. Writes OUT.txt.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import end_to_end

TOKENS = 32
NAME_WIDTH = 90


def kernels(llm: Any, batch: int) -> tuple[float, dict[str, tuple[int, float]]]:
    """(milliseconds a step, {kernel: (launches, microseconds)} of all steps but the prefill's)."""
    from torch.profiler import ProfilerActivity, profile

    def generate(tokens: int) -> None:
        end_to_end.generate(llm, batch, tokens, end_to_end.PROMPT_TOKENS)

    def recorded(tokens: int) -> tuple[float, dict[str, tuple[int, float]]]:
        begin = time.perf_counter()
        generate(tokens)
        seconds = time.perf_counter() - begin
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            generate(tokens)
        found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for event in seen.events():
            if "CUDA" in str(event.device_type):
                count, spent = found[event.name]
                found[event.name] = (count + 1, spent + event.device_time)
        return seconds, found

    generate(TOKENS)
    short_s, short = recorded(1)
    long_s, long = recorded(TOKENS + 1)
    steps = {
        name: (n - short.get(name, (0, 0))[0], us - short.get(name, (0, 0.0))[1])
        for name, (n, us) in long.items()
    }
    return (long_s - short_s) / TOKENS * 1e3, {name: found for name, found in steps.items() if found[0] > 0}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="result file without its ending")
    parser.add_argument("--model", choices=end_to_end.MODELS, default="qwen4_exp")
    parser.add_argument("--way", choices=end_to_end.WAYS, default="volta")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--plain-vllm", metavar="FOLDER")
    args = parser.parse_args()
    os.environ.update(
        end_to_end.ENVIRONMENT.get(args.way, {})
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    )
    if args.plain_vllm:
        sys.path.insert(0, args.plain_vllm)
    from vllm import LLM

    end_to_end.register_loader()
    lines = [
        f"command: {shlex.join(['python', *sys.argv])}",
        f"card: {end_to_end.card()}",
        f"date: {time.strftime('%Y-%m-%d')}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        changes = {"num_hidden_layers": args.layers} if args.layers else {}
        end_to_end.write_model(Path(folder, args.model), args.model, **changes)
        llm = LLM(str(Path(folder, args.model)), **end_to_end.engine_arguments(args.model, args.way))
        for batch in args.batch:
            step_ms, found = kernels(llm, batch)
            busy = sum(us for _, us in found.values()) / TOKENS
            launches = sum(n for n, _ in found.values()) / TOKENS
            lines.append(
                f"\n{args.model}:{args.way}, {args.layers or 'all'} layers, batch {batch}: {step_ms:.2f} ms a step without the "
                f"profiler, kernels {busy / 1e3:.2f} ms in {launches:.0f} launches\n      us a step  launches  us each"
            )
            for name, (n, us) in sorted(found.items(), key=lambda item: -item[1][1]):
                lines.append(f"{us / TOKENS:14.1f} {n / TOKENS:9.1f} {us / n:8.2f}  {name[:NAME_WIDTH]}")
            args.out.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
