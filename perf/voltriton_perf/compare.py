"""`voltriton compare A B ...`: results side by side, with ratios to the first, and what differs in their set-up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from voltriton_perf import report
from voltriton_perf.report import ResultError
from voltriton_perf.sweep import console

METRICS = (
    ("requests_s", None, "requests/s"), ("output_tokens_s", None, "output tokens/s"),
    ("ttft_ms", "p50", "TTFT P50 ms"), ("ttft_ms", "p95", "TTFT P95 ms"),
    ("itl_ms", "p50", "ITL P50 ms"), ("itl_ms", "p95", "ITL P95 ms"), ("gap_ms", "p95", "gap P95 ms"),
    ("e2e_ms", "p50", "end to end P50 ms"), ("e2e_ms", "p95", "end to end P95 ms"),
)  # fmt: skip
# Differ in every run and explain nothing.
_IGNORED = ("setup.time", "setup.command", "setup.load_average", "options.out", "options.name")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="voltriton compare", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page too")
    args = parser.parse_args(argv)
    if len(args.results) < 2:
        parser.error("two or more results are needed")
    try:
        results = [read(path) for path in args.results]
        names = names_of(args.results)
        rows = side_by_side(results)
    except ResultError as error:
        print(f"voltriton compare: {error}", file=sys.stderr)
        return 1
    changes = differences(results)
    out = console()
    out.print(_table(names, rows))
    out.print(_changes_table(names, changes))
    for name, result in zip(names, results, strict=True):
        if not result["complete"]:
            print(f"{name} is partial: it was interrupted or failed", file=sys.stderr)
    if args.html:
        try:
            args.html.write_text(page(names, rows, changes), encoding="utf-8")
        except OSError as error:
            print(f"voltriton compare: --html {args.html}: {error.strerror}", file=sys.stderr)
            return 1
    return 0


def read(path: Path) -> dict[str, Any]:
    """ResultError where it is no result, or holds not all that is compared."""
    result = report.read(path)
    try:
        side_by_side([result])
        differences([result])
        bool(result["complete"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultError(f"{path}: damaged: {type(error).__name__}: {error}") from None
    return result


def names_of(paths: Sequence[Path]) -> list[str]:
    """The files' names; with their folders where these alone are the same."""
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path.with_suffix("")) for path in paths]


def side_by_side(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows: load, metric, then for each result its value and, from the second on, the ratio to the first.

    ResultError where no load was measured in all of them.
    """
    levels = [
        {report.name_of(level): level for level in r["levels"] if level.get("summary")} for r in results
    ]
    common = [name for name in levels[0] if all(name in other for other in levels)]
    if not common:
        raise ResultError("no load was measured in all of these results: nothing to compare")
    rows = []
    for name in common:
        for key, percent, title in METRICS:
            values = [_value(level[name]["summary"], key, percent) for level in levels]
            rows.append([name, title, *(_cell(v, values[0], i) for i, v in enumerate(values))])
        rows.append(
            [
                name,
                "failed",
                *(f"{v[name]['summary']['failed']}/{v[name]['summary']['requests']}" for v in levels),
            ]
        )
    return rows


def _value(summary: dict[str, Any], key: str, percent: str | None) -> float | None:
    value = summary[key]
    if percent is not None:
        value = value[percent] if value else None
    return None if value is None else float(value)


def _cell(value: float | None, base: float | None, position: int) -> str:
    if value is None:
        return "-"
    ratio = f" (x{value / base:.2f})" if position and base else ""
    return f"{value:.5g}{ratio}"


def flatten(value: Any, name: str = "") -> dict[str, str]:
    """Nested objects as dotted names."""
    if isinstance(value, dict):
        return {
            k: v
            for key, item in value.items()
            for k, v in flatten(item, f"{name}.{key}" if name else key).items()
        }
    return {name: json.dumps(value, ensure_ascii=False)}


def differences(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """[name, value in each] of all that is not the same in the set-ups and options."""
    flat = [flatten({"setup": r["setup"], "options": r["options"]}) for r in results]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = [[name, *(each.get(name, "absent") for each in flat)] for name in names if name not in _IGNORED]
    return [row for row in rows if len(set(row[1:])) > 1]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=f"ratios are to {names[0]}")
    for heading in ("load", "metric", *names):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _changes_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | str:
    if not rows:
        return "The set-ups are the same."
    table = Table(title="what differs in the set-up")
    for heading in ("what", *names):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def page(names: Sequence[str], rows: Sequence[Sequence[str]], changes: Sequence[Sequence[str]]) -> str:
    setup = report.table(("what", *names), changes) if changes else "<p>The set-ups are the same.</p>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>voltriton compare</title>'
        f"<style>{report.STYLE}</style></head><body><h1>voltriton compare</h1>"
        f"{report.table(('load', 'metric', *names), rows)}<h2>What differs in the set-up</h2>{setup}</body></html>\n"
    )
