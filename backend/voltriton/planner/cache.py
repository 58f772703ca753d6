"""Bytes of the KV cache and the recurrent state on one rank, by the block rules of vLLM 0.32.

Attention layers share blocks of `block_tokens` tokens. In a hybrid model one state (GDN, convolution) takes a block of
its own, so vLLM raises the block's tokens until a block holds the largest state, pads the states to it, and makes
groups of as many layers as there are attention layers; a block number serves one layer of each group.
Source: Platform._align_hybrid_block_size and v1/core/kv_cache_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from voltriton.planner.files import Config
from voltriton.planner.layout import attention_heads, is_hybrid, linear_layers, local_heads

_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class CacheShape:
    block_tokens: int
    block_bytes: int
    """Of one block number: all layers of a group."""
    state_blocks: int
    """Block numbers that a sequence takes for its state, whatever its length."""
    token_bytes: float
    """Read for each token of context in a decode step, all attention layers."""
    state_bytes: int
    """Of one sequence without padding, all linear layers."""
    context_limit: int | None
    """Sparse attention reads at most this many tokens; None: all of them."""

    def tokens(self, available: int) -> int:
        return self.blocks(available) * self.block_tokens

    def blocks(self, available: int) -> int:
        return max(0, available) // self.block_bytes

    def sequences(self, available: int, length: int) -> int:
        """Sequences of `length` tokens at once; block 0 is never used."""
        need = -(-length // self.block_tokens) + self.state_blocks
        return max(0, self.blocks(available) - 1) // need


def e4m3_on_volta(config: Config) -> bool:
    """Whether a cache of e4m3 bytes is read there: by our attention kernels, not by Triton's, which qwen4_exp's are."""
    return not config.model_type.startswith("qwen4_exp")


def cache_shape(
    config: Config,
    ranks: int,
    dtype_bytes: int,
    block_tokens: int,
    kv_bytes: int | None = None,
    state_bytes: int | None = None,
) -> CacheShape:
    """`kv_bytes`: of one number in the cache where kv_cache_dtype is not auto; `state_bytes`: likewise of the state."""
    _, kv_heads, size = attention_heads(config)
    token = 2 * local_heads(kv_heads, ranks) * size * (kv_bytes or dtype_bytes)
    layers = config.number("num_hidden_layers")
    if not is_hybrid(config):
        return CacheShape(block_tokens, block_tokens * token * layers, 0, token * layers, 0, _window(config))
    linear = linear_layers(config)
    full = layers - linear
    state = gdn_state_bytes(config, ranks, dtype_bytes, state_bytes)
    largest = max(state, _short_conv_bytes(config, dtype_bytes))
    block = max(block_tokens, block_tokens * -(-largest // (block_tokens * token)))
    group = max(1, full)
    index = _index_token_bytes(config, kv_bytes or dtype_bytes)
    places = len(config.numbers("ple_layer_ids"))
    groups = -(-linear // group) + -(-places // group)
    return CacheShape(
        block_tokens=block,
        block_bytes=int(group * block * (token + index)),
        state_blocks=groups,
        token_bytes=(token + index) * full,
        state_bytes=state * linear,
        context_limit=config.number("indexer_budget", 0) or None,
    )


def gdn_state_bytes(config: Config, ranks: int, dtype_bytes: int, state_bytes: int | None = None) -> int:
    """One layer, one sequence: the convolution's last inputs and the recurrent matrix of each value head."""
    key_heads, value_heads = (
        config.number("linear_num_key_heads", 16),
        config.number("linear_num_value_heads", 32),
    )
    key_size, value_size = (
        config.number("linear_key_head_dim", 128),
        config.number("linear_value_head_dim", 128),
    )
    channels = (2 * key_heads * key_size + value_heads * value_size) // ranks
    # vLLM follows mamba_ssm_dtype for Qwen3.5 and Qwen4-Exp, not for Qwen3-Next.
    said = None if config.model_type == "qwen3_next" else config.values.get("mamba_ssm_dtype")
    recurrent = state_bytes or _DTYPES.get(str(said), dtype_bytes)
    matrix = value_heads // ranks * value_size * key_size * recurrent
    return channels * (config.number("linear_conv_kernel_dim", 4) - 1) * dtype_bytes + matrix


def _short_conv_bytes(config: Config, dtype_bytes: int) -> int:
    """The n-gram layer's dilated convolution (qwen4_exp), the same on every rank."""
    if not config.numbers("ple_layer_ids"):
        return 0
    length = (config.number("ple_conv_kernel_size", 4) - 1) * config.number("ngram_size", 3)
    return config.number("hc_count", 4) * config.number("hidden_size") * length * dtype_bytes


def _index_token_bytes(config: Config, dtype_bytes: int) -> float:
    """QSA's index keys: one for `indexer_compress_ratio` tokens."""
    if not config.number("indexer_n_heads", 0):
        return 0.0
    return config.number("indexer_head_dim") * dtype_bytes / config.number("indexer_compress_ratio", 1)


def _window(config: Config) -> int | None:
    return config.number("sliding_window", 0) or None if config.flag("use_sliding_window", False) else None
