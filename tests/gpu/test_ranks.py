"""Ranks on GPUs of their own, through NCCL, on the code path of a V100: the answers of float32 and of one rank; a killed
rank ends the others and the stream. Sums over ranks round otherwise than in one, so tokens are compared where the
reference's choice is no near-tie (`reference.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

import test_engine_volta as volta  # noqa: E402
from test_engine_volta import models  # noqa: E402, F401  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
# (model, ranks, more arguments); the tiny qwen4_exp has two heads of Gated DeltaNet, so no four ranks
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3", 2, {"enforce_eager": False}),
    ("qwen3_moe", 2, {}),
    ("qwen4_exp", 2, {}),
    ("qwen3", 4, {}),
    ("qwen3_moe", 4, {"enforce_eager": False}),
]


def need(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")


def same(one: dict[str, Any], many: dict[str, Any]) -> float:
    pairs = [
        (a, b) for x, y in zip(one["tokens"], many["tokens"], strict=True) for a, b in zip(x, y, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.mark.parametrize(("arch", "ranks", "arguments"), CASES)
def test_ranks_agree(
    models: dict[str, Path],  # noqa: F811
    tmp_path: Path,
    arch: str,
    ranks: int,
    arguments: dict[str, Any],
) -> None:
    need(ranks)
    model = models[arch] / volta.LAYOUT[arch]
    shared = {"max_num_seqs": 8}
    many = volta.run_engine(model, tmp_path / "many.pt", shared | {"tensor_parallel_size": ranks} | arguments)
    assert "vLLM is using nccl" in (tmp_path / "many.log").read_text(), "vLLM's own communicator is left out"
    if arch != "qwen4_exp":
        one = volta.run_engine(model, tmp_path / "one.pt", shared)
        volta.report(f"{arch}, tokens of {ranks} ranks equal to those of one", f"{same(one, many):.3f}")
        assert same(one, many) > 0.5
    volta.check(f"{ranks} ranks", arch, models[arch] / "deq", many)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_ends_the_others_and_the_stream(
    models: dict[str, Path],  # noqa: F811
    tmp_path: Path,
    ranks: int,
) -> None:
    need(ranks)
    out = tmp_path / "killed.json"
    command = [
        sys.executable,
        str(Path(__file__).with_name("rank_killed.py")),
        str(models["qwen3"] / "mo_w4a4"),
        str(out),
        str(ranks),
    ]
    variables = {"VOLTRITON_FORCE_CAPABILITY": "7.0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | variables)
    (tmp_path / "killed.log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(out.read_text())
    volta.report(f"one of {ranks} ranks killed", json.dumps(found))
    assert found["error"], "the stream must end with an error"
    assert found["stream_ended_s"] < 15
    assert found["left"] == []
