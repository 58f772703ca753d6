"""The plan: bytes on each rank by part, what is left for the KV cache, how many tokens and sequences that is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from voltriton.planner.cache import CacheShape, cache_shape
from voltriton.planner.cards import GIB, Cards
from voltriton.planner.files import ModelFiles, PlanError
from voltriton.planner.layout import (
    DENSE,
    EMBEDDINGS,
    EXPERTS,
    FLOAT32,
    TABLE,
    Weight,
    attention_heads,
    is_hybrid,
    weights,
)
from voltriton.planner.quantization import NVFP4_BYTES, quantized_names

# What ReVolta's profile reserves for captured graphs of the same kind of model on V100 (its measurement, not ours),
# beside the budget. vLLM 0.32 takes what it expects of them out of the budget: 0.04 GiB for Qwen3-8B on an H200
# (graphs of up to 16 sequences; tests/unit/recordings/planner-h200.json).
GRAPHS_GIB = 0.7


@dataclass(frozen=True)
class Request:
    """What is asked for; the names are vLLM's engine arguments where there is one."""

    cards: Cards
    max_model_len: int = 32768
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.90
    enforce_eager: bool = False
    dtype_bytes: int | None = None
    """Of a number in the engine's dtype; None: what the card's profile has."""
    kv_bytes: int | None = None
    cpu_kv_gib: float = 1.0
    lengths: tuple[int, ...] = (2048, 8192, 32768)
    quantize: bool = False
    """As if the checkpoint were converted to NVFP4 (an advice tries that)."""
    expand: bool = False
    """NVFP4 weights are expanded at load, as on a CPU without its kernel."""

    @property
    def number_bytes(self) -> int:
        return self.dtype_bytes or self.cards.card.dtype_bytes


@dataclass(frozen=True)
class Plan:
    request: Request
    known: bool
    """False: an architecture that is not known here; bytes come from the files' sizes alone."""
    ranks: int
    parts: dict[str, int]
    """Bytes on one rank: experts, dense, embeddings, buffers, activations, context."""
    host: dict[str, int]
    """Bytes in the host's memory, all ranks together (the n-gram table)."""
    budget: int
    """What vLLM may use of a card (gpu_memory_utilization), or the KV space on a CPU."""
    cache: CacheShape | None
    notes: tuple[str, ...] = field(default=())

    @property
    def weights(self) -> int:
        return sum(self.parts[name] for name in (EXPERTS, DENSE, EMBEDDINGS))

    @property
    def left(self) -> int:
        """For the KV cache; negative where not even the weights fit."""
        return self.budget - (sum(self.parts.values()) if self.request.cards.card.usable_gib else 0)

    @property
    def kv_tokens(self) -> int | None:
        return None if self.cache is None else self.cache.tokens(self.left)

    @property
    def fits(self) -> bool:
        """At least one sequence of max_model_len, which is what vLLM asks for at start."""
        if self.left <= 0 or self.outside < 0:
            return False
        return self.cache is None or self.cache.sequences(self.left, self.request.max_model_len) >= 1

    @property
    def outside(self) -> int:
        """What a card has beside the budget, less the graphs, which an older vLLM's profile run does not count."""
        card = self.request.cards.card
        return int(card.usable_gib * GIB) - self.budget - self.graphs if card.usable_gib else 0

    @property
    def graphs(self) -> int:
        return (
            0
            if self.request.enforce_eager or not self.request.cards.card.usable_gib
            else int(GRAPHS_GIB * GIB)
        )


def make_plan(files: ModelFiles, request: Request) -> Plan:
    layout = weights(files.config)
    if layout is None:
        return _unknown(files, request)
    _check_heads(files, request.cards.count)
    quantized = _quantized(files, layout, request)
    parts = dict.fromkeys((EXPERTS, DENSE, EMBEDDINGS), 0)
    for weight in layout:
        if weight.part != TABLE:
            parts[weight.part] += weight_bytes(weight, request, weight.name in quantized)
    parts |= {
        "buffers": _buffers(files, request),
        "activations": _activations(files, request),
        "context": _context(request),
    }
    shape = cache_shape(
        files.config,
        request.cards.count,
        request.number_bytes,
        request.cards.card.block_tokens,
        request.kv_bytes,
        # A CPU keeps the recurrent state in float32, whatever the model's dtype.
        None if request.cards.card.usable_gib else 4,
    )
    host = {TABLE: table} if (table := table_bytes(files, layout)) else {}
    return Plan(
        request,
        True,
        request.cards.count,
        parts,
        host,
        _budget(request),
        shape,
        tuple(_notes(files, quantized)),
    )


def weight_bytes(weight: Weight, request: Request, quantized: bool) -> int:
    rows, columns = weight.local_shape(request.cards.count)
    numbers = rows * columns * weight.count
    if quantized:
        if columns % 16:
            raise PlanError(
                f"{weight.name}: {columns} columns a rank; NVFP4 needs a multiple of 16: use fewer ranks"
            )
        return int(numbers * NVFP4_BYTES)
    return int(numbers * (4 if weight.stored == FLOAT32 else request.number_bytes))


def _quantized(files: ModelFiles, layout: list[Weight], request: Request) -> frozenset[str]:
    if request.expand:
        return frozenset()
    if request.quantize:
        return frozenset(w.name for w in layout if w.quantizable and w.part != EMBEDDINGS)
    return quantized_names(files, layout)


def table_bytes(files: ModelFiles, layout: list[Weight]) -> int:
    """In the checkpoint's own type (fp8, bf16 or NVFP4), from the headers where there are any."""
    found = sum(tensor.bytes for name, tensor in files.tensors.items() if "ngram_embedding" in name)
    if found:
        return found
    return sum(w.rows * w.columns * w.count * 2 for w in layout if w.part == TABLE)


def _check_heads(files: ModelFiles, ranks: int) -> None:
    heads, _, _ = attention_heads(files.config)
    if heads % ranks:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0 and n <= 16)
        raise PlanError(
            f"num_attention_heads is {heads}, which {ranks} ranks cannot share; possible: {allowed}"
        )


def _buffers(files: ModelFiles, request: Request) -> int:
    """The rotary table: cosine and sine for each position."""
    config = files.config
    _, _, size = attention_heads(config)
    rope = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    factor = float(
        config.values.get("partial_rotary_factor")
        or (rope.get("partial_rotary_factor") if isinstance(rope, dict) else 0)
        or 1
    )
    positions = config.number("max_position_embeddings", request.max_model_len)
    return int(positions * size * factor * request.number_bytes)


def _activations(files: ModelFiles, request: Request) -> int:
    """Peak of a step with max_num_batched_tokens: an estimate, checked on an H200 (docs/verification.md).

    Per token: the residual stream and its copies, the widest of attention and MLP intermediates, and for experts
    each token's top-k intermediates; and for each sequence its logits, in float32 twice (sampling).
    """
    config, ranks = files.config, request.cards.count
    hidden = config.number("hidden_size")
    heads, kv_heads, size = attention_heads(config)
    widest = (2 * heads + 2 * kv_heads) * size // ranks
    if config.values.get("num_experts"):
        chosen = config.number("num_experts_per_tok", 1)
        widest = max(widest, chosen * (3 * config.number("moe_intermediate_size") // ranks + hidden))
    else:
        widest = max(widest, 3 * config.number("intermediate_size") // ranks)
    if is_hybrid(config):
        widest = max(
            widest,
            4
            * config.number("linear_num_value_heads", 32)
            * config.number("linear_value_head_dim", 128)
            // ranks,
        )
    streams = config.number("hc_count", 1) or 1
    per_token = ((3 + streams) * hidden + widest) * request.number_bytes
    logits = request.max_num_seqs * config.number("vocab_size") * 8
    return request.max_num_batched_tokens * per_token + logits


def _context(request: Request) -> int:
    return int(request.cards.card.context_gib * GIB)


def _budget(request: Request) -> int:
    card = request.cards.card
    if not card.usable_gib:
        return int(request.cpu_kv_gib * GIB)
    return int(card.usable_gib * GIB * request.gpu_memory_utilization)


def _notes(files: ModelFiles, quantized: frozenset[str]) -> list[str]:
    notes = []
    if files.config.model_type.startswith("qwen4_exp"):
        notes.append("qwen4_exp: sizes follow vLLM 0.32's source; no such model was run for this")
    if files.config.has_vision:
        notes.append("the vision tower is left out (language_model_only)")
    if any("mtp." in name for name in files.tensors):
        notes.append("the MTP layer is left out (no speculative_config)")
    if quantized:
        notes.append(f"NVFP4: {', '.join(sorted(quantized))}")
    if not files.tensors:
        notes.append("no safetensors file here: shapes come from config.json")
    return notes


def _unknown(files: ModelFiles, request: Request) -> Plan:
    """Matrices cut evenly, vectors copied; no KV rule, so no tokens are promised."""
    if files.total_bytes is None:
        raise PlanError(
            f"{files.config.model_type} is not known here, and {files.folder} has no safetensors file or "
            "index to take sizes from"
        )
    ranks = request.cards.count
    if files.tensors:
        share = sum(
            tensor.bytes // (ranks if len(tensor.shape) > 1 else 1) for tensor in files.tensors.values()
        )
    else:
        share = files.total_bytes // ranks
    parts = {
        EXPERTS: 0,
        DENSE: share,
        EMBEDDINGS: 0,
        "buffers": 0,
        "activations": GIB,
        "context": _context(request),
    }
    note = (
        f"{files.config.model_type} is not known here: bytes by the files' sizes, cut evenly over "
        f"the ranks; activations "
        "a guess of 1 GiB; the KV cache is not planned"
    )
    return Plan(request, False, ranks, parts, {}, _budget(request), None, (note,))


def changed(request: Request, **values: object) -> Request:
    return replace(request, **values)  # type: ignore[arg-type]
