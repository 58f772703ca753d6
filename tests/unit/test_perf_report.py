from __future__ import annotations

import html.parser
import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from voltriton_perf import compare, report, server_side, setup
from voltriton_perf.bench import Measured
from voltriton_perf.pa import Level
from voltriton_perf.profile import Verdict
from voltriton_perf.stats import Record
from voltriton_perf.svg import Series, plot, tick_step


def records(slow: float = 1.0, failed: int = 0) -> list[Record]:
    good = [Record(i, (i + 0.1 * slow, i + 0.2 * slow), (1, 2)) for i in range(10)]
    return good + [Record(1.0, error="UNAVAILABLE: <b>overloaded</b>")] * failed


def result(name: str = "a", slow: float = 1.0, **options: Any) -> dict[str, Any]:
    levels = [
        Measured(
            Level("concurrency", c, 12),
            "client",
            records(slow * c, failed=2),
            {"samples": [{"at_s": 0, "running": 1}]},
        )
        for c in (1, 4)
    ]
    broken = Measured(
        Level("concurrency", 8, 12), "client", [], {}, failed="perf_analyzer ended with status 99"
    )
    return {
        "format": "voltriton-sweep/1", "name": name, "complete": True, "notes": ["<i>note</i>"],
        "setup": {"commit": "abc", "versions": {"vllm": "0.32.0"}, "time": name}, "options": {"tokens": 3, **options},
        "levels": [m.as_dict() for m in [*levels, broken]],
        "verdicts": [asdict(Verdict("ttft_p95_ms", "at most 200", 150.0, True))],
    }  # fmt: skip


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = report.write(result(), tmp_path, "a")
    assert report.read(path) == json.loads(json.dumps(result()))


def test_the_page_needs_nothing_and_runs_nothing(tmp_path: Path) -> None:
    tags = Tags()
    tags.feed(report.html(result()))
    names = {tag for tag, _ in tags.seen}
    assert "svg" in names and "table" in names
    assert not names & {"script", "link", "img", "iframe", "b", "i"}  # and what came from outside is escaped
    assert not [a for _, attrs in tags.seen for a in attrs if a in ("src", "href")]


def test_partial_results_are_marked() -> None:
    data = result()
    data["complete"] = False
    page = report.html(data)
    assert "these results are partial" in page
    assert "perf_analyzer ended with status 99" in page
    cut = Measured(Level("concurrency", 1, 20), "client", records(), {}).as_dict()
    assert cut["partial"] is True


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Chromium lays it out offline: every plot has a size, nothing is written to the console."""
    report.write(result(), tmp_path, "a")
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000",
         f"--user-data-dir={tmp_path}/profile", f"--screenshot={tmp_path}/a.png", "--window-size=1200,2400",
         "--dump-dom", (tmp_path / "a.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout.count("<svg") == 9
    assert ":CONSOLE(" not in done.stderr
    assert (tmp_path / "a.png").stat().st_size > 50_000


def test_compare_has_ratios_and_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = report.write(result("a"), tmp_path, "a")
    b = report.write(result("b", slow=2.0, tokens=4), tmp_path, "b")
    page = tmp_path / "c.html"
    assert compare.main([str(a), str(b), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "200 (x2.00)" in shown.replace("│", "|")
    assert "options.tokens" in shown and "setup.time" not in shown
    assert "options.tokens" in page.read_text()


def test_compare_of_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = report.write(result("a"), tmp_path, "a")
    (tmp_path / "no.json").write_text("{}")
    assert compare.main([str(a), str(tmp_path / "no.json")]) == 1
    assert "no result of voltriton" in capsys.readouterr().err
    assert compare.main([str(a), str(tmp_path / "missing.json")]) == 1
    assert "missing.json: No such file" in capsys.readouterr().err
    other = result("b")
    other["levels"] = other["levels"][2:]
    b = report.write(other, tmp_path, "b")
    assert compare.main([str(a), str(b)]) == 1
    assert capsys.readouterr().err.strip().endswith("nothing to compare")
    with pytest.raises(SystemExit) as usage:
        compare.main([str(a)])
    assert usage.value.code == 2
    assert compare.main([str(a), str(a), "--html", str(tmp_path / "no" / "c.html")]) == 1
    assert capsys.readouterr().err.endswith("c.html: No such file or directory\n")


@pytest.mark.parametrize(
    "where", ["setup", "levels", "levels.0", "levels.0.mode", "levels.0.summary.ttft_ms"]
)
def test_compare_names_a_damaged_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    a = report.write(result("a"), tmp_path, "a")
    inside: Any = (damaged := json.loads(a.read_text()))
    *way, last = [int(word) if word.isdigit() else word for word in where.split(".")]
    for step in way:
        inside = inside[step]
    if where == "levels.0":
        inside[0] = 7
    else:
        del inside[last]
    (tmp_path / "b.json").write_text(json.dumps(damaged))
    assert compare.main([str(a), str(tmp_path / "b.json")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"voltriton compare: {tmp_path}/b.json: damaged: ") and err.count("\n") == 1


def test_a_place_that_cannot_be_written_is_known_before_anything_is_measured(tmp_path: Path) -> None:
    report.check_place(tmp_path / "new" / "folder", "sweep")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    with pytest.raises(report.ResultError, match=r"--out /proc/nope cannot be written .*: choose another"):
        report.check_place(Path("/proc/nope"), "sweep")
    with pytest.raises(report.ResultError, match="name: got 'a/b', allowed: a file's name without a folder"):
        report.check_place(tmp_path, "a/b")


def test_plots_of_one_point_and_of_none() -> None:
    assert "<circle" in plot("t", "x", "y", [Series("s", [(1.0, 0.0)])])
    assert plot("t <x>", "x", "y", [Series("s", [])]) == "<p>t &lt;x&gt;: nothing to show.</p>"


@pytest.mark.parametrize("span, step", [(1, 0.2), (5, 1), (7, 2), (24, 5), (26, 10), (0.0013, 0.0005)])
def test_ticks_are_round(span: float, step: float) -> None:
    assert tick_step(span) == pytest.approx(step)


def test_server_metrics_are_read_by_vllms_names() -> None:
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model="vllm",version="1"} 3
vllm:num_requests_running{model="vllm_2",version="1"} 2
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model="vllm"} 0.25
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total 7
# TYPE other gauge
other 1
"""
    assert server_side.read_samples(text) == {"running": 5.0, "kv_use": 0.25, "preemptions": 7.0}


def test_a_server_without_metrics_is_told_not_fatal() -> None:
    with server_side.Sampler("http://127.0.0.1:9/metrics", interval_s=0.05) as sampler:
        pass
    assert "127.0.0.1:9" in sampler.report()["problem"]


def test_the_setup_names_what_is_needed_to_reproduce(tmp_path: Path) -> None:
    found = setup.describe_setup(["voltriton", "sweep", "a b"], tmp_path)
    assert found["command"] == "voltriton sweep 'a b'"
    assert found["commit"] and len(found["commit"]) == 40
    assert len(found["patches_sha256"]) == 64
    assert found["hardware"]["cores"] >= 1 and "python" in found["versions"]


def test_the_model_hash_sees_content_names_and_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (5 << 20))
    first = setup.model_hash(tmp_path)
    with (tmp_path / "a").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"y")
    second = setup.model_hash(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({first, second, setup.model_hash(tmp_path)}) == 3
    assert setup.model_hash(tmp_path / "nothing") is None
