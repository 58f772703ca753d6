from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from voltriton_perf.stats import Record, causes, percentile, summarise

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(NUMBERS, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_a_coalesced_answer() -> None:
    # 1 token at 0.1 s, 3 at 0.2 s: the three took 0.1 s.
    record = Record(sent_s=0.0, arrivals_s=(0.1, 0.2), tokens=(1, 3))
    assert record.ttft_s == pytest.approx(0.1)
    assert record.itl_s == pytest.approx(0.1 / 3)
    assert record.total_s == pytest.approx(0.2)
    assert Record(0.0, (0.1,), (4,)).itl_s is None


def test_failures_count_only_as_failures() -> None:
    good = Record(1.0, (1.5, 2.0), (1, 1))
    refused = Record(0.0, error="UNAVAILABLE: overloaded: 64 sequences are open")
    other = Record(0.0, error="UNAVAILABLE: overloaded: 65 sequences are open")
    empty = Record(1.0)
    summary = summarise([good, refused, other, empty])
    assert (summary.requests, summary.failed, summary.error_rate) == (4, 3, 0.75)
    assert summary.errors == {"UNAVAILABLE: overloaded: 64 sequences are open": 2, "EMPTY: no token came": 1}
    assert summary.output_tokens == 2
    assert summary.wall_s == 1.0
    assert summary.output_tokens_s == 2.0


def test_when_everything_failed_there_are_no_latencies() -> None:
    summary = summarise([Record(0.0, error="INTERNAL: x"), Record(1.0, error="INTERNAL: x")])
    assert summary.ttft_ms is None and summary.e2e_ms is None and summary.tokens_message is None
    assert summary.requests_s == 0


def test_nothing_at_all() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarise([])


def test_causes_differ_by_words_not_by_numbers() -> None:
    assert causes(["a 1", "b", "a 2", "a 1"]) == {"a 1": 3, "b": 1}
