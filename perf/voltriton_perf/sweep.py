"""`voltriton sweep`: latency and throughput of a served model over a range of loads."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from voltriton_client import VoltritonError

from voltriton_perf import inputs, report
from voltriton_perf.bench import Bench, Measured, Service
from voltriton_perf.inputs import InputError, Shape
from voltriton_perf.load import Prompt
from voltriton_perf.pa import Level
from voltriton_perf.perf_analyzer import FetchError, PerfAnalyzer, default_home
from voltriton_perf.setup import describe_setup
from voltriton_perf.signals import as_interrupts

FORMAT = "voltriton-sweep/1"


def main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        with as_interrupts():
            return Sweep(args, argv).run()
    except (VoltritonError, InputError, FetchError, report.ResultError, OSError) as error:
        print(f"voltriton sweep: {error}", file=sys.stderr)
        return 1


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="voltriton sweep", description=__doc__)
    add_service_options(parser)
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument(
        "--concurrency", type=positive, nargs="+", default=[1, 2, 4, 8], help="closed loop (1 2 4 8)"
    )
    loads.add_argument(
        "--rate", type=positive_number, nargs="+", help="open loop: requests a second, Poisson"
    )
    parser.add_argument(
        "--requests", type=positive, default=0, help="a level; default: 10 for each stream, at least 20"
    )
    parser.add_argument("--prompt-tokens", type=positive, default=128, help="exactly (%(default)s)")
    parser.add_argument(
        "--output-tokens", type=positive, default=64, help="exactly, by ignore_eos (%(default)s)"
    )
    parser.add_argument("--language", choices=("en", "zh", "mixed"), default="en")
    parser.add_argument(
        "--shared-prefix", type=share, default=0.0, help="part of the prompt, 0 to 1 (%(default)s)"
    )
    parser.add_argument("--sampling", type=json_object, default={}, metavar="JSON", help="over the defaults")
    parser.add_argument(
        "--tool",
        choices=("auto", "perf_analyzer", "client"),
        default="auto",
        help="auto: perf_analyzer where it can be had, else our own client",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("perf-results"), metavar="FOLDER", help="%(default)s"
    )
    parser.add_argument("--name", default="sweep", help="of the files in the folder (%(default)s)")
    return parser.parse_args(argv)


def add_service_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", default="127.0.0.1:8001", metavar="HOST:PORT", help="Triton's gRPC (%(default)s)"
    )
    parser.add_argument(
        "--metrics", metavar="URL", help="default: port after gRPC's, /metrics; 'none': not sampled"
    )
    parser.add_argument("--model", default="vllm")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json or its folder; default: the server counts",
    )
    parser.add_argument(
        "--model-path", type=Path, metavar="FOLDER", help="of the weights, for their hash in the report"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=600.0,
        metavar="S",
        help="for a request, and for a run of perf_analyzer (%(default)s)",
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, allowed: 1 or more")
    return value


def positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: more than 0")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 0 to 1")
    return value


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text}, allowed: a JSON object")
    return value


def service_of(args: argparse.Namespace) -> Service:
    host, _, port = args.server.rpartition(":")
    if not port.isdigit():
        raise InputError(f"--server: got {args.server!r}, allowed: HOST:PORT")
    url = args.metrics or f"http://{host}:{int(port) + 1}/metrics"
    return Service(args.server, args.model, None if url == "none" else url)


def counter_of(args: argparse.Namespace, service: Service) -> inputs.Count:
    if args.tokenizer:
        return inputs.local_counter(args.tokenizer)
    if "render_only" not in service.inputs():
        raise InputError(
            f"model {service.model!r} cannot count tokens (no input render_only): give --tokenizer PATH"
        )
    return inputs.server_counter(service.address, service.model)


def fixed_length(tokens: int) -> dict[str, Any]:
    """Sampling parameters for answers of exactly so many tokens."""
    return {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0}


def analyzer_of(tool: str) -> tuple[PerfAnalyzer | None, str | None]:
    """perf_analyzer, fetched where it is missing; and the reason where there is none. FetchError if it was a must."""
    if tool == "client":
        return None, None
    analyzer = PerfAnalyzer(default_home())
    try:
        if not analyzer.there:
            print("fetching perf_analyzer ...", file=sys.stderr, flush=True)
            analyzer.fetch()
    except FetchError as error:
        if tool == "perf_analyzer":
            raise
        return None, f"perf_analyzer cannot be had: {error}"
    return analyzer, None


class Sweep:
    def __init__(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        self._args = args
        self._service = service_of(args)
        self._analyzer, why_not = analyzer_of(args.tool)
        self._notes = [why_not] if why_not else []
        sampling = {**fixed_length(args.output_tokens), **args.sampling}
        self._bench = Bench(self._service, sampling, args.seed, args.timeout, self._analyzer)
        self._levels = levels_of(args)
        self._measured: list[Measured] = []
        self._command = ["voltriton", "sweep", *argv]
        self._complete = False

    def run(self) -> int:
        self._service.inputs()
        report.check_place(self._args.out, self._args.name)
        prompts = self._prompts()
        try:
            with progress() as bar:
                self._all(prompts, bar)
            self._complete = not any(m.interrupted for m in self._measured)
        except KeyboardInterrupt:
            print("interrupted; what was measured is kept", file=sys.stderr)
        return self._finish()

    def _prompts(self) -> list[Prompt]:
        args = self._args
        shape = Shape(args.prompt_tokens, args.language, args.shared_prefix)
        # Enough that a level's prompts differ, and its warm-up's from them; a prefix cache must not know them.
        number = min(512, max(level.least_requests for level in self._levels)) + 8
        print(f"making {number} prompts of {shape.tokens} tokens ...", file=sys.stderr, flush=True)
        return [
            Prompt(text)
            for text in inputs.make_prompts(shape, number, args.seed, counter_of(args, self._service))
        ]

    def _all(self, prompts: list[Prompt], bar: Progress) -> None:
        task = bar.add_task("", total=sum(level.requests for level in self._levels))
        warm = self._bench.warm_up(prompts[:8], 4, 8)
        if all(r.error for r in warm):
            self._notes.append(f"warm-up: every request failed: {warm[0].error}")
        ended = 0
        for level in self._levels:
            bar.update(task, description=f"{level.mode} {level.value:g}")
            self._measured.append(self._bench.measure(level, prompts[8:], lambda record: bar.advance(task)))
            ended += level.requests
            bar.update(task, completed=ended)
            if self._measured[-1].interrupted:
                return

    def _finish(self) -> int:
        args = self._args
        if not self._measured:
            print("voltriton sweep: nothing was measured", file=sys.stderr)
            return 1
        result = {
            "format": FORMAT, "name": args.name, "complete": self._complete, "notes": self._notes,
            "setup": describe_setup(self._command, args.model_path),
            "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
            "levels": [m.as_dict() for m in self._measured],
        }  # fmt: skip
        path = report.write(result, args.out, args.name)
        console().print(level_table(result["levels"]))
        for note in self._notes:
            print(note, file=sys.stderr)
        print(f"report: {path.with_suffix('.html')} and {path.name} beside it", file=sys.stderr)
        failed = [m for m in self._measured if m.failed]
        if failed:
            print(
                f"voltriton sweep: {failed[0].level.mode} {failed[0].level.value:g}: {failed[0].failed}",
                file=sys.stderr,
            )
        return 1 if failed or not self._complete else 0


def levels_of(args: argparse.Namespace) -> list[Level]:
    if args.rate:
        return [_level("rate", rate, args.requests or max(20, round(rate * 10))) for rate in args.rate]
    return [_level("concurrency", c, args.requests or max(20, c * 10)) for c in args.concurrency]


def _level(mode: str, value: float, requests: int) -> Level:
    return Level(mode, value, Level(mode, value, requests).least_requests)


def progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def level_table(levels: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="milliseconds, P50 / P95")
    for heading in ("load", "tool", "req/s", "tok/s", "TTFT", "ITL", "end to end", "failed"):
        table.add_column(heading, justify="right")
    for level in levels:
        name = f"{level['mode']} {level['value']:g}"
        summary = level.get("summary")
        if not summary:
            table.add_row(name, level["tool"], *[""] * 5, level["failed"] or "nothing was measured")
            continue
        cells = [_pair(summary[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms")]
        failed = f"{summary['failed']} of {summary['requests']}" + (" (partial)" if level["partial"] else "")
        rates = [f"{summary['requests_s']:.2f}", f"{summary['output_tokens_s']:.1f}"]
        table.add_row(name, level["tool"], *rates, *cells, failed)
    return table


def _pair(spread: dict[str, float] | None) -> str:
    return f"{spread['p50']:.1f} / {spread['p95']:.1f}" if spread else ""
