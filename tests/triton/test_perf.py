"""Sweeps and SLA runs against a real tritonserver with the scripted engine, by both tools."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from server import Server, wait_for
from voltriton_perf import inputs, pa, sla, sweep
from voltriton_perf.bench import Bench, Service
from voltriton_perf.inputs import Shape
from voltriton_perf.load import Prompt
from voltriton_perf.pa import AnalyzerError, Level
from voltriton_perf.perf_analyzer import PerfAnalyzer, default_home
from voltriton_perf.stats import summarise

# Scripts sleep for what a token takes, so both tools should see these times and little more.
STEP_MS, FIRST_MS, TOKENS = 50, 150, 6
AGREE = 0.15


@pytest.fixture(scope="session")
def analyzer() -> PerfAnalyzer:
    found = PerfAnalyzer(default_home())
    if not found.there:
        pytest.skip("perf_analyzer is not laid out: python -m voltriton_perf.perf_analyzer")
    return found


def service(server: Server) -> Service:
    return Service(server.grpc_url, "vllm", f"http://127.0.0.1:{server.metrics}/metrics")


def script(**more: Any) -> Prompt:
    return Prompt(json.dumps({"repeat": ["tok ", TOKENS], "delay_ms": STEP_MS, "first_ms": FIRST_MS, **more}))


def test_both_tools_agree(server: Server, analyzer: PerfAnalyzer) -> None:
    """Within 15 % on TTFT, inter-token and end-to-end medians, exactly on counts; times are 50 ms and more, so that
    what a busy machine adds is small beside them."""
    level = Level("concurrency", 4, 16)
    by: dict[str, Any] = {}
    for name, tool in (("perf_analyzer", analyzer), ("client", None)):
        bench = Bench(service(server), {"max_tokens": 64}, 1, 60.0, tool)
        measured = bench.measure(level, [script()])
        assert (measured.tool, measured.failed, measured.notes) == (name, None, [])
        by[name] = summarise(measured.records)
    a, b = by["perf_analyzer"], by["client"]
    assert (a.requests, a.failed, a.output_tokens) == (b.requests, b.failed, b.output_tokens) == (16, 0, 96)
    assert a.ttft_ms["p50"] >= FIRST_MS + STEP_MS and a.itl_ms["p50"] >= STEP_MS
    for metric in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert getattr(a, metric)["p50"] == pytest.approx(getattr(b, metric)["p50"], rel=AGREE), metric
    assert a.output_tokens_s == pytest.approx(b.output_tokens_s, rel=AGREE)


def test_prompts_with_marks_of_json(server: Server, analyzer: PerfAnalyzer) -> None:
    """What is given to perf_analyzer is read by it, and its export by us, whatever the text is."""
    words = ['他说"聪明"\n', "a\\b\t", "{}[]:,", "👩‍🔬 Ünï"]
    bench = Bench(service(server), {"max_tokens": 64}, 1, 60.0, analyzer)
    measured = bench.measure(
        Level("concurrency", 2, 8), [Prompt(json.dumps({"tokens": words}, ensure_ascii=False))]
    )
    assert (measured.tool, measured.failed, measured.notes) == ("perf_analyzer", None, [])
    summary = summarise(measured.records)
    assert (summary.requests, summary.failed, summary.output_tokens) == (8, 0, 8 * len(words))


def test_what_perf_analyzer_cannot_go_on_with_is_counted_by_our_client(
    server: Server, analyzer: PerfAnalyzer
) -> None:
    bad = Prompt(json.dumps({"tokens": ["a", "b", "c"], "fail_at": 1}))
    bench = Bench(service(server), {}, 1, 60.0, analyzer)
    measured = bench.measure(Level("concurrency", 2, 12), [script(), bad])
    assert measured.tool == "client" and "scripted fault" in measured.notes[0]
    summary = summarise(measured.records)
    assert (summary.requests, summary.failed) == (12, 6)
    assert list(summary.errors) == ["INTERNAL: RuntimeError: scripted fault"]


def test_a_run_that_hangs_is_ended(server: Server, analyzer: PerfAnalyzer, tmp_path: Path) -> None:
    data = pa.input_data([script(first_ms=60_000).text], {}, service(server).inputs())
    began = time.monotonic()
    with pytest.raises(AnalyzerError, match="did not end within 2 s"):
        pa.run(analyzer, Level("concurrency", 1, 1), "vllm", server.grpc_url, data, tmp_path, 2.0)
    assert time.monotonic() - began < 10
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 20, "the request to be cancelled")


def test_the_server_counts_tokens(server: Server) -> None:
    count = inputs.server_counter(server.grpc_url, "vllm")
    prompts = inputs.make_prompts(Shape(17), 2, 1, count)
    assert [count(p) for p in prompts] == [17, 17]


def options(server: Server, folder: Path, *more: str) -> list[str]:
    metrics = f"http://127.0.0.1:{server.metrics}/metrics"
    return ["--server", server.grpc_url, "--metrics", metrics, "--out", str(folder), *more]


def test_a_sweep_writes_a_report(server: Server, tmp_path: Path) -> None:
    words = ["--concurrency", "1", "3", "--requests", "6", "--prompt-tokens", "9", "--output-tokens", "9"]
    assert sweep.main(options(server, tmp_path, *words, "--tool", "client", "--name", "s")) == 0
    data = json.loads((tmp_path / "s.json").read_text())
    assert data["complete"] and [level["value"] for level in data["levels"]] == [1, 3]
    for level in data["levels"]:
        assert level["summary"]["output_tokens"] == 54
        assert level["summary"]["prompt_tokens"]["min"] == level["summary"]["prompt_tokens"]["max"] == 9
        assert level["server"]["generation_tokens"] == 54  # the server's count and ours
    assert "<svg" in (tmp_path / "s.html").read_text()


def test_an_open_loop_by_our_client(server: Server, tmp_path: Path) -> None:
    words = ["--rate", "20", "--requests", "20", "--prompt-tokens", "4", "--output-tokens", "4"]
    assert sweep.main(options(server, tmp_path, *words, "--tool", "client")) == 0
    summary = json.loads((tmp_path / "sweep.json").read_text())["levels"][0]["summary"]
    assert summary["requests"] == 20 and 10 < summary["offered_s"] < 40


def test_when_every_request_fails(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--concurrency", "2", "--requests", "4", "--prompt-tokens", "4", "--sampling", '{"nonsense": 1}']
    assert sweep.main(options(server, tmp_path, *words, "--tool", "client")) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("voltriton sweep: concurrency 2: every request failed: INVALID_ARGUMENT:")
    level = json.loads((tmp_path / "sweep.json").read_text())["levels"][0]
    assert level["failed"] and level["summary"]["failed"] == 4


@pytest.mark.parametrize("model, words", [("nothing", "no model 'nothing'")])
def test_a_model_that_is_not_there(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, words: str
) -> None:
    for main in (sweep.main, sla.main):
        assert main(options(server, tmp_path, "--model", model)) == 1
        assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_keeps_what_is_done(
    server: Server, tmp_path: Path, number: signal.Signals
) -> None:
    words = [
        "--concurrency",
        "1",
        "2",
        "--requests",
        "3000",
        "--prompt-tokens",
        "12",
        "--output-tokens",
        "12",
    ]
    command = [
        sys.executable,
        "-m",
        "voltriton.cli",
        "sweep",
        *options(server, tmp_path, *words, "--tool", "client"),
    ]
    before = server.metric("vllm:generation_tokens_total")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        # Prompts are counted without generating: tokens come from the load alone.
        wait_for(lambda: server.metric("vllm:generation_tokens_total") > before + 200, 90, "load")
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert data["complete"] is False
    assert data["levels"][-1]["partial"] is True and data["levels"][-1]["summary"]["requests"] > 0
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 10, "the open requests to be cancelled")


def test_an_sla_run_gives_verdicts_and_an_exit_status(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "p.yaml"
    text = """
name: p
users: {{wanted: 2, least: 1, most: 4}}
requests_per_user: 2
mix:
  - {{share: 65, prompt_tokens: 4, output_tokens: 4}}
  - {{share: 35, prompt_tokens: 12, output_tokens: 6}}
targets: {{error_rate: 0, e2e_p95_ms: {limit}}}
"""
    profile.write_text(text.format(limit=60_000))
    assert sla.main(options(server, tmp_path, "--profile", str(profile))) == 0
    assert "highest load within the targets: 4 users; wanted: 2: PASSED" in capsys.readouterr().out
    profile.write_text(text.format(limit=0.001))
    assert sla.main(options(server, tmp_path, "--profile", str(profile))) == 1
    assert "highest load within the targets: 0 users; wanted: 2: FAILED" in capsys.readouterr().out
    data = json.loads((tmp_path / "sla-p.json").read_text())
    assert data["best_users"] == 0
    assert [v["met"] for v in data["verdicts"]] == [True, False]
    kinds = {level["value"]: level["summary"]["by_kind"] for level in data["levels"]}
    assert set(kinds[2]) <= {"prompt 4", "prompt 12"}


def test_a_profile_with_a_typing_error(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.yaml").write_text("name: x\nuser: {}\n")
    assert sla.main(options(server, tmp_path, "--profile", str(tmp_path / "p.yaml"))) == 1
    assert "unknown key 'user'; did you mean 'users'?" in capsys.readouterr().err
