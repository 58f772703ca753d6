"""Tokens/s that memory bandwidth alone allows in decode: an upper bound, without communication and launches."""

from __future__ import annotations

from dataclasses import dataclass

from voltriton.planner.files import ModelFiles
from voltriton.planner.layout import EXPERTS, weights
from voltriton.planner.memory import Plan, _quantized, weight_bytes

# Share of the data sheet's bandwidth that good kernels reach on V100 (0.80 to 0.88 published).
PRACTICAL = 0.85


@dataclass(frozen=True)
class Roofline:
    batch: int
    context: int
    bytes_per_step: int
    """Read on one rank: weights, KV cache, state."""
    tokens_per_s: float
    """All sequences together, at the data sheet's bandwidth."""

    @property
    def practical_tokens_per_s(self) -> float:
        return PRACTICAL * self.tokens_per_s


def roofline(files: ModelFiles, plan: Plan, batch: int, context: int) -> Roofline | None:
    """None for architectures that are not known here."""
    layout, request = weights(files.config), plan.request
    if layout is None or plan.cache is None:
        return None
    quantized = _quantized(files, layout, request)
    share = expert_share(files, batch)
    total = 0.0
    for weight in layout:
        size = weight_bytes(weight, request, weight.name in quantized)
        total += size if weight.every_step else size * share if weight.part == EXPERTS else 0
    limit = plan.cache.context_limit
    # A sparse layer still scans its index; that part is in token_bytes and small, so the window alone is counted.
    total += batch * plan.cache.token_bytes * (min(context, limit) if limit else context)
    total += batch * 2 * plan.cache.state_bytes
    seconds = total / (request.cards.card.bandwidth_gb_s * 1e9)
    return Roofline(batch, context, int(total), batch / seconds)


def expert_share(files: ModelFiles, batch: int) -> float:
    """Share of the experts that a step touches when each token chooses at random: 1 - (1 - k/E)^batch."""
    experts = files.config.number("num_experts", 0)
    if not experts:
        return 0.0
    chosen = min(files.config.number("num_experts_per_tok", 1), experts)
    return float(1 - (1 - chosen / experts) ** batch)
