"""Line and point plots as inline SVG: small, offline, readable in print. No script is needed to see them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 46
# Okabe and Ito's palette: distinguishable with colour blindness.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    lines: bool = True


def plot(title: str, x_title: str, y_title: str, series: Sequence[Series]) -> str:
    """An <svg> element; a sentence in place of the plot where there is nothing to show."""
    shown = [s for s in series if s.points]
    if not shown:
        return f"<p>{escape(title)}: nothing to show.</p>"
    xs = _Axis([x for s in shown for x, _ in s.points], LEFT, WIDTH - RIGHT)
    ys = _Axis([0.0, *(y for s in shown for _, y in s.points)], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += [f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>']
    parts += _grid(xs, ys)
    parts += [
        f'<text class="axis" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>'
    ]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts += [
        f'<text class="axis" transform="rotate(-90 14 {middle})" x="14" y="{middle}" text-anchor="middle">',
        f"{escape(y_title)}</text>",
    ]
    for i, one in enumerate(shown):
        parts += _series(one, COLOURS[i % len(COLOURS)], xs, ys)
    parts += _legend(shown)
    return "".join([*parts, "</svg>"])


class _Axis:
    """Values to pixels, with round ticks."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = min(values), max(values)
        self.step = tick_step(high - low or abs(high) or 1.0)
        self.low = math.floor(low / self.step) * self.step
        self.high = max(math.ceil(high / self.step) * self.step, self.low + self.step)
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        return round(
            self._first + (value - self.low) / (self.high - self.low) * (self._last - self._first), 1
        )

    def ticks(self) -> list[float]:
        count = round((self.high - self.low) / self.step)
        return [self.low + i * self.step for i in range(count + 1)]


def tick_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, for about five ticks."""
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if raw <= factor * power * 1.0001)


def _grid(xs: _Axis, ys: _Axis) -> list[str]:
    parts = []
    for value in ys.ticks():
        y = ys.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for value in xs.ticks():
        x = xs.at(value)
        parts.append(
            f'<text class="tick" x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
        )
    return parts


def _series(one: Series, colour: str, xs: _Axis, ys: _Axis) -> list[str]:
    spots = [(xs.at(x), ys.at(y)) for x, y in one.points]
    parts = []
    if one.lines:
        path = " ".join(f"{x},{y}" for x, y in spots)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
    if not one.lines or len(spots) <= 24:
        radius = 3 if one.lines else 1.6
        parts += [f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}"/>' for x, y in spots]
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    width = 34 + 7 * max(len(one.name) for one in series)
    height = 8 + 15 * len(series)
    parts = [f'<rect x="{LEFT + 4}" y="{TOP}" width="{width}" height="{height}" fill="#fff" opacity="0.8"/>']
    for i, one in enumerate(series):
        y = TOP + 12 + 15 * i
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<rect x="{LEFT + 8}" y="{y - 8}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text class="tick" x="{LEFT + 23}" y="{y + 1}">{escape(one.name)}</text>')
    return parts


def document(figures: Sequence[str], style: str) -> str:
    """An SVG file of several plots, one below the other: for pages that cannot hold inline SVG."""
    height = HEIGHT * len(figures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"><style>{style}</style>'
    ]
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>')
    for i, figure in enumerate(figures):
        parts.append(figure.replace("<svg ", f'<svg y="{i * HEIGHT}" width="{WIDTH}" height="{HEIGHT}" ', 1))
    return "".join([*parts, "</svg>\n"])
