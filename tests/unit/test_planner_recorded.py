"""The plan against what vLLM 0.32 said on an H200 (recordings/planner-h200.json, made by its `how`): within 3 %.

The run in NVFP4 has the graphs of the profile v100-tp4, and a budget like a V100's. tests/gpu/record_planner.py makes more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from voltriton.planner.cards import parse_cards
from voltriton.planner.files import read_model
from voltriton.planner.memory import Plan, Request, make_plan

RECORDED = json.loads((Path(__file__).parent / "recordings/planner-h200.json").read_text(encoding="utf-8"))
RUNS: dict[str, dict[str, Any]] = {run["name"]: run for run in RECORDED["runs"]}


def planned(run: dict[str, Any], folder: Path) -> Plan:
    (folder / "config.json").write_text(json.dumps(run["config"]))
    arguments = run["args"]
    request = Request(
        parse_cards("H200"),
        max_model_len=arguments["max_model_len"],
        max_num_seqs=arguments["max_num_seqs"],
        max_num_batched_tokens=arguments["max_num_batched_tokens"],
        gpu_memory_utilization=arguments["gpu_memory_utilization"],
        enforce_eager=arguments.get("enforce_eager", False),
    )
    return make_plan(read_model(folder), request)


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_exact(name: str, tmp_path: Path) -> None:
    """In NVFP4 but for the float32 factor that our kernels keep for each row of a matrix."""
    run = RUNS[name]
    part = 1e-3 if "quantization_config" in run["config"] else 0
    assert planned(run, tmp_path).weights == pytest.approx(run["parameter_bytes"], rel=part, abs=0)


@pytest.mark.parametrize("name", RUNS)
def test_cache_is_within_3_percent(name: str, tmp_path: Path) -> None:
    run, plan = RUNS[name], planned(RUNS[name], tmp_path)
    assert plan.cache is not None
    assert plan.cache.block_tokens == run["block_tokens"]
    assert plan.cache.blocks(run["available"]) == run["blocks"], "from vLLM's own bytes the blocks are exact"
    assert plan.cache.blocks(plan.left) == pytest.approx(run["blocks"], rel=0.03)
