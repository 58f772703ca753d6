"""The planner's weights against the parameters that transformers makes for the same configuration (on no device)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from voltriton.planner.files import read_config
from voltriton.planner.layout import TABLE, weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False,
}
DENSE = {key: value for key, value in SMALL.items() if "expert" not in key and "moe" not in key}
PLE = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_layer_ids": [1, 3],
    "ngram_vocab_size_base": 100_000,
    "eos_token_id": 1,
    "ple_embed_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
CASES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": SMALL,
    "qwen3_next": SMALL,
    "qwen3_5_text": DENSE,
    "qwen3_5_moe_text": SMALL,
    "qwen4_exp_text": SMALL | PLE,
}


@pytest.mark.parametrize("kind", CASES)
def test_as_many_numbers_as_transformers_has(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **CASES[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: parameter.numel() for name, parameter in model.named_parameters()}
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    layout = weights(read_config(tmp_path))
    assert layout is not None
    found = sum(weight.rows * weight.columns * weight.count for weight in layout if weight.part != TABLE)
    assert found == sum(number for name, number in expected.items() if "ngram_embedding" not in name)
    table = sum(weight.rows * weight.columns * weight.count for weight in layout if weight.part == TABLE)
    # Prime numbers of rows just above the base, and padding: more with this small base than with 20 million.
    assert table == pytest.approx(
        sum(number for name, number in expected.items() if "ngram_embedding" in name), rel=0.003
    )
