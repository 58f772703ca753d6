"""The plan against vLLM's own numbers: bytes of the parameters on each rank, blocks of the KV cache, tokens a block."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import planner_models
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from own_process import run_engine
from voltriton.planner.cards import parse_cards
from voltriton.planner.files import read_model
from voltriton.planner.memory import Plan, Request, make_plan

# Two ranks for one model of each kind of cut: heads, experts, linear attention.
CASES = [
    ("llama", 2),
    ("qwen3_moe", 2),
    ("qwen3_next", 1),
    pytest.param("qwen2 tied", 1, marks=pytest.mark.slow),
    pytest.param("qwen3", 1, marks=pytest.mark.slow),
    pytest.param("qwen3_next", 2, marks=pytest.mark.slow),
]
BYTES = {"float32": 4, "bfloat16": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planner")


def run(*argv: str) -> str:
    """What `planner_models.py` prints, in a process of its own."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc sends a function to the ranks
        "OMP_NUM_THREADS": "1",
    }
    done = run_engine([sys.executable, planner_models.__file__, *argv], 900, environment)
    answers = [line for line in done.stdout.splitlines() if line.startswith(('{"blocks"', '{"models"'))]
    assert answers, done.stderr[-3000:]
    return answers[-1]


def folder_of(kind: str, models: Path) -> Path:
    folder = models / kind.replace(" ", "-")
    if not folder.exists():
        planner_models.make(kind, folder)
    return folder


def plan_of(folder: Path, ranks: int, dtype: str) -> Plan:
    request = Request(parse_cards(f"{ranks}xCPU"), max_model_len=256, dtype_bytes=BYTES[dtype])
    return make_plan(read_model(folder), request)


def dtype_of(kind: str) -> str:
    """GDN on a CPU takes bfloat16 only."""
    return "bfloat16" if kind == "qwen3_next" else "float32"


def test_weights_are_those_of_vllms_models(models: Path) -> None:
    """Without an engine: the models made on no device, one rank."""
    kinds = ["qwen3_next", "qwen3_moe", "qwen3", "llama", "qwen2 tied"]
    folders = {str(folder_of(kind, models)): dtype_of(kind) for kind in kinds}
    found = json.loads(run("models", *(f"{folder}={dtype}" for folder, dtype in folders.items())))["models"]
    assert found == {folder: plan_of(Path(folder), 1, dtype).weights for folder, dtype in folders.items()}


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_plan_is_exact(kind: str, ranks: int, models: Path) -> None:
    folder, dtype = folder_of(kind, models), dtype_of(kind)
    found = json.loads(run(str(folder), str(ranks), dtype))
    plan = plan_of(folder, ranks, dtype)
    assert plan.cache is not None
    assert found == {
        "parameter_bytes": [plan.weights] * ranks,
        "block_tokens": plan.cache.block_tokens,
        "blocks": plan.cache.blocks(plan.left),
    }
