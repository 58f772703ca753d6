"""Tiny random NVFP4 models through vLLM on the code path of a V100, against float32 on dequantised weights.

Capability forced to 7.0, float16, the sm_70 kernels; where vLLM has no compiled extensions, their operators come from
the plugin. The reference runs over the tokens that the engine chose, so that one near-tie does not spoil what follows.

Where a router's choice between two experts is closer than float16 resolves, the token may go to the other one, and it
and what attends to it differ by far more than rounding: the bound on the largest difference holds for the positions
before the first such token of a sequence, that on the mean for all. FLOAT16 is what Hugging Face's own float16 model on
a CPU gives over the same prompts; the engine is allowed twice that.
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
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/engine"))
import logits as program  # noqa: E402
import make_tiny  # noqa: E402
import reference  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

# Decoding of one, two and more rows, prefill of few and many (64 is where the kernels change), pages of the cache.
PROMPTS = [
    *program.PROMPTS,
    " ".join(["hello tokenizer this is a test of the world"] * 12),
    "once more with feeling, a zebra",
]
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "qwen3_moe": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128},
    "qwen3_next": {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 256},
    "qwen4_exp": {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 256},
}
LAYOUT = {"qwen3": "mo_w4a4", "qwen3_moe": "ct_w4a16", "qwen3_next": "mo_w4a16", "qwen4_exp": "mo_w4a4"}
# (largest difference before a near-tie, mean of all)
FLOAT16 = {
    "qwen3": (1.4e-2, 2.0e-3),
    "qwen3_moe": (0.9e-2, 6.2e-3),
    "qwen3_next": (9.3e-2, 7.3e-3),
    "qwen4_exp": (1.4e-2, 2.2e-2),
}
# What is a near-tie where it is not reference.NEAR: a recurrent state carries float16's error on.
NEAR = {"qwen3_next": 0.02}
ENGINE: dict[str, Any] = {
    "dtype": "float16",
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 29,
}
# The kernels of a step depend on how many sequences decode: one, two, or all six (padded to eight in a graph).
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"max_num_seqs": 8},
    "graphs": {"max_num_seqs": 1, "enforce_eager": False},
    "own attention": {"max_num_seqs": 2},
    "own attention, graphs": {
        "max_num_seqs": 8,
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    },
}


class Models(dict[str, Path]):
    """Made when they are first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, arch: str) -> Path:
        self[arch] = make_tiny.make(self._root / arch, arch, **SIZES[arch])
        return self[arch]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Models(tmp_path_factory.mktemp("tiny"))


FORCED = {"VOLTRITON_FORCE_CAPABILITY": "7.0"}


def start(
    model: Path, out: Path, arguments: dict[str, Any], **environment: str
) -> subprocess.CompletedProcess[str]:
    """`logits.py vllm`; what it and the engine print is kept beside `out`."""
    arguments = ENGINE | arguments | {"prompts": PROMPTS}
    command = [sys.executable, str(ROOT / "tests/engine/logits.py"), "vllm", str(out), json.dumps(arguments)]
    variables = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | environment
    done = subprocess.run(
        [*command, str(model)], capture_output=True, text=True, timeout=380, env=os.environ | variables
    )
    (out.parent / f"{out.stem}.log").write_text(done.stdout + done.stderr)
    return done


def run_engine(model: Path, out: Path, arguments: dict[str, Any], **environment: str) -> dict[str, Any]:
    done = start(model, out, arguments, **(FORCED | environment))
    assert "capability is taken to be 7.0" in done.stdout + done.stderr
    return result(done, out)


def result(done: subprocess.CompletedProcess[str], out: Path) -> dict[str, Any]:
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: dict[str, Any] = torch.load(out)[0]
    return found


def check(case: str, arch: str, numbers: Path, found: dict[str, Any], all_positions: bool = True) -> None:
    """`numbers`: a folder of the dequantised weights. `all_positions`: hold the mean of all to its bound too."""
    compared = reference.compare(numbers, PROMPTS, found, near=NEAR.get(arch, reference.NEAR))
    report(f"{arch}, {case}", compared)
    largest, mean = FLOAT16[arch]
    assert compared.finite
    assert compared.decided >= 10, "positions that can be held to the bound"
    assert compared.largest_decided < 2 * largest
    assert not all_positions or compared.mean < 2 * mean
    assert compared.same_choice_decided == 1.0


def report(case: str, found: object) -> None:
    line = f"{case}: {found}"
    print(line)
    if target := os.environ.get("VOLTRITON_TEST_REPORT"):
        with open(target, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(line + "\n")


@pytest.mark.parametrize("arch", list(SIZES))
@pytest.mark.parametrize("way", list(WAYS))
def test_model_on_the_path_of_a_v100(models: dict[str, Path], tmp_path: Path, arch: str, way: str) -> None:
    if arch == "qwen4_exp" and "own attention" in way:
        pytest.skip("its attention is sparse: vLLM's own kernel")
    environment = {"VOLTRITON_ATTENTION": "sm70" if "own attention" in way else "triton"}
    model = models[arch] / LAYOUT[arch]
    found = run_engine(model, tmp_path / "found.pt", WAYS[way], **environment)
    check(way, arch, models[arch] / "deq", found)


# Over what FLOAT16 allows: a key or value between two e4m3 values may be rounded to the other one, an eighth away.
E4M3_TIES = 4


@pytest.mark.parametrize("way", ["own attention", "own attention, graphs"])
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "qwen3_next"])
def test_a_cache_of_e4m3_bytes(models: dict[str, Path], tmp_path: Path, arch: str, way: str) -> None:
    """The reference rounds keys and values likewise; without that it is another model, by far more than the bound."""
    model, numbers = models[arch] / LAYOUT[arch], models[arch] / "deq"
    arguments = WAYS[way] | {"kv_cache_dtype": "fp8"}
    found = run_engine(model, tmp_path / "found.pt", arguments, VOLTRITON_ATTENTION="sm70")
    compared = reference.compare(numbers, PROMPTS, found, e4m3_cache=True)
    without = reference.compare(numbers, PROMPTS, found)
    report(f"{arch}, e4m3 cache, {way}", compared)
    report(f"{arch}, e4m3 cache, {way}, reference with an exact one", without)
    assert compared.finite
    assert compared.decided >= 10, "positions that can be held to the bound"
    assert compared.mean < 2 * FLOAT16[arch][1] * E4M3_TIES
    assert compared.mean < without.mean, "the bytes must have been used"


def test_a_cache_of_fp8_that_triton_would_read_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["qwen4_exp"] / LAYOUT["qwen4_exp"]
    done = start(model, tmp_path / "out.pt", {"kv_cache_dtype": "fp8"}, **FORCED)
    assert done.returncode != 0
    assert "kv_cache_dtype: got 'fp8' on compute capability" in done.stdout + done.stderr


# In the graphs of the second way the test prompt's tokens have one of their own; the third is the profile of a V100 box.
OVERFLOWING: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled, graphs": {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 64]},
    },
    "graphs": {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    },
}


@pytest.mark.parametrize("way", list(OVERFLOWING))
def test_an_activation_beyond_float16_refuses_the_load(
    models: dict[str, Path], tmp_path: Path, way: str
) -> None:
    model = make_tiny.overflowing(models["qwen3"] / LAYOUT["qwen3"], tmp_path / "overflowing")
    done = start(model, tmp_path / "out.pt", OVERFLOWING[way] | {"max_num_seqs": 64}, **FORCED)
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "CanaryError" in line]
    assert lines, (done.stdout + done.stderr)[-6000:]
    report(f"qwen3 beyond float16, {way}", lines[-1])
    assert "first out of range: model.layers.1.mlp.down_proj (RowParallelLinear, inputs up to" in lines[-1]
