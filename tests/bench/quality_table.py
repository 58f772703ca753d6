"""The quality table: perplexity, and KL divergence from the 16-bit model in nats a token, of 16-bit, round to nearest,
ours calibrated, ModelOpt's and llm-compressor's default.

    python tests/bench/quality_texts.py TEXTS
    python tests/bench/quality_table.py MODEL_DIR --calib FILE ... --test FILE ... \\
        --modelopt DIR --llm-compressor DIR                                          # see docs/quality.md

Every checkpoint is made from the same folder and read back by the same code; both measures are in float32. With
`--json`, rows that the file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from voltriton.checkpoint.codec import Rule
from voltriton.checkpoint.comparison import passed, perplexity, quality
from voltriton.checkpoint.convert import Options, convert
from voltriton.checkpoint.layers import LayerwiseModel
from voltriton.checkpoint.rounding import Recipe
from voltriton.checkpoint.source import Source
from voltriton.checkpoint.texts import load_tokenizer, windows

HERE = Path(__file__).parent


def peer(tool: str, site: Path) -> Callable[[Path, Path], None]:
    def make(source: Path, out: Path) -> None:
        command = [sys.executable, "-W", "ignore", str(HERE / "peers.py"), tool, str(source), str(out)]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{tool} failed: {done.stderr[-2000:]}")

    return make


def ours(options: Options) -> Callable[[Path, Path], None]:
    return lambda source, out: convert(source, out, options)


def variants(args: argparse.Namespace) -> dict[str, Callable[[Path, Path], None]]:
    def recipe(feedback: bool) -> Options:
        return Options(calibration=Recipe(args.calib, args.calib_tokens, args.window, feedback=feedback))

    made = {
        "round to nearest": ours(Options(Rule.COMPRESSED_TENSORS)),
        "ours, least squares": ours(Options(scales="mse")),
        "ours, calibrated scales": ours(recipe(False)),
        "ours, calibrated": ours(recipe(True)),
    }
    if args.llm_compressor:
        made["llm-compressor NVFP4A16"] = peer("llm-compressor", args.llm_compressor)
    if args.modelopt:
        made["ModelOpt W4A16_NVFP4"] = peer("modelopt", args.modelopt)
    made = {name: make for name, make in made.items() if not args.only or name in args.only}
    return made | {name: ready(Path(folder)) for name, _, folder in (h.partition("=") for h in args.have)}


def ready(folder: Path) -> Callable[[Path, Path], None]:
    return lambda source, out: out.symlink_to(folder.resolve())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--calib", type=Path, action="append", required=True)
    p.add_argument("--calib-tokens", type=int, default=Recipe().tokens)
    p.add_argument("--test", type=Path, action="append", required=True)
    p.add_argument("--test-tokens", type=int, default=8192, help="of each test text")
    p.add_argument("--window", type=int, default=512)
    p.add_argument("--only", action="append", help="this variant; may be repeated")
    p.add_argument("--have", action="append", default=[], metavar="NAME=DIR", help="a checkpoint made before")
    p.add_argument("--modelopt", type=Path, metavar="DIR")
    p.add_argument("--llm-compressor", type=Path, metavar="DIR")
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    print(json.dumps(table(args), indent=1))


@dataclass(frozen=True)
class Test:
    """A text, as windows, that has passed the 16-bit model."""

    windows: list[torch.Tensor]
    base: LayerwiseModel

    @staticmethod
    def of(source: Path, text: Path, tokens: int, window: int) -> Test:
        ids = windows(load_tokenizer(source), [text], tokens, window, seed=1)
        return Test(ids, passed(Source(source), ids))


def table(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tests = {t.stem: Test.of(args.model, t, args.test_tokens, args.window) for t in args.test}
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    made = {"16 bit": None} | variants(args)
    for name, make in made.items():
        if name not in rows:
            rows[name] = row(args.model, make, tests)
        show(name, rows, list(tests))
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def row(source: Path, make: Callable[[Path, Path], None] | None, tests: dict[str, Test]) -> dict[str, float]:
    """Perplexities by text, and what making the checkpoint took."""
    if make is None:
        same = {name: perplexity(test.base, test.windows) for name, test in tests.items()}
        return same | {f"{name} KL": 0.0 for name in tests} | {"seconds": 0.0, "CPU seconds": 0.0}
    work = Path(tempfile.mkdtemp(prefix="quality."))
    try:
        began, cpu = time.monotonic(), cpu_seconds()
        make(source, work / "out")
        cost = {"seconds": time.monotonic() - began, "CPU seconds": cpu_seconds() - cpu}
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        return compared(work / "out", tests) | cost
    finally:
        shutil.rmtree(work)


def compared(folder: Path, tests: dict[str, Test]) -> dict[str, float]:
    """Perplexity by text, and KL."""
    found = {}
    for name, test in tests.items():
        result = quality(Source(folder), test.base, test.windows)
        found |= {name: result.perplexity, f"{name} KL": result.kl}
    return found


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def show(name: str, rows: dict[str, dict[str, float]], texts: list[str]) -> None:
    base, worst = rows["16 bit"], rows.get("round to nearest", rows[name])

    def closed(key: str) -> str:
        gap = worst[key] - base[key]
        return f" ({(worst[key] - rows[name][key]) / gap:.0%} closed)" if gap else ""

    parts = [
        f"{text} {base[text]:.3f} -> {rows[name][text]:.3f}{closed(text)},"
        f" KL {rows[name][f'{text} KL']:.5f}{closed(f'{text} KL')}"
        for text in texts
    ]
    print(
        f"{name}: {'; '.join(parts)}; made in {rows[name]['seconds']:.0f} s,"
        f" CPU {rows[name]['CPU seconds']:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
