"""GGUF metadata -> config.json, for the families whose every field is known here."""

from __future__ import annotations

from typing import Any

import transformers

from voltriton.checkpoint.errors import CheckpointError

# Tensor leaves of llama.cpp (gguf-py, constants.py) and of Hugging Face.
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
LAYER_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
# Gemma 3 repeats five layers of sliding attention and one of full attention; its files do not say so.
GEMMA_PATTERN = 6


def check_family(meta: dict[str, Any]) -> str:
    family = str(meta.get("general.architecture"))
    if family not in FAMILIES:
        raise CheckpointError(
            f"GGUF architecture {family!r} is not handled; handled are {', '.join(FAMILIES)}"
        )
    return family


def hf_name(name: str, family: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in TOP:
        return TOP[name]
    parts = name.split(".")
    table = LAYER | (LAYER_GEMMA if family == "gemma3" else {})
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in table:
        raise CheckpointError(f"GGUF tensor {name} is not known for architecture {family}")
    return f"model.layers.{parts[1]}.{table[parts[2]]}.{parts[3]}"


def config_of(
    meta: dict[str, Any], dtype: str, tied: bool, rope_factors: list[float] | None
) -> dict[str, Any]:
    """config.json of the family. `rope_factors`: the file's `rope_freqs.weight`, if it has one."""
    family = check_family(meta)
    try:
        config = _common(meta, family, dtype, tied)
    except KeyError as error:
        raise CheckpointError(f"the GGUF file does not state {error}") from None
    empty = [key for key in SIZES if config[key] < 1]
    if empty:
        raise CheckpointError(f"the GGUF file states {empty[0]} {config[empty[0]]}, which cannot be")
    theta = float(meta.get(f"{family}.rope.freq_base", 10000.0))
    if meta.get(f"{family}.rope.scaling.type") not in (None, "none"):
        raise CheckpointError(
            f"rope scaling {meta[f'{family}.rope.scaling.type']!r} of the GGUF file is not handled"
        )
    layers = config["num_hidden_layers"]
    return config | _OF_FAMILY[family](meta, layers, theta, rope_factors)


def _common(meta: dict[str, Any], family: str, dtype: str, tied: bool) -> dict[str, Any]:
    def get(key: str) -> Any:
        return meta[f"{family}.{key}"]

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    return {
        "hidden_size": hidden,
        "intermediate_size": int(get("feed_forward_length")),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get(f"{family}.attention.head_count_kv", heads)),
        "head_dim": int(meta.get(f"{family}.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.3g}"),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": tied,
        "dtype": dtype,
        "use_cache": True,
        # Without it transformers 5 suspects every local tokenizer of over 100,000 tokens of Mistral's broken
        # regex.
        "transformers_version": transformers.__version__,
    }


def _llama(meta: dict[str, Any], layers: int, theta: float, factors: list[float] | None) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": theta,
        "rope_scaling": None if factors is None else llama3_rope(factors),
    }


def llama3_rope(factors: list[float]) -> dict[str, Any]:
    """Llama 3.1's rope scaling from the factors that llama.cpp bakes into `rope_freqs.weight`.

    Their greatest is the scaling factor; the other three numbers are the same in every Llama 3.1-3.3 release.
    """
    return {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _qwen2(meta: dict[str, Any], layers: int, theta: float, factors: list[float] | None) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
    }


def _qwen3(meta: dict[str, Any], layers: int, theta: float, factors: list[float] | None) -> dict[str, Any]:
    own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    return _qwen2(meta, layers, theta, factors) | own


def _gemma3(meta: dict[str, Any], layers: int, theta: float, factors: list[float] | None) -> dict[str, Any]:
    kinds = ["full_attention" if (i + 1) % GEMMA_PATTERN == 0 else "sliding_attention" for i in range(layers)]
    # Facts of the family that the file does not state: local rope base 10000, query scale 1/sqrt(256), tanh
    # GELU, no soft caps (google/gemma_pytorch, config.py).
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.get("gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": 256,
        "attention_bias": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


_OF_FAMILY = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3": _gemma3}

# Ends of a turn or text in the chat formats of these families, by name, because a GGUF file states only one.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end_of_text|>")


def generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    eos = [meta.get("tokenizer.ggml.eos_token_id")]
    ids = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"]) if token in END_TOKENS}
    eos += [i for i in sorted(ids.values()) if i not in eos]
    return {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [i for i in eos if i is not None],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
