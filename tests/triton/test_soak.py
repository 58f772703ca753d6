"""The soak program's short form, two minutes of 64 clients, against a server with the scripted engine.

One death of tritonserver amid cancellations is let pass, counted and with its evidence (see the program): a fault of
Triton 24.10 that a backend cannot keep from happening. Anything else fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serve import Serve
from server import fake_repository
from voltriton.supervisor import state_file
from voltriton.triton import default_root


@pytest.mark.timeout(600)
def test_soak(tmp_path: Path) -> None:
    repository = fake_repository(tmp_path / "repository", {"restart_pause_s": 0.5}, max_num_seqs=64)
    report = tmp_path / "report.json"
    with Serve(repository, tmp_path, "--max-repairs=20", "--canary-interval-s=5") as serve:
        assert serve.process is not None
        done = subprocess.run(
            [sys.executable, "-m", "voltriton_perf.soak", f"--server={serve.grpc_url}",
             f"--metrics=127.0.0.1:{serve.metrics}", f"--server-pid={serve.process.pid}", "--minutes=2",
             "--clients=64", "--kills=1", "--restarts=1", f"--report={report}",
             f"--state={state_file(default_root(), serve.http)}", "--triton-faults=1"],
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    found = json.loads(report.read_text())
    print(done.stderr, found["triton_faults"])
    assert (done.returncode, found["problems"]) == (0, []), done.stderr
    assert found["faults"] == ["kill", "restart"]
    assert len(found["repairs_s"]) == 2
    assert min(found["outcomes"][how] for how in ("whole", "streamed", "cancelled")) > 0
