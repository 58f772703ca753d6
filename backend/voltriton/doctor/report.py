"""The rows as text with colours, or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from voltriton.doctor.rows import FAIL, NOTE, OK, SKIP, STATUSES, WARN, Row

_COLOURS = {OK: "green", NOTE: "cyan", WARN: "yellow", FAIL: "bold red", SKIP: "dim"}


def as_json(rows: Sequence[Row], target: str) -> str:
    counts = Counter(row.status for row in rows)
    summary = {
        "target": target,
        "ready": not counts[FAIL],
        "counts": {name: counts[name] for name in STATUSES},
    }
    return json.dumps({**summary, "rows": [asdict(row) for row in rows]}, indent=2, ensure_ascii=False)


def print_text(rows: Sequence[Row], target: str, console: Console, show_all: bool = True) -> None:
    """What fails comes last, next to the prompt; every row says what was found, problems also why and what to do."""
    console.print(f"voltriton doctor, target {target}", highlight=False)
    width = max((len(row.check) for row in rows), default=0)
    for row in sorted(rows, key=lambda row: row.status == FAIL):
        if show_all or row.status in (WARN, FAIL):
            _print_row(row, width, console)
    counts = Counter(row.status for row in rows)
    text = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    verdict = "[bold red]not ready[/]" if counts[FAIL] else "[green]ready[/]"
    console.print(f"{verdict}: {text}", highlight=False)


def _print_row(row: Row, width: int, console: Console) -> None:
    colour = _COLOURS[row.status]
    console.print(
        f"[{colour}]{row.status:4}[/] {row.check:{width}}  {escape(row.found)}",
        highlight=False,
        soft_wrap=True,
    )
    if row.status not in (WARN, FAIL, NOTE):
        return
    for label, text in (("needed", row.needed), ("why", row.why), ("fix", row.fix)):
        if text:
            console.print(
                f"     {'':{width}}  [dim]{label}:[/] {escape(text)}", highlight=False, soft_wrap=True
            )
