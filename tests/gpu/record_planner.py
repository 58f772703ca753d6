"""What vLLM says of its memory for whole models of made-up NVFP4 weights: the recording of tests/unit/test_planner_recorded.py.

    python tests/gpu/record_planner.py OUT.json [--only NAME ...]

One engine after another, each alone on the first card, on the code path of a V100 (capability 7.0, float16). Bytes and
blocks are as the worker holds them after its start; OUT.json is complete after every engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "backend"))
import end_to_end
from voltriton.settings import load_profile

ENVIRONMENT = {
    "VOLTRITON_FORCE_CAPABILITY": "7.0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ENGINE: dict[str, Any] = {
    "dtype": "float16",
    "enforce_eager": True,
    "max_model_len": 8192,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.9,
}
QWEN3_NEXT: dict[str, Any] = {
    **end_to_end.QWEN3,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
end_to_end.MODELS["Qwen3-Next-80B"] = QWEN3_NEXT
# Fewer layers: what a layer takes is the same.
end_to_end.MODELS["qwen4_exp of 16 layers"] = {**end_to_end.QWEN4_EXP, "num_hidden_layers": 16}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": load_profile("v100-tp4")["engine"]["compilation_config"],
    "gpu_memory_utilization": 0.22,  # about what a V100 has
}
# name -> model, arguments that differ
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B, graphs": ("Qwen3-8B", GRAPHS),
    "Qwen3-Next-80B": ("Qwen3-Next-80B", {}),
    "qwen4_exp of 16 layers": ("qwen4_exp of 16 layers", {}),
    "Qwen3-30B-A3B, graphs": ("Qwen3-30B-A3B", GRAPHS),
}


def child(folder: str, arguments: dict[str, Any]) -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
    from vllm import LLM

    end_to_end.register_loader()
    llm = LLM(folder, load_format="random_nvfp4", skip_tokenizer_init=True, **arguments)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model, cache = worker.get_model(), worker.vllm_config.cache_config
    found = {
        "blocks": cache.num_gpu_blocks,
        "block_tokens": cache.block_size,
        "parameter_bytes": sum(p.nbytes for p in model.parameters() if p.is_cuda),
        "buffer_bytes": sum(b.nbytes for b in model.buffers() if b.is_cuda),
        "host_bytes": sum(p.nbytes for p in model.parameters() if not p.is_cuda),
        "model_memory_usage": int(worker.model_runner.model_memory_usage),
        "requested": int(worker.requested_memory),
        "available": int(worker.available_kv_cache_memory_bytes),
        "peak_activation": int(worker.peak_activation_memory),
        "graphs_estimate": int(worker.cudagraph_memory_estimate),
        "total": int(worker.init_snapshot.total_memory),
    }
    channel.write(json.dumps(found) + "\n")
    channel.flush()


def record(name: str, logs: Path) -> dict[str, Any]:
    shape, different = RUNS[name]
    arguments = ENGINE | different
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        end_to_end.write_model(model, shape)
        began = time.monotonic()
        with (logs / f"{name.replace(', ', '-').replace(' ', '-')}.log").open("w") as log:
            command = [sys.executable, __file__, "--child", str(model), json.dumps(arguments)]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | ENVIRONMENT
            )
        run = {"name": name, "args": arguments, "config": json.loads((model / "config.json").read_text())}
        answers = done.stdout.splitlines()
        if done.returncode or not answers:
            return {**run, "failed": f"ended with status {done.returncode}, see the log"}
        print(f"{name}: {time.monotonic() - began:.0f} s, {answers[-1]}", flush=True)
        return {**run, **json.loads(answers[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], json.loads(args.child[1]))
        return 0
    runs = []
    for name in args.only:
        runs.append(record(name, args.out.parent))
        how = f"python tests/gpu/record_planner.py, {end_to_end.card()}, {time.strftime('%Y-%m-%d')}"
        args.out.write_text(json.dumps({"how": how, "runs": runs}, indent=1))
    return int(any("failed" in run for run in runs))


if __name__ == "__main__":
    sys.exit(main())
