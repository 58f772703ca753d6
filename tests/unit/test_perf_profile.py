from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from voltriton_perf import profile
from voltriton_perf.profile import ProfileError, judge
from voltriton_perf.sla import search, with_users
from voltriton_perf.stats import Record, summarise

GOOD: dict[str, Any] = {
    "name": "x",
    "users": {"wanted": 8, "least": 1, "most": 64},
    "mix": [{"share": 65, "prompt_tokens": 16, "output_tokens": 8}],
    "targets": {"ttft_p95_ms": 200},
}


def test_the_profiles_that_come_with_us() -> None:
    seeds = profile.load("seeds")
    assert [part.share for part in seeds.mix] == [65, 25, 10]
    assert seeds.wanted == 128
    assert profile.load("smoke").targets["error_rate"] == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"user": {}}, "unknown key 'user'; did you mean 'users'"),
        ({"users": {"wanted": 0}}, "users.wanted: got 0"),
        ({"users": {"wanted": 8, "most": 4}}, "least 1, wanted 8, most 4"),
        ({"users": {"most": 4}}, "wanted is missing"),
        ({"mix": []}, r"mix: got \[\]"),
        ({"mix": [{"share": 1, "prompt_tokens": 0, "output_tokens": 1}]}, r"mix\[0\].prompt_tokens: got 0"),
        ({"mix": [{"share": 1, "prompt_tokens": 1, "output_tokens": True}]}, "output_tokens: got True"),
        ({"mix": [{"share": 0, "prompt_tokens": 1, "output_tokens": 1}]}, "share: got 0"),
        ({"mix": [{"share": float("inf"), "prompt_tokens": 1, "output_tokens": 1}]}, "share: got inf"),
        ({"targets": {"error_rate": float("nan")}}, "error_rate: got nan"),
        ({"targets": {}}, "at least one"),
        ({"targets": {"ttft_p96_ms": 1}}, "no target; did you mean 'ttft_p95_ms'"),
        ({"targets": {"error_rate": "1%"}}, "got '1%'"),
        ({"language": "fr"}, "got 'fr'"),
        ({"shared_prefix": 2}, "got 2"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        profile.parse({**GOOD, **change}, "p.yaml")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="profiles that come with us: seeds, smoke"):
        profile.load("nothing-of-the-kind")
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ProfileError, match="no YAML"):
        profile.load(str(tmp_path / "x.yaml"))
    (tmp_path / "x.yaml").write_text("")
    with pytest.raises(ProfileError, match="got None"):
        profile.load(str(tmp_path / "x.yaml"))


def test_verdicts() -> None:
    # 11 tokens in 0.1 s and 1 s: TTFT 100 ms, 11 tokens/s for the user.
    summary = summarise([Record(0.0, tuple(0.1 * i for i in range(1, 12)), (1,) * 11)])
    targets = {
        "ttft_p95_ms": 100.1,
        "user_tokens_s": 9.9,
        "output_tokens_s": 11.0,
        "e2e_p50_ms": 900,
        "error_rate": 0,
    }
    verdicts = {v.target: v for v in judge(targets, summary)}
    assert [v.met for v in verdicts.values()] == [True, True, False, False, True]
    assert verdicts["output_tokens_s"].allowed == "at least 11"
    assert verdicts["e2e_p50_ms"].got == pytest.approx(1100)


def test_what_was_not_measured_is_missed() -> None:
    summary = summarise([Record(0.0, error="INTERNAL: x")])
    assert [v.met for v in judge({"ttft_p95_ms": 1e9, "error_rate": 0.5}, summary)] == [False, False]


@pytest.mark.parametrize("limit", range(70))
def test_the_search_finds_the_limit(limit: int) -> None:
    found = profile.parse(GOOD, "p")
    tried: dict[int, bool] = {}

    def holds(users: int) -> bool:
        assert users not in tried, "no load is measured twice"
        assert 1 <= users <= 64
        tried[users] = users <= limit
        return tried[users]

    search(found, holds)
    best = max((u for u, held in tried.items() if held), default=0)
    allowed = min(limit, 64)
    assert best <= allowed
    # Within an eighth, and exactly where loads are small.
    assert allowed - best <= max(0, best // 8)
    assert 8 in tried


def test_an_interrupted_search_ends() -> None:
    tried = []
    search(profile.parse(GOOD, "p"), lambda users: tried.append(users))
    assert tried == [8]


def test_other_users_than_the_profiles() -> None:
    found = with_users(profile.load("seeds"), 4)
    assert (found.least, found.wanted, found.most) == (1, 4, 8)
    with pytest.raises(ProfileError, match="got 0"):
        with_users(found, 0)
