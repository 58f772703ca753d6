"""perf_analyzer's real output: `perf_exports/` was written by 2.60.0 against a tritonserver with the scripted engine
(concurrency, rate), against a model that sends the final flag apart (apart), and by runs that failed (*.txt)."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from voltriton_perf import pa
from voltriton_perf.pa import AnalyzerError, Level
from voltriton_perf.stats import summarise

EXPORTS = Path(__file__).parent / "perf_exports"


def test_each_request_has_its_own_times_and_counts() -> None:
    records = pa.read_export(EXPORTS / "concurrency.json")
    assert len(records) == 6
    assert sorted(sum(r.tokens) for r in records) == [4, 4, 4, 6, 6, 6]
    assert all(r.sent_s < r.arrivals_s[0] <= r.arrivals_s[-1] for r in records)
    # The script's first token comes 20 + 5 ms after the request where it has 4 tokens, 5 ms otherwise.
    assert all(r.ttft_s >= 0.025 for r in records if sum(r.tokens) == 4)
    assert all(r.prompt_tokens for r in records)


def test_the_numbers_are_those_of_the_file() -> None:
    path = EXPORTS / "rate.json"
    requests = json.loads(path.read_text())["experiments"][0]["requests"]
    summary = summarise(pa.read_export(path))
    ttft = [(r["response_timestamps"][0] - r["timestamp"]) / 1e6 for r in requests]
    total = [(r["response_timestamps"][-1] - r["timestamp"]) / 1e6 for r in requests]
    # It was told 6 and sent 7, as it does with several threads.
    assert summary.requests == len(requests) == 7
    assert summary.output_tokens == sum(
        o["num_output_tokens"] for r in requests for o in r["response_outputs"]
    )
    assert summary.ttft_ms and summary.ttft_ms["mean"] == pytest.approx(sum(ttft) / 7, abs=1e-2)
    assert summary.e2e_ms and summary.e2e_ms["max"] == pytest.approx(max(total), abs=1e-2)


def test_a_final_flag_that_comes_alone_is_no_token() -> None:
    records = pa.read_export(EXPORTS / "apart.json")
    assert [r.tokens for r in records] == [(1, 1, 1), (1, 1, 1)]
    # The end is the last token's, not the flag's.
    assert summarise(records).output_tokens == 6


def test_an_empty_first_response_is_not_the_first_token(tmp_path: Path) -> None:
    data = json.loads((EXPORTS / "apart.json").read_text())
    request = data["experiments"][0]["requests"][0]
    first = request["response_timestamps"][0]
    empty = {**request["response_outputs"][0], "text_output": "", "num_output_tokens": 0}
    for name, value in empty.items():
        empty[name] = "" if isinstance(value, str) else value
    request["response_timestamps"].insert(0, (request["timestamp"] + first) // 2)
    request["response_outputs"].insert(0, empty)
    (tmp_path / "e.json").write_text(json.dumps(data))
    assert pa.read_export(tmp_path / "e.json") == pa.read_export(EXPORTS / "apart.json")


def test_garbage_in_the_numbers_of_an_empty_response(tmp_path: Path) -> None:
    data = json.loads((EXPORTS / "apart.json").read_text())
    for request in data["experiments"][0]["requests"]:
        request["response_outputs"][-1]["num_output_tokens"] = 4062429184
    (tmp_path / "e.json").write_text(json.dumps(data))
    assert summarise(pa.read_export(tmp_path / "e.json")).output_tokens == 6


def test_a_run_that_failed_is_told_in_its_own_words() -> None:
    assert pa.failure((EXPORTS / "failed.txt").read_text()) == (
        "Thread [1] had error: INTERNAL: RuntimeError: scripted fault"
    )
    assert "--request-count can not be less than concurrency" in pa.failure(
        (EXPORTS / "refused.txt").read_text()
    )
    assert pa.failure("") == "no output"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no profile export"),
        ("{}", "KeyError"),
        ('{"experiments": []}', "no request"),
        ('{"experiments": [{"requests": [{"timestamp": 1}]}]}', "no profile export"),
        ('{"experiments": 3}', "TypeError"),
    ],
)
def test_a_damaged_export(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(AnalyzerError, match=words):
        pa.read_export(tmp_path / "e.json")


def test_no_export() -> None:
    with pytest.raises(AnalyzerError, match="no export"):
        pa.read_export(Path("/nonexistent/e.json"))


def test_optional_inputs_only_where_the_model_takes_them() -> None:
    data = pa.input_data(["你好"], {"max_tokens": 3}, {"stream", "text_input"})
    assert data == {
        "data": [{"text_input": ["你好"], "sampling_parameters": ['{"max_tokens": 3}'], "stream": [True]}]
    }


def test_never_fewer_requests_than_perf_analyzer_takes() -> None:
    level = Level("rate", 12.5, 3)
    words = pa.options(level, "m", "h:1", Path("in"), Path("out"))
    assert words[words.index("--request-count") + 1] == "13"
    assert "--warmup-request-count" not in words  # with a rate it never ends


def test_a_server_that_goes_away_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """perf_analyzer itself waits for ever."""
    monkeypatch.setattr(pa, "LOOK_S", 0.1)
    tool: Any = SimpleNamespace(command=["sh", "-c", "sleep 60"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(AnalyzerError, match=r"did not end within 0\.5 s"):
            pa.run(tool, Level("concurrency", 1, 1), "m", address, {}, tmp_path, 0.5)
    with pytest.raises(AnalyzerError, match=f"the server went away: nothing listens at {address}"):
        pa.run(tool, Level("concurrency", 1, 1), "m", address, {}, tmp_path, 30.0)


def test_how_a_process_ended() -> None:
    assert pa.ending(99) == "status 99"
    assert pa.ending(-11) == "signal SIGSEGV"
