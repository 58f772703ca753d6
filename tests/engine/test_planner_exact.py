"""The plan against vLLM's own numbers: bytes of the parameters on each rank, blocks of the KV cache, tokens a block."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import planner_models
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from voltriton.planner.cards import parse_cards
from voltriton.planner.files import read_model
from voltriton.planner.memory import Request, make_plan

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


def engine_numbers(folder: Path, ranks: int, dtype: str) -> dict[str, Any]:
    """Of an engine in a process of its own, with a KV cache of 1 GiB a rank."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model sends a function to the ranks
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, planner_models.__file__, str(folder), str(ranks), dtype],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"blocks"')]
    assert answers, done.stderr[-3000:]
    return json.loads(answers[-1])


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_plan_is_exact(kind: str, ranks: int, models: Path) -> None:
    folder = models / kind.replace(" ", "-")
    if not folder.exists():
        planner_models.make(kind, folder)
    # GDN on a CPU takes bfloat16 only.
    dtype = "bfloat16" if kind == "qwen3_next" else "float32"
    found = engine_numbers(folder, ranks, dtype)
    cards = parse_cards(f"{ranks}xCPU")
    request = Request(cards, max_model_len=256, dtype_bytes=BYTES[dtype])
    plan = make_plan(read_model(folder), request)
    assert plan.cache is not None
    assert {
        "parameter_bytes": [plan.weights] * ranks,
        "block_tokens": plan.cache.block_tokens,
        "blocks": plan.cache.blocks(plan.left),
    } == found
