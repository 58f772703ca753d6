"""Block scales: from the largest magnitude, or the candidate of least (weighted) squared error."""

from __future__ import annotations

import torch

from voltriton.checkpoint.codec import E4M3_MAX, Rule, blocks_of

# E4M3 codes tried around the one that maps the block's maximum to 6. Going down clips the maximum; four steps
# up, about a factor of 1.5, map it to 4 instead of 6 ("four over six"), where E2M1 is denser.
BELOW, ABOVE = 8, 6
SEARCH_BLOCKS = 1 << 15  # 2 MB of float32 at a time: stays in the cache


def rounded(scaled: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 values of `scaled`, float32, ties to even, by fewer steps than through the codes.

    E2M1's step is half the power of two below a value, within 0.5 and 2; the bits of a float32's exponent alone
    are that power, and dividing by it is exact.
    """
    power = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp_(1.0, 4.0).mul_(0.5)
    return (scaled / step).round_().mul_(step).clamp_(-6.0, 6.0)


def max_scales(weight: torch.Tensor, global_scale: torch.Tensor, rule: Rule) -> torch.Tensor:
    """E4M3 [rows, columns / 16]: the block's largest magnitude becomes 6."""
    return rule.block_scale(blocks_of(weight).abs().amax(-1), global_scale)


def searched_scales(
    weight: torch.Tensor, global_scale: torch.Tensor, rule: Rule, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """E4M3 [rows, columns / 16] of least sum of importance * error^2; `importance` [columns], default 1."""
    base = max_scales(weight, global_scale, rule)
    blocks = blocks_of(weight)
    if importance is None:
        importance = torch.ones(weight.shape[1])
    wide = blocks_of(importance).expand(blocks.shape).reshape(-1, blocks.shape[-1])
    flat, start = blocks.reshape(-1, blocks.shape[-1]), base.view(torch.uint8).reshape(-1)
    best = torch.empty_like(start)
    for begin in range(0, len(flat), SEARCH_BLOCKS):
        part = slice(begin, begin + SEARCH_BLOCKS)
        best[part] = _search(flat[part], start[part], wide[part], global_scale, rule)
    # A block of zeros has no error under any scale: keep the layout's own choice.
    best = torch.where(flat.abs().amax(-1) == 0, start, best)
    return best.view(torch.float8_e4m3fn).reshape(base.shape)


def _search(
    blocks: torch.Tensor,
    start: torch.Tensor,
    importance: torch.Tensor,
    global_scale: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    top = torch.tensor(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).item()
    least = torch.full((blocks.shape[0],), torch.inf)
    best = start.clone()
    for offset in sorted(range(-BELOW, ABOVE + 1), key=abs):
        # Positive E4M3 codes are ordered as their values; 0 is the value zero and no scale.
        codes = (start.short() + offset).clamp(1, int(top)).to(torch.uint8)
        step = rule.step(codes.view(torch.float8_e4m3fn), global_scale).unsqueeze(-1)
        error = rounded(blocks / step).mul_(step).sub_(blocks).square_().mul_(importance).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, codes, best)
    return best
