"""Percentiles and what is made of requests: one definition for every report of ours.

TTFT is the first message with text minus the sending; the inter-token latency of a request is (last - first) divided
by the tokens after the first message's, as perf tools define it; end-to-end ends with the last message that carried
tokens. Throughputs are over the wall time from the first sending to the last end.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest ranks (numpy's default). ValueError where there is none."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True)
class Record:
    """One request as the client saw it. Times are seconds on one clock; `tokens` is one count a message."""

    sent_s: float
    arrivals_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    error: str | None = None
    prompt_tokens: int | None = None
    kind: str = ""

    @property
    def ended_s(self) -> float:
        return self.arrivals_s[-1] if self.arrivals_s else self.sent_s

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def total_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def itl_s(self) -> float | None:
        """None where all tokens came in one message."""
        later = sum(self.tokens) - self.tokens[0] if self.tokens else 0
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / later if later > 0 else None


@dataclass
class Summary:
    """One level of load."""

    requests: int
    failed: int
    errors: dict[str, int]
    wall_s: float
    requests_s: float
    # How fast requests were really sent: an open loop that lags shows here.
    offered_s: float | None
    output_tokens_s: float
    output_tokens: int
    tokens_message: float | None
    # milliseconds: {"mean": .., "p50": ..}; None where there is nothing to count
    ttft_ms: dict[str, float] | None
    itl_ms: dict[str, float] | None
    gap_ms: dict[str, float] | None
    e2e_ms: dict[str, float] | None
    prompt_tokens: dict[str, float] | None = None
    by_kind: dict[str, Any] = field(default_factory=dict)

    @property
    def error_rate(self) -> float:
        return self.failed / self.requests if self.requests else 0.0


def spread(values: Iterable[float], scale: float = 1.0) -> dict[str, float] | None:
    """Mean, percentiles, least and most; None for no values."""
    found = [v * scale for v in values]
    if not found:
        return None
    result = {"mean": sum(found) / len(found)}
    result |= {f"p{p}": percentile(found, p) for p in PERCENTILES}
    result |= {"min": min(found), "max": max(found)}
    return {name: round(value, 3) for name, value in result.items()}


def summarise(records: Sequence[Record]) -> Summary:
    """ValueError for no records. Failed requests count in `requests` and `errors`, and nowhere else."""
    if not records:
        raise ValueError("no request was made")
    good = [r for r in records if r.error is None and r.arrivals_s]
    answered = {id(r) for r in good}
    errors = causes(r.error or "EMPTY: no token came" for r in records if id(r) not in answered)
    # From the first sending to the last end of what was answered; failures may have ended long before or after.
    counted = good or records
    wall_s = max(r.ended_s for r in counted) - min(r.sent_s for r in counted)
    tokens = sum(sum(r.tokens) for r in good)
    messages = sum(len(r.arrivals_s) for r in good)
    gaps = (b - a for r in good for a, b in itertools.pairwise(r.arrivals_s))
    return Summary(
        requests=len(records),
        failed=len(records) - len(good),
        errors=errors,
        wall_s=round(wall_s, 3),
        requests_s=round(len(good) / wall_s, 3) if wall_s else 0.0,
        offered_s=_offered_s([r.sent_s for r in records]),
        output_tokens_s=round(tokens / wall_s, 2) if wall_s else 0.0,
        output_tokens=tokens,
        tokens_message=round(tokens / messages, 2) if messages else None,
        ttft_ms=spread((r.ttft_s for r in good), 1e3),
        itl_ms=spread((r.itl_s for r in good if r.itl_s is not None), 1e3),
        gap_ms=spread(gaps, 1e3),
        e2e_ms=spread((r.total_s for r in good), 1e3),
        prompt_tokens=spread(r.prompt_tokens for r in good if r.prompt_tokens is not None),
        by_kind=_by_kind(records, good),
    )


def _by_kind(records: Sequence[Record], good: Sequence[Record]) -> dict[str, Any]:
    """For mixed traffic: the same figures for each kind."""
    return {
        kind: {
            "requests": sum(r.kind == kind for r in records),
            "ttft_ms": spread((r.ttft_s for r in good if r.kind == kind), 1e3),
            "e2e_ms": spread((r.total_s for r in good if r.kind == kind), 1e3),
        }
        for kind in sorted({r.kind for r in records} - {""})
    }


def causes(errors: Iterable[str]) -> dict[str, int]:
    """Failures by cause, the most frequent first; texts that differ in numbers only are one, shown as its first."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for error in errors:
        key = re.sub(r"[0-9]+", "N", error)
        counts[key] += 1
        first.setdefault(key, error[:200])
    return {first[key]: count for key, count in counts.most_common()}


def _offered_s(sent_s: Sequence[float]) -> float | None:
    span = max(sent_s) - min(sent_s)
    return round((len(sent_s) - 1) / span, 3) if span > 0 else None
