"""A checkpoint that leaves the range of float16 is refused at load by the layer's name; the switch, other types."""

from __future__ import annotations

import subprocess
from pathlib import Path

import make_tiny
import pytest
from test_engine_nvfp4 import results, run

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> Path:
    folder = make_tiny.make(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")
    return make_tiny.overflowing(folder / "mo_w4a16", folder / "overflowing")


def last_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    found = [line for line in (done.stdout + done.stderr).splitlines() if "CanaryError" in line]
    assert found, (done.stdout + done.stderr)[-3000:]
    return found[-1]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_load_is_refused_by_the_name_of_the_layer(overflowing, tmp_path, ranks):
    arguments = {"dtype": "float16", "tensor_parallel_size": ranks}
    line = last_error(run("vllm", tmp_path / "out.pt", arguments, overflowing))
    assert "not finite in float16" in line
    assert "first out of range: model.layers.1.mlp.down_proj (RowParallelLinear, inputs up to" in line
    assert "VOLTRITON_CANARY=off" in line


def test_with_torch_compile_too(overflowing, tmp_path):
    arguments = {"dtype": "float16", "enforce_eager": False}
    line = last_error(run("vllm", tmp_path / "out.pt", arguments, overflowing))
    assert "model.layers.1.mlp.down_proj" in line


def test_a_wider_type_loads_and_the_switch_lets_it_pass(overflowing, tmp_path, monkeypatch):
    assert run("vllm", tmp_path / "32.pt", {"dtype": "float32"}, overflowing).returncode == 0
    monkeypatch.setenv("VOLTRITON_CANARY", "off")
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    [found] = results(
        "vllm", tmp_path / "16.pt", {"dtype": "float16", "disable_log_stats": False}, overflowing
    )
    assert found["corrupted"] == len(found["tokens"]), "what the alert NotFinite counts"


def test_a_wrong_setting_is_refused(monkeypatch):
    from voltriton_vllm import canary

    monkeypatch.setenv("VOLTRITON_CANARY", "maybe")
    with pytest.raises(ValueError, match="VOLTRITON_CANARY: got 'maybe', allowed: auto, on, off"):
        canary.check(None)
