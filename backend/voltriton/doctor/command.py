"""The command line of `voltriton doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from voltriton.doctor import (
    checks_deep,
    checks_gpu,
    checks_health,
    checks_host,
    checks_links,
    checks_model,
    checks_software,
    checks_use,
    checks_variables,
)
from voltriton.doctor.box import TARGETS, Box, Options
from voltriton.doctor.host import Host, RealHost, RecordedHost, RecordingHost
from voltriton.doctor.report import as_json, print_text
from voltriton.doctor.rows import CHECKS, FAIL, Row, run_check

# Imported for their checks.
ROOMS = (
    checks_gpu,
    checks_health,
    checks_use,
    checks_links,
    checks_software,
    checks_variables,
    checks_host,
    checks_model,
    checks_deep,
)
# The order of the report: what the rest stands on comes first.
ORDER = (
    "gpu",
    "link",
    "net",
    "host",
    "torch",
    "vllm",
    "triton",
    "nccl",
    "python",
    "env",
    "model",
    "profile",
    "deep",
)


def main(argv: list[str]) -> int:
    """0: nothing that would stop serving; 1: at least one row says fail; 2: wrong usage."""
    args = _parser().parse_args(argv)
    try:
        box = Box(_host(args), _options(args))
        rows = examine(box, args.only)
    except ValueError as error:
        print(f"voltriton doctor: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(as_json(rows, box.target))
    else:
        console = Console(no_color=args.no_color or None, force_terminal=True if args.color else None)
        print_text(rows, box.target, console, show_all=not args.problems)
    failed = [row.check for row in rows if row.status == FAIL]
    if failed:
        print(f"voltriton doctor: not ready: {', '.join(dict.fromkeys(failed))}", file=sys.stderr)
    return 1 if failed else 0


def examine(box: Box, only: Sequence[str] = ()) -> list[Row]:
    """All rows, or those of the checks whose names begin with one of `only`. ValueError where none does."""
    chosen = [entry for name, entry in CHECKS.items() if not only or name.startswith(tuple(only))]
    if not chosen:
        raise ValueError(
            f"--only: no check begins with {' or '.join(only)}; there are {', '.join(sorted(CHECKS))}"
        )
    chosen.sort(key=lambda entry: ORDER.index(entry.name.split(".")[0]))
    return [row for entry in chosen for row in run_check(entry, box)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="voltriton doctor", description="check this machine before serving from it"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable rows")
    parser.add_argument("--target", choices=TARGETS, help="what to check for (default: by the cards found)")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="cards that the model needs (default: 4 for v100, 1 for hopper)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="also check this model's folder and whether it fits"
    )
    parser.add_argument("--profile", help="also check this profile (default with --model: the target's)")
    parser.add_argument("--infiniband", action="store_true", help="also check InfiniBand (several hosts)")
    parser.add_argument(
        "--deep", action="store_true", help="also move data between the cards (minutes; needs them idle)"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="only checks that begin so, such as gpu nccl"
    )
    parser.add_argument("--problems", action="store_true", help="leave out what is well")
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter that will serve (default: this one)"
    )
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="keep all that was read, for a report or a test"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="DIR", help="check a recording instead of this machine"
    )
    parser.add_argument("--color", action="store_true", help="colours also when the output is no terminal")
    parser.add_argument("--no-color", action="store_true", help="no colours")
    return parser


def _host(args: argparse.Namespace) -> Host:
    if args.replay:
        return RecordedHost(args.replay)
    return RecordingHost(RealHost(), args.record) if args.record else RealHost()


def _options(args: argparse.Namespace) -> Options:
    if args.gpus is not None and args.gpus < 1:
        raise ValueError(f"--gpus: got {args.gpus}, at least 1 is allowed")
    return Options(args.target, args.gpus, args.python, args.model, args.profile, args.infiniband, args.deep)
