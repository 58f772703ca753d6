"""Tiny model folders and GGUF files for the checkpoint tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SIZES,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LINEARS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}


def tiny_weights(
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, layers: int = 2
) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    weights = {"model.embed_tokens.weight": torch.randn(96, 64)}
    for i in range(layers):
        stem = f"model.layers.{i}."
        weights |= {f"{stem}{name}.weight": torch.randn(shape) * 0.1 for name, shape in LINEARS.items()}
        weights |= {f"{stem}{n}_layernorm.weight": torch.rand(64) + 0.5 for n in ("input", "post_attention")}
    weights["model.norm.weight"] = torch.rand(64) + 0.5
    return {name: w.to(dtype) for name, w in weights.items()}


def write_folder(
    path: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, Any] | None = None,
    tokenizer: bool = False,
) -> Path:
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if tokenizer:
        tiny_tokenizer().save_pretrained(path)
    return path


def tiny_tokenizer() -> Any:
    """Characters as tokens, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(c) for c in range(32, 124)]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "\n", *letters])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


MOE = {
    **SIZES,
    "initializer_range": 0.2,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
GDN = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}


def write_expert_folder(path: Path, arch: str) -> Path:
    """A random model with experts, `qwen3_moe` or `qwen3_next`, as transformers saves it."""
    import transformers

    torch.manual_seed(0)
    if arch == "qwen3_moe":
        model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE))
    else:
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**MOE, **GDN))
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
