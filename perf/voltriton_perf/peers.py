"""Ours and its peers under the same load in one run, interleaved; see perf/peers.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from voltriton_perf import scale, targets
from voltriton_perf.closed_loop import Plan
from voltriton_perf.report import PLOT_STYLE
from voltriton_perf.scale import BASE
from voltriton_perf.setup import describe_setup
from voltriton_perf.signals import as_interrupts, ignored
from voltriton_perf.svg import document
from voltriton_perf.targets import Target, TargetError
from voltriton_perf.wires import WireError

# (key, heading, digits); the ratios come after.
COLUMNS = (
    ("ttft_mean_ms", "TTFT mean ms", 1), ("ttft_p95_ms", "TTFT P95 ms", 1), ("tpot_mean_ms", "ms a token", 2),
    ("gap_p95_ms", "gap P95 ms", 1), ("tokens_message", "tokens a message", 1),
    ("front_us_token", "front CPU us a token", 0), ("load1", "load", 1),
)  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="peers.py", description=__doc__)
    parser.add_argument("--model", default=".voltriton/models/smollm2-hf", help="folder (%(default)s)")
    parser.add_argument("--targets", default="in-process,vllm-openai,voltriton-grpc,voltriton-http,gateway")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME[:MODEL]=COMMAND", help=targets.extra.__doc__
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument(
        "--words", type=int, nargs="+", default=[6], help="prompt length in words, about one token each"
    )
    parser.add_argument(
        "--instances", type=int, default=1, help="models of our server; streams go to them in turn"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--requests", type=int, nargs=2, default=[2, 8], metavar=("LEAST", "MOST"), help="a stream"
    )
    parser.add_argument(
        "--real", action="store_true", help="the real CPU engine instead of the fake executor"
    )
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, metavar="JSON", help="over the defaults"
    )
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="`voltriton` of model.json"
    )
    parser.add_argument("--rows", type=Path, help="file for the rows (JSON lines)")
    parser.add_argument("--out", type=Path, help="file for setup, rows and table (JSON); a .md beside it")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="SVG: how the overhead grows, with fitted lines"
    )
    parser.add_argument("--table", type=Path, metavar="ROWS", help="measure nothing: the table of these rows")
    args = parser.parse_args(argv)
    if args.table:
        return show(args)
    with as_interrupts():
        try:
            return Comparison(args).run()
        except TargetError as error:
            print(f"peers.py: {error}", file=sys.stderr)
            return 1


def show(args: argparse.Namespace) -> int:
    """What --table asks for: the table, and files of it where --out or --plot are given."""
    rows = [json.loads(line) for line in args.table.read_text().splitlines()]
    print(table(rows))
    if args.out:
        write(args, rows, {})
    if args.plot:
        plot(args, rows)
    return 0


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]], failures: dict[str, str]) -> None:
    """JSON with all that is needed to reproduce, and the table as Markdown beside it."""
    given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    setup = describe_setup(["perf/peers.py", *sys.argv[1:]], Path(args.model))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    data = {"setup": setup, "arguments": given, "failures": failures}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    args.out.write_text(json.dumps(data, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')
    args.out.with_suffix(".md").write_text(table(rows) + "\n")


def plot(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """How the overhead grows: an SVG file with plots, and the fitted lines on standard output."""
    names = [name for name in dict.fromkeys(row["target"] for row in rows) if name != BASE]
    x = "words" if len({row["words"] for row in rows}) > 1 else "streams"
    figures, lines = scale.report(rows, names, x)
    print(lines)
    args.plot.write_text(document(figures, PLOT_STYLE))


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []
        self._targets: list[Target] = []
        self._failures: dict[str, str] = {}

    def run(self) -> int:
        with tempfile.TemporaryDirectory(prefix="voltriton-peers-") as folder:
            processes: list[targets.Process] = []
            try:
                self._targets = self._choose(Path(folder))
                for process in {id(t.process): t.process for t in self._targets}.values():
                    processes.append(process)
                    print(f"starting {process.name} ...", file=sys.stderr, flush=True)
                    process.start()
                asyncio.run(self._measure())
            except KeyboardInterrupt:
                print("interrupted; what was measured is kept", file=sys.stderr)
            finally:
                # A second Ctrl-C or SIGTERM must not leave servers behind; stopping is bounded.
                with ignored():
                    for process in reversed(processes):
                        process.stop()
        self._report()
        return 0 if self._rows else 1

    def _choose(self, folder: Path) -> list[Target]:
        args, env = self._args, targets.engine_env(not self._args.real)
        names = args.targets.split(",")
        engine_args = {"model": str(Path(args.model).absolute()), "dtype": "float32", "max_model_len": 8192}
        if args.real:
            engine_args |= {"max_model_len": 2048}
        else:
            engine_args |= {"distributed_executor_backend": "fake_executor.FakeExecutor", "max_num_seqs": 256}
        engine_args |= args.engine_args
        found = targets.in_process(folder, engine_args, env) + targets.vllm_server(folder, engine_args, env)
        found += targets.ours(folder, engine_args, env, args.instances, args.settings)
        found += targets.gateway(folder, found[2])
        known = [t.name for t in found]
        for name in names:
            if name not in known:
                raise TargetError(f"--targets: got {name!r}, allowed: {', '.join(known)}")
        if "gateway" in names and not {"voltriton-grpc", "voltriton-http"} & set(names):
            raise TargetError("--targets: gateway needs voltriton-grpc")
        chosen = [t for t in found if t.name in names]
        return chosen + [t for text in args.extra for t in targets.extra(folder, text, engine_args)]

    async def _measure(self) -> None:
        args = self._args
        total = args.rounds * len(args.words) * len(args.streams) * len(self._targets)
        with Progress(
            *Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)
        ) as bar:
            task = bar.add_task("measuring", total=total)
            for turn in range(args.rounds):
                for words in args.words:
                    for streams in args.streams:
                        await self._round(turn, words, streams, lambda: bar.advance(task))

    async def _round(self, turn: int, words: int, streams: int, done: Any) -> None:
        least, most = self._args.requests
        requests = min(most, max(least, 64 // streams))
        # Each round starts at another target, so that none always runs first; each target's prompts differ, lest one
        # finds them in a prefix cache it shares (two wires of one server do).
        at = turn % len(self._targets)
        for target in self._targets[at:] + self._targets[:at]:
            seed = turn * 1000 + streams + words * 10_000_000 + 100_000 * self._targets.index(target)
            plan = Plan(streams, requests, self._args.tokens, seed, words)
            try:
                row = await target.measure(plan)
            except (WireError, OSError, TimeoutError) as error:
                # The others are still worth measuring.
                self._targets.remove(target)
                self._failures[target.name] = f"{type(error).__name__}: {error}"
                print(f"{target.name} failed and is left out: {error}", file=sys.stderr, flush=True)
                continue
            row |= {"target": target.name, "round": turn, "words": words}
            self._rows.append(row)
            if self._args.rows:
                with self._args.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            done()

    def _report(self) -> None:
        if not self._rows:
            return
        text = table(self._rows)
        print(text)
        if self._args.out:
            write(self._args, self._rows, self._failures)
        if self._args.plot:
            plot(self._args, self._rows)
        print(f"load average now {os.getloadavg()[0]:.1f}", file=sys.stderr)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line a level and target. Best is the least disturbed round; ratios are to the in-process engine."""
    heads = [
        "words",
        "streams",
        "target",
        "rounds",
        "tok/s median [best]",
        "best / base's best",
        "ratio in a round: median (least..most)",
    ]
    heads += [heading for _, heading, _ in COLUMNS] + ["TTFT best / base's best"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    names = list(dict.fromkeys(row["target"] for row in sorted(rows, key=lambda r: r["round"])))
    names.sort(key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    for words, streams in sorted({(r["words"], r["streams"]) for r in rows}):
        level = [r for r in rows if (r["words"], r["streams"]) == (words, streams)]
        base = {r["round"]: r for r in level if r["target"] == BASE}
        for name in names:
            mine = {r["round"]: r for r in level if r["target"] == name}
            if mine:
                lines.append("| " + " | ".join([str(words), str(streams), name, *_cells(mine, base)]) + " |")
    return "\n".join(lines)


_ORDER = ("in-process", "vllm-openai", "voltriton-grpc", "voltriton-http", "gateway")


def _cells(mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> list[str]:
    speeds = [r["tok_s"] for r in mine.values()]
    cells = [str(len(mine)), f"{statistics.median(speeds):.0f} [{max(speeds):.0f}]"]
    common = [mine[t]["tok_s"] / base[t]["tok_s"] for t in mine if t in base]
    if common:
        best = max(r["tok_s"] for r in base.values())
        cells += [
            f"{max(speeds) / best:.2f}",
            f"{statistics.median(common):.2f} ({min(common):.2f}..{max(common):.2f})",
        ]
    else:
        cells += ["", ""]
    for key, _, digits in COLUMNS:
        values = [r[key] for r in mine.values() if r[key] is not None]
        cells.append(f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}]" if values else "")
    firsts = [r["ttft_mean_ms"] for r in base.values()]
    cells.append(f"{min(r['ttft_mean_ms'] for r in mine.values()) / min(firsts):.2f}" if firsts else "")
    return cells
