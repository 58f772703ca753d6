"""NVFP4 checkpoints through the real engine on the CPU, against float32 on the dequantised weights.

The bound: float32 sums in another order differ by some 1e-5 at logits of standard deviation 1.3; any mistake
in a scale or a nibble is beyond 1e-2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_tiny
import pytest
import torch
from own_process import run_engine
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
BOUND = 1e-4


def run(kind: str, out: Path, arguments: dict[str, Any], *models: Path) -> subprocess.CompletedProcess[str]:
    program = str(HERE / "logits.py")
    command = [sys.executable, program, kind, str(out), json.dumps(arguments), *map(str, models)]
    return run_engine(command, 540)


def results(kind: str, out: Path, arguments: dict[str, Any], *models: Path) -> list[dict[str, Any]]:
    done = run(kind, out, arguments, *models)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: list[dict[str, Any]] = torch.load(out)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of the tiny models by name, and the reference of each."""
    root = tmp_path_factory.mktemp("tiny")
    folders = {
        "qwen3": make_tiny.make(root / "qwen3", "qwen3"),
        "qwen3_moe": make_tiny.make(root / "qwen3_moe", "qwen3_moe"),
        "qwen3_unequal": make_tiny.make(root / "qwen3_unequal", "qwen3", unequal=True),
        "qwen3_moe_unequal": make_tiny.make(root / "qwen3_moe_unequal", "qwen3_moe", unequal=True),
    }
    models = [folder / "deq" for folder in folders.values()]
    found = results("hf", root / "hf.pt", {}, *models)
    return folders, dict(zip(folders, found, strict=True))


def check(reference: dict[str, Any], found: dict[str, Any]) -> None:
    assert found["logits"].shape == reference["logits"].shape
    assert (found["logits"] - reference["logits"]).abs().max() < BOUND
    assert found["tokens"] == reference["tokens"]


ONE_RANK = [("qwen3", layout) for layout in make_tiny.LAYOUTS] + [
    ("qwen3_moe", "mo_w4a4"),
    ("qwen3_moe", "mo_w4a16"),
    ("qwen3_moe", "ct_w4a4"),
    ("qwen3_moe", "ct_w4a16"),
    ("qwen3_unequal", "mo_w4a4"),
    ("qwen3_unequal", "ct_w4a16"),
    ("qwen3_moe_unequal", "mo_w4a16"),
    ("qwen3_moe_unequal", "ct_w4a4"),
]


@pytest.fixture(scope="module")
def one_rank(tiny, tmp_path_factory):
    folders, _ = tiny
    out = tmp_path_factory.mktemp("out") / "tp1.pt"
    models = [folders[name] / layout for name, layout in ONE_RANK]
    return dict(zip(ONE_RANK, results("vllm", out, {"dtype": "float32"}, *models), strict=True))


@pytest.mark.parametrize(("name", "layout"), ONE_RANK)
def test_every_layout_gives_the_reference_logits(tiny, one_rank, name, layout):
    check(tiny[1][name], one_rank[name, layout])


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.05), ("bfloat16", 0.4)])
def test_sixteen_bit_activations(tiny, tmp_path, dtype, bound):
    """The 16-bit model itself differs from float32 by 0.012 (float16) and 0.11 (bfloat16) here."""
    folders, references = tiny
    (found,) = results("vllm", tmp_path / "16.pt", {"dtype": dtype}, folders["qwen3"] / "ct_w4a16")
    assert (found["logits"] - references["qwen3"]["logits"]).abs().max() < bound


@pytest.mark.parametrize(("name", "layout"), [("qwen3_unequal", "ct_w4a16"), ("qwen3_moe", "ct_w4a4")])
def test_two_ranks_agree_with_one(tiny, tmp_path, name, layout):
    folders, references = tiny
    arguments = {"dtype": "float32", "tensor_parallel_size": 2}
    (found,) = results("vllm", tmp_path / "tp2.pt", arguments, folders[name] / layout)
    check(references[name], found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("qwen3", "mo_w4a4"), ("qwen3_moe_unequal", "mo_w4a16")])
def test_four_ranks_agree_with_one(tiny, tmp_path, name, layout):
    folders, references = tiny
    arguments = {"dtype": "float32", "tensor_parallel_size": 4}
    (found,) = results("vllm", tmp_path / "tp4.pt", arguments, folders[name] / layout)
    check(references[name], found)


def refused(model: Path, out: Path, **arguments: Any) -> list[str]:
    """The lines in which a load was refused by us."""
    done = run("vllm", out, {"dtype": "float32"} | arguments, model)
    assert done.returncode != 0
    lines = (done.stdout + done.stderr).splitlines()
    found = [line for line in lines if "CheckpointError" in line]
    assert found, "\n".join(lines[-40:])
    return found


def test_a_missing_input_scale_refuses_the_load_by_its_name(tiny, tmp_path):
    source = tiny[0]["qwen3"] / "mo_w4a4"
    model = tmp_path / "model"
    model.mkdir()
    for file in source.glob("*.json"):
        (model / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.input_scale"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    lines = refused(model, tmp_path / "out.pt")
    assert any(
        "model.layers.1.self_attn.k_proj.input_scale: NVFP4 scale is missing" in line for line in lines
    )


def test_ranks_that_cut_a_scale_group_are_refused_with_layer_width_and_group(tmp_path):
    folder = make_tiny.make(tmp_path / "m", "qwen3", intermediate_size=48)
    lines = refused(folder / "ct_w4a16", tmp_path / "out.pt", tensor_parallel_size=2)
    assert any("model.layers.0.mlp.down_proj: input width 24 of this rank" in line for line in lines)
    assert "scale group 16" in lines[-1]
