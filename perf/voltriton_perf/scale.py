"""How the cost of serving grows with the load: what a server adds to the in-process engine, and a line through it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from voltriton_perf.svg import Series, plot

BASE = "in-process"


@dataclass(frozen=True)
class Line:
    """y = at_zero + slope * x, by least squares; `fit` is R squared (1: all points on the line)."""

    at_zero: float
    slope: float
    fit: float

    def at(self, x: float) -> float:
        return self.at_zero + self.slope * x


def line(points: Sequence[tuple[float, float]]) -> Line:
    """ValueError for fewer than two different x."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if len(set(xs)) < 2:
        raise ValueError("a line needs points at two different places")
    slope, at_zero = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(ys)
    total = sum((y - mean) ** 2 for y in ys)
    rest = sum((y - at_zero - slope * x) ** 2 for x, y in points)
    return Line(at_zero, slope, 1 - rest / total if total else 1.0)


def added(rows: Sequence[dict[str, Any]], target: str, key: str, x: str) -> list[tuple[float, float]]:
    """(x, median over the rounds of the target's value minus the in-process one's in the same round)."""
    base = {(r["round"], r["streams"], r["words"]): r[key] for r in rows if r["target"] == BASE}
    found: dict[float, list[float]] = {}
    for row in rows:
        place = (row["round"], row["streams"], row["words"])
        if row["target"] == target and place in base and row[key] is not None and base[place] is not None:
            found.setdefault(float(row[x]), []).append(row[key] - base[place])
    return sorted((at, statistics.median(values)) for at, values in found.items())


def report(
    rows: Sequence[dict[str, Any]], targets: Sequence[str], x: str = "streams"
) -> tuple[list[str], str]:
    """(plots as SVG, Markdown): what each target adds to a token and to the first one, in ms, with fitted lines."""
    figures, lines = (
        [],
        ["| target | what | at none | for each of " + x + " | R2 |", "| --- | --- | --- | --- | --- |"],
    )
    for key, title in (("tpot_mean_ms", "added to a token"), ("ttft_mean_ms", "added to the first token")):
        series = []
        for target in targets:
            points = added(rows, target, key, x)
            series.append(Series(target, points))
            if len(points) > 1:
                found = line(points)
                ends = [(at, found.at(at)) for at in (points[0][0], points[-1][0])]
                series.append(Series(f"{target}, fitted", ends))
                lines.append(
                    f"| {target} | {title}, ms | {found.at_zero:.2f} | {found.slope:.4f} | {found.fit:.2f} |"
                )
        figures.append(plot(f"Milliseconds {title}, over the in-process engine", x, "ms", series))
    return figures, "\n".join(lines)
