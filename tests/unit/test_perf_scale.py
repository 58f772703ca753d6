from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from voltriton_perf import scale
from voltriton_perf.svg import document


def row(target: str, turn: int, streams: int, tpot: float) -> dict[str, Any]:
    return {
        "target": target,
        "round": turn,
        "streams": streams,
        "words": 6,
        "tpot_mean_ms": tpot,
        "ttft_mean_ms": tpot,
    }


ROWS = [
    *(row("in-process", turn, n, 5.0 + turn) for turn in range(3) for n in (1, 10, 20)),
    *(row("ours", turn, n, 5.0 + turn + 0.1 + 0.02 * n) for turn in range(3) for n in (1, 10, 20)),
]


def test_what_is_added_is_taken_inside_rounds() -> None:
    points = scale.added(ROWS, "ours", "tpot_mean_ms", "streams")
    assert points == [(n, pytest.approx(0.1 + 0.02 * n)) for n in (1.0, 10.0, 20.0)]


def test_a_line_through_points_on_a_line() -> None:
    found = scale.line(scale.added(ROWS, "ours", "tpot_mean_ms", "streams"))
    assert (found.at_zero, found.slope, found.fit) == pytest.approx((0.1, 0.02, 1.0))
    assert found.at(100) == pytest.approx(2.1)


def test_no_line_through_one_place() -> None:
    with pytest.raises(ValueError, match="two different places"):
        scale.line([(1.0, 2.0), (1.0, 3.0)])


def test_a_report_of_it() -> None:
    figures, lines = scale.report(ROWS, ["ours"])
    assert len(figures) == 2 and "ours, fitted" in figures[0]
    root = ElementTree.fromstring(document(figures, "text{fill:#333}"))
    assert len(root.findall("{http://www.w3.org/2000/svg}svg")) == 2
    assert "| ours | added to a token, ms | 0.10 | 0.0200 | 1.00 |" in lines
