"""The weights of the architectures that we know, as vLLM 0.32 holds them on one tensor-parallel rank.

A `Weight` stands for `count` equal matrices of shape [rows, columns] (a vector has one row). `cut` says what a rank
gets; the rules are vLLM's: vocabularies padded to 64 and cut by rows, key and value heads copied where there are
fewer heads than ranks, everything else cut evenly or copied whole. tests/engine/test_planner_exact.py compares
the sums with engines that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from voltriton.planner.files import Config, PlanError

EXPERTS, DENSE, EMBEDDINGS, TABLE = "experts", "dense", "embeddings", "n-gram table"
ROWS, COLUMNS, WHOLE, VOCABULARY, HEADS = "rows", "columns", "whole", "vocabulary", "key-value heads"
MODEL, FLOAT32 = "model", "float32"


@dataclass(frozen=True)
class Weight:
    name: str
    """As in the checkpoint, layer and expert numbers left out: `mlp.down_proj`."""
    part: str
    rows: int
    columns: int
    count: int
    cut: str = WHOLE
    stored: str = MODEL
    """MODEL: the engine's dtype (or NVFP4 where the checkpoint has it); FLOAT32: always that."""
    quantizable: bool = False
    heads: int = 0
    """HEADS: how many heads `rows` holds."""
    every_step: bool = True
    """Read in full in each decode step (experts and look-ups are not)."""

    def local_shape(self, ranks: int) -> tuple[int, int]:
        if self.cut == ROWS:
            return _divide(self.name, self.rows, ranks), self.columns
        if self.cut == COLUMNS:
            return self.rows, _divide(self.name, self.columns, ranks)
        if self.cut == VOCABULARY:
            return _divide(self.name, (self.rows + 63) // 64 * 64, ranks), self.columns
        if self.cut == HEADS:
            return self.rows // self.heads * local_heads(self.heads, ranks), self.columns
        return self.rows, self.columns


def local_heads(heads: int, ranks: int) -> int:
    """Key-value heads of a rank: with fewer heads than ranks each is held several times."""
    if heads >= ranks:
        return _divide("num_key_value_heads", heads, ranks)
    _divide("ranks by num_key_value_heads", ranks, heads)
    return 1


def _divide(name: str, value: int, ranks: int) -> int:
    if value % ranks:
        raise PlanError(
            f"{name}: {value} is not divisible by {ranks} ranks; another number of cards is needed"
        )
    return value // ranks


def attention_heads(config: Config) -> tuple[int, int, int]:
    heads = config.number("num_attention_heads")
    if not heads:
        raise PlanError("config.json: num_attention_heads: got 0, at least 1 is needed")
    return (
        heads,
        config.number("num_key_value_heads", heads),
        config.number("head_dim", config.number("hidden_size") // heads),
    )


def linear_layers(config: Config) -> int:
    """How many layers are linear attention (GDN)."""
    layers = config.number("num_hidden_layers")
    types = config.values.get("layer_types")
    if isinstance(types, list):
        return sum(kind == "linear_attention" for kind in types[:layers])
    return layers - layers // config.number("full_attention_interval", 4)


def _attention(config: Config, count: int, gated: bool, qk_norm: bool, bias: bool) -> Iterator[Weight]:
    heads, kv_heads, size = attention_heads(config)
    hidden = config.number("hidden_size")
    queries = heads * size * (2 if gated else 1)
    for name, rows, cut, number in (
        ("q_proj", queries, ROWS, 0),
        ("k_proj", kv_heads * size, HEADS, kv_heads),
        ("v_proj", kv_heads * size, HEADS, kv_heads),
    ):
        yield Weight(f"self_attn.{name}", DENSE, rows, hidden, count, cut, quantizable=True, heads=number)
        if bias:
            yield Weight(f"self_attn.{name}.bias", DENSE, rows, 1, count, cut, heads=number)
    yield Weight("self_attn.o_proj", DENSE, hidden, heads * size, count, COLUMNS, quantizable=True)
    if qk_norm:
        yield Weight("self_attn.q_norm", DENSE, 1, size, 2 * count)


def _linear_attention(config: Config, count: int) -> Iterator[Weight]:
    hidden = config.number("hidden_size")
    key_heads, value_heads = (
        config.number("linear_num_key_heads", 16),
        config.number("linear_num_value_heads", 32),
    )
    key_size, value_size = (
        config.number("linear_key_head_dim", 128),
        config.number("linear_value_head_dim", 128),
    )
    keys, values = key_heads * key_size, value_heads * value_size
    yield Weight(
        "linear_attn.in_proj_qkvz", DENSE, 2 * keys + 2 * values, hidden, count, ROWS, quantizable=True
    )
    yield Weight("linear_attn.in_proj_ba", DENSE, 2 * value_heads, hidden, count, ROWS, quantizable=True)
    yield Weight(
        "linear_attn.conv1d",
        DENSE,
        2 * keys + values,
        config.number("linear_conv_kernel_dim", 4),
        count,
        ROWS,
    )
    yield Weight("linear_attn.out_proj", DENSE, hidden, values, count, COLUMNS, quantizable=True)
    yield Weight("linear_attn.dt_bias", DENSE, value_heads, 1, count, ROWS)
    yield Weight("linear_attn.A_log", DENSE, value_heads, 1, count, ROWS, FLOAT32)
    yield Weight("linear_attn.norm", DENSE, 1, value_size, count)


def _mlp(config: Config, count: int, prefix: str = "mlp", width: int | None = None) -> Iterator[Weight]:
    hidden = config.number("hidden_size")
    width = config.number("intermediate_size") if width is None else width
    yield Weight(f"{prefix}.gate_proj", DENSE, width, hidden, count, ROWS, quantizable=True)
    yield Weight(f"{prefix}.up_proj", DENSE, width, hidden, count, ROWS, quantizable=True)
    yield Weight(f"{prefix}.down_proj", DENSE, hidden, width, count, COLUMNS, quantizable=True)


def _experts(config: Config, layers: int) -> Iterator[Weight]:
    hidden, width = config.number("hidden_size"), config.number("moe_intermediate_size")
    experts = config.number("num_experts")
    count = layers * experts
    for name, rows, columns, cut in (
        ("gate_proj", width, hidden, ROWS),
        ("up_proj", width, hidden, ROWS),
        ("down_proj", hidden, width, COLUMNS),
    ):
        yield Weight(
            f"mlp.experts.{name}", EXPERTS, rows, columns, count, cut, quantizable=True, every_step=False
        )
    yield Weight("mlp.gate", DENSE, experts, hidden, layers)


def _shared_expert(config: Config, layers: int) -> Iterator[Weight]:
    width = config.number("shared_expert_intermediate_size", 0)
    if width:
        yield from _mlp(config, layers, "mlp.shared_expert", width)
        yield Weight("mlp.shared_expert_gate", DENSE, 1, config.number("hidden_size"), layers)


def _ends(config: Config) -> Iterator[Weight]:
    hidden, vocabulary = config.number("hidden_size"), config.number("vocab_size")
    yield Weight(
        "embed_tokens",
        EMBEDDINGS,
        vocabulary,
        hidden,
        1,
        VOCABULARY,
        every_step=config.flag("tie_word_embeddings"),
    )
    if not config.flag("tie_word_embeddings"):
        yield Weight("lm_head", EMBEDDINGS, vocabulary, hidden, 1, VOCABULARY, quantizable=True)


def _norms(config: Config, layers: int) -> Iterator[Weight]:
    yield Weight("input_layernorm", DENSE, 1, config.number("hidden_size"), 2 * layers + 1)


def dense(config: Config) -> Iterator[Weight]:
    layers = config.number("num_hidden_layers")
    qk_norm = config.model_type == "qwen3"
    bias = config.flag("attention_bias", config.model_type == "qwen2")
    yield from _attention(config, layers, gated=False, qk_norm=qk_norm, bias=bias)
    yield from _mlp(config, layers)
    yield from _norms(config, layers)
    yield from _ends(config)


def moe_layers(config: Config) -> int:
    """Layers with experts; the others (mlp_only_layers, decoder_sparse_step) have a dense MLP."""
    layers, step = config.number("num_hidden_layers"), config.number("decoder_sparse_step", 1) or 1
    dense_ones = set(config.numbers("mlp_only_layers"))
    return sum((index + 1) % step == 0 and index not in dense_ones for index in range(layers))


def qwen3_moe(config: Config) -> Iterator[Weight]:
    layers, sparse = config.number("num_hidden_layers"), moe_layers(config)
    yield from _attention(config, layers, gated=False, qk_norm=True, bias=config.flag("attention_bias"))
    yield from _experts(config, sparse)
    if layers > sparse:
        yield from _mlp(config, layers - sparse)
    yield from _norms(config, layers)
    yield from _ends(config)


def hybrid(config: Config) -> Iterator[Weight]:
    """Qwen3-Next and Qwen3.5: gated attention in some layers, GDN in the others; experts or a dense MLP."""
    layers, linear = config.number("num_hidden_layers"), linear_layers(config)
    yield from _attention(
        config, layers - linear, gated=config.flag("attn_output_gate", True), qk_norm=True, bias=False
    )
    yield from _linear_attention(config, linear)
    if config.values.get("num_experts"):
        sparse = moe_layers(config)
        yield from _experts(config, sparse)
        yield from _shared_expert(config, sparse)
        if layers > sparse:
            yield from _mlp(config, layers - sparse)
    else:
        yield from _mlp(config, layers)
    yield from _norms(config, layers)
    yield from _ends(config)


def qwen4_exp(config: Config) -> Iterator[Weight]:
    """As hybrid, with hyper-connections in the place of the norms, an indexer, and n-gram tables on the host."""
    layers, linear = config.number("num_hidden_layers"), linear_layers(config)
    hidden, full = config.number("hidden_size"), layers - linear
    yield from _attention(config, full, gated=True, qk_norm=True, bias=False)
    yield from _linear_attention(config, linear)
    yield from _experts(config, layers)
    yield from _shared_expert(config, layers)
    if index_heads := config.number("indexer_n_heads", 0):
        size = config.number("indexer_head_dim")
        rows = (index_heads + config.number("indexer_kv_heads", 1)) * size
        yield Weight("self_attn.indexer.index_qk_proj", DENSE, rows, hidden, full)
        yield Weight("self_attn.indexer.q_layernorm", DENSE, 1, size, 2 * full)
    yield from _hyper_connections(config, 2 * layers)
    yield from _ngram(config)
    yield from _ends(config)


def _hyper_connections(config: Config, count: int) -> Iterator[Weight]:
    """Copied whole on every rank; the last mixer has no injection."""
    streams, rank = config.number("hc_count", 4), config.number("hc_lowrank", 320)
    width = streams * config.number("hidden_size")
    yield Weight("hyper_connection.input_mix_weight_down", DENSE, rank, width, count + 1)
    yield Weight("hyper_connection.input_mix_weight_up", DENSE, width, rank, count + 1)
    yield Weight("hyper_connection.block_inject_weight", DENSE, streams, width, count)
    yield Weight("hyper_connection.hc_norm", DENSE, 1, width, count + 1)


def _ngram(config: Config) -> Iterator[Weight]:
    """Each n-gram head has a prime number of rows just above the base; the sum is padded. Within a millionth."""
    places = len(config.numbers("ple_layer_ids"))
    if not places:
        return
    heads = (config.number("ngram_size", 3) - 1) * config.number("heads_per_ngram", 8)
    if not heads:
        raise PlanError("config.json: ple_layer_ids is set but ngram_size and heads_per_ngram give no head")
    embed, hidden = config.number("ple_embed_dim", config.number("hidden_size")), config.number("hidden_size")
    width = config.number("hc_count", 4) * hidden
    rows = heads * config.number("ngram_vocab_size_base", 20_000_000)
    yield Weight("ple.ngram_embedding", TABLE, rows, embed // heads, places, COLUMNS, every_step=False)
    yield Weight("ple.key_proj", DENSE, width, embed, places)
    yield Weight("ple.value_proj", DENSE, hidden, embed, places)
    yield Weight("ple.conv1d", DENSE, width, config.number("ple_conv_kernel_size", 4), places)
    yield Weight("ple.norm", DENSE, 1, width, 3 * places)


LAYOUTS: dict[str, Callable[[Config], Iterator[Weight]]] = {
    "llama": dense,
    "mistral": dense,
    "qwen2": dense,
    "qwen3": dense,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": hybrid,
    "qwen3_5": hybrid,
    "qwen3_5_text": hybrid,
    "qwen3_5_moe": hybrid,
    "qwen3_5_moe_text": hybrid,
    "qwen4_exp": qwen4_exp,
    "qwen4_exp_text": qwen4_exp,
}


def weights(config: Config) -> list[Weight] | None:
    """None for an architecture that is not known here."""
    function = LAYOUTS.get(config.model_type)
    return None if function is None else list(function(config))


def is_hybrid(config: Config) -> bool:
    return LAYOUTS.get(config.model_type) in (hybrid, qwen4_exp)
