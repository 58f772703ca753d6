from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from voltriton_perf import peers, perf_analyzer, proc, targets
from voltriton_perf.closed_loop import Load, Plan
from voltriton_perf.perf_analyzer import FetchError
from voltriton_perf.targets import TargetError


class Instant:
    """A connection whose tokens come two in a message."""

    async def run(self, prompt: str, tokens: int) -> list[float]:
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(0)
        return [start + 0.001 * i for i in range(1, tokens // 2 + 1)]

    async def close(self) -> None:
        pass


def test_a_load_counts_tokens_and_messages() -> None:
    async def connect() -> Instant:
        return Instant()

    import os

    row = asyncio.run(Load(Plan(streams=3, requests=2, tokens=8, seed=1)).run(connect, os.getpid()))
    assert row["tokens"] == 48 and row["tokens_message"] == 2.0
    assert row["gap_p95_ms"] == pytest.approx(1.0, abs=0.01)
    assert row["engine_us_token"] == 0


def row(target: str, turn: int, tok_s: float, ttft: float = 10.0) -> dict[str, Any]:
    return {
        "target": target, "round": turn, "words": 6, "streams": 32, "tok_s": tok_s, "ttft_mean_ms": ttft,
        "ttft_p95_ms": 20.0, "tpot_mean_ms": 5.0, "gap_p95_ms": 6.0, "tokens_message": 1.0, "front_us_token": 100,
        "load1": 1.0,
    }  # fmt: skip


def test_ratios_are_of_best_rounds_and_inside_rounds() -> None:
    rows = [row("in-process", 0, 1000), row("in-process", 1, 500), row("voltriton-grpc", 0, 900, 15.0)]
    rows.append(row("voltriton-grpc", 1, 400, 12.0))
    text = peers.table(rows)
    line = next(part for part in text.splitlines() if "voltriton-grpc" in part)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[4:7] == ["650 [900]", "0.90", "0.85 (0.80..0.90)"]
    assert cells[-1] == "1.20"


def test_engine_arguments_as_options() -> None:
    words = targets.options_of(
        {"model": "m", "enforce_eager": True, "enable_prefix_caching": False, "x": {"a": 1}}
    )
    assert words == ["--model", "m", "--enforce-eager", "--no-enable-prefix-caching", "--x", '{"a": 1}']


def test_several_models_of_one_server(tmp_path: Path) -> None:
    names = targets.write_repository(tmp_path / "r", {"model": "m"}, {"A": "b"}, 3, {"sender_threads": 1})
    assert names == ["vllm", "vllm_2", "vllm_3"]
    model = json.loads((tmp_path / "r" / "vllm_3" / "1" / "model.json").read_text())
    assert model == {"model": "m", "voltriton": {"env": {"A": "b"}, "sender_threads": 1}}


def test_a_server_of_somebody_elses(tmp_path: Path) -> None:
    (target,) = targets.extra(tmp_path, "official:vllm_model=run --grpc {grpc_port} --http {http_port}", {})
    assert target.kind == "grpc" and target.models == ["vllm_model"]
    assert target.process.command[2] == target.address.rpartition(":")[2]
    (other,) = targets.extra(tmp_path, "x=serve {http_port} {engine_args}", {"a": 1})
    assert other.kind == "openai" and other.process.command[2] == '{"a": 1}'
    with pytest.raises(TargetError, match="allowed: NAME=COMMAND"):
        targets.extra(tmp_path, "x=serve", {})


def test_a_server_that_does_not_start_is_told_by_its_last_line(tmp_path: Path) -> None:
    process = targets.Process("x", ["sh", "-c", "echo reason; exit 3"], "127.0.0.1:9", tmp_path)
    with pytest.raises(TargetError, match="x ended with status 3 while starting: reason"):
        process.start()
    process.stop()


def test_unknown_targets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--targets", "in-process,nothing"]) == 1
    assert "got 'nothing', allowed: in-process" in capsys.readouterr().err


def test_a_process_tree_is_named_and_measured() -> None:
    import os

    pids = proc.tree(os.getpid())
    assert pids[0] == os.getpid()
    assert sum(proc.cpu_s(pids).values()) > 0
    assert proc.pss_mib(pids) > 1
    assert proc.cpu_s([2**22 + 1]) == {}


def test_the_mirror_is_the_systems_own(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(
        "deb http://security.example/debian-security bookworm-security main\n"
        "deb [signed-by=/k] http://mirror.example/debian bookworm main\n"
    )
    assert perf_analyzer.mirror(tmp_path) == "http://mirror.example/debian"
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "debian.sources").write_text(
        "Types: deb\nURIs: http://new.example/debian\n"
    )
    assert perf_analyzer.mirror(tmp_path) == "http://new.example/debian"


def test_where_perf_analyzer_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FetchError, match="no Debian mirror"):
        perf_analyzer.mirror(tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert perf_analyzer.main(["--home", str(tmp_path / "pa")]) == 1
    assert "x86_64 Linux only, this is aarch64" in capsys.readouterr().err
