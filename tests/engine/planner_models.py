"""Tiny random models for the planner's tests, and a program that asks a real engine for its numbers.

python planner_models.py FOLDER RANKS     prints JSON: blocks, block_tokens, parameter_bytes (one a rank)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SMALL = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 64,
}


def make(kind: str, folder: Path) -> None:
    """Weights are random: only their number and shape matter here."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
        Qwen3NextConfig,
    )

    configs: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**_SMALL),
        "qwen2 tied": lambda: Qwen2Config(**{**_SMALL, "tie_word_embeddings": True, "hidden_size": 256}),
        "qwen3": lambda: Qwen3Config(**_SMALL),
        "qwen3_moe": lambda: Qwen3MoeConfig(**_SMALL, **_EXPERTS),
        "qwen3_next": lambda: Qwen3NextConfig(**{**_SMALL, **_EXPERTS, **_LINEAR}),
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32)
    model.save_pretrained(folder)
    _tokenizer(PreTrainedTokenizerFast, folder)


def _tokenizer(tokenizer_class: Any, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world"], trainer)
    tokenizer_class(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def _parameter_bytes(worker: Any) -> int:
    """Of the model that vLLM makes on this rank, before a CPU repacks weights into memory of its own."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = worker.vllm_config
    # Layers register themselves by name; those of the running model keep theirs.
    context, config.compilation_config.static_forward_context = (
        config.compilation_config.static_forward_context,
        {},
    )
    try:
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            torch.device("meta"),
        ):
            model = initialize_model(vllm_config=config)
    finally:
        config.compilation_config.static_forward_context = context
    return sum(parameter.nbytes for parameter in model.parameters())


def main(folder: str, ranks: int, dtype: str) -> None:
    from vllm import LLM

    engine = LLM(
        folder,
        dtype=dtype,
        tensor_parallel_size=ranks,
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=True,
    )
    cache = engine.llm_engine.vllm_config.cache_config
    found = {
        "blocks": cache.num_gpu_blocks,
        "block_tokens": cache.block_size,
        "parameter_bytes": engine.collective_rpc(_parameter_bytes),
    }
    print("\n" + json.dumps(found), flush=True)


def models(pairs: list[str]) -> None:
    """Of vLLM's own models on one rank, made on no device. One with experts first: it makes the groups that they need."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    found = {}
    for number, pair in enumerate(pairs):
        folder, dtype = pair.rsplit("=", 1)
        config = EngineArgs(
            model=folder, dtype=dtype, enforce_eager=True, max_model_len=256
        ).create_engine_config()
        with set_current_vllm_config(config):
            if number == 0:
                store = f"file://{folder}/store"
                init_distributed_environment(1, 0, store, 0, "gloo")
                initialize_model_parallel(1)
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                model = initialize_model(vllm_config=config)
        found[folder] = sum(parameter.nbytes for parameter in model.parameters())
    print("\n" + json.dumps({"models": found}), flush=True)


if __name__ == "__main__":
    # By its name: the ranks look `_parameter_bytes` up in a module that they can import.
    import planner_models

    if sys.argv[1] == "models":
        planner_models.models(sys.argv[2:])
    else:
        planner_models.main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
