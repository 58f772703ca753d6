"""One row of the report, and the list of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from voltriton.doctor.box import Box

OK, NOTE, WARN, FAIL, SKIP = "ok", "note", "warn", "fail", "skip"
STATUSES = (OK, NOTE, WARN, FAIL, SKIP)


@dataclass(frozen=True)
class Row:
    """`status`: ok; note: worth knowing; warn: works, with a cost or a risk; fail: will not work; skip: not seen."""

    check: str
    status: str
    found: str
    needed: str
    why: str = ""
    fix: str = ""


CheckFunction = Callable[["Box"], "Row | Iterable[Row]"]


@dataclass(frozen=True)
class Check:
    name: str
    function: CheckFunction
    troubles: tuple[int, ...]
    """Numbers of the troubles table in docs/operations.md that this check can see."""


CHECKS: dict[str, Check] = {}


def check(name: str, *troubles: int) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check; the report has them in the order of their registration."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[name] = Check(name, function, troubles)
        return function

    return register


def run_check(entry: Check, box: Box) -> list[Row]:
    """A check that breaks is a row that says so: the operator still gets all the others."""
    try:
        rows = entry.function(box)
        return [rows] if isinstance(rows, Row) else list(rows)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return [
            Row(
                entry.name,
                WARN,
                f"the check itself failed: {text}",
                "a check that runs",
                "a fault of voltriton",
                "run `voltriton doctor --record DIR` and report it with the folder",
            )
        ]
