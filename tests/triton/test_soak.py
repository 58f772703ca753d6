"""The soak program against a server with the scripted engine: half a minute, or two.

Not part of `make test` yet: in two of six runs it found a request that Triton 24.10 answered wrongly while it was being
stopped or had just crashed, which is a fault to find (docs/operations.md), not one to let pass or to block on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serve import Serve
from server import fake_repository


@pytest.mark.parametrize(
    ("minutes", "clients"),
    [
        pytest.param(0.5, 16, marks=pytest.mark.slow),
        pytest.param(2, 64, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_soak(tmp_path: Path, minutes: float, clients: int) -> None:
    repository = fake_repository(tmp_path / "repository", {"restart_pause_s": 0.5}, max_num_seqs=64)
    report = tmp_path / "report.json"
    with Serve(repository, tmp_path, "--max-repairs=20", "--canary-interval-s=5") as serve:
        assert serve.process is not None
        done = subprocess.run(
            [sys.executable, "-m", "voltriton_perf.soak", f"--server={serve.grpc_url}",
             f"--metrics=127.0.0.1:{serve.metrics}", f"--server-pid={serve.process.pid}", f"--minutes={minutes}",
             f"--clients={clients}", "--kills=1", "--restarts=1", f"--report={report}"],
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    found = json.loads(report.read_text())
    assert (done.returncode, found["problems"]) == (0, []), done.stderr
    assert found["faults"] == ["kill", "restart"]
    assert len(found["repairs_s"]) == 2
    assert min(found["outcomes"][how] for how in ("whole", "streamed", "cancelled")) > 0
