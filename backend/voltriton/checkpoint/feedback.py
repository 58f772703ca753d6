"""Error feedback: each block's rounding error is made up for by the blocks not yet rounded.

The frame is Optimal Brain Surgeon as GPTQ uses it (arXiv:2210.17323): with H the second moments of a layer's
inputs and U the upper Cholesky factor of its inverse, rounding column j by e costs (e / U_jj)^2 once the later
columns have moved by -e U_j,k / U_jj. Two things differ from GPTQ as published. A block's E4M3 scale is not
fixed beforehand but chosen when the block's turn comes, from the weights as the feedback has left them, and by
that true cost (feedback within the block included). And the off-diagonal part of H is shrunk, because on a few
thousand tokens it describes the calibration text as much as the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from voltriton.checkpoint.codec import BLOCK, E4M3_MAX, Rule
from voltriton.checkpoint.scales import ABOVE, BELOW, rounded

DAMPING = 0.01  # of the mean diagonal, as in GPTQ


def inverse_factor(moments: torch.Tensor, shrink: float) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the shrunk, damped moments [columns, columns], float32."""
    diagonal = moments.diagonal().double()
    h = moments.double() * (1 - shrink)
    floor = diagonal.mean().clamp_min(1e-30) * DAMPING
    h.diagonal().copy_(diagonal + floor)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def block_order(moments: torch.Tensor) -> torch.Tensor:
    """Columns, block by block, the blocks of the most active inputs first: they have the most to compensate."""
    energy = moments.diagonal().reshape(-1, BLOCK).sum(-1)
    blocks = torch.argsort(energy, descending=True, stable=True)
    return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).reshape(-1)


@dataclass(frozen=True)
class Basis:
    """What all rows of a layer share: the order of its columns, and `inverse_factor` in that order."""

    order: torch.Tensor
    factor: torch.Tensor

    @staticmethod
    def of(moments: torch.Tensor, shrink: float) -> Basis:
        order = block_order(moments)
        return Basis(order, inverse_factor(moments[order][:, order], shrink))


def feedback_scales(
    weight: torch.Tensor, basis: Basis, global_scale: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight to round [rows, columns], E4M3 scales [rows, columns / 16]).

    The first is on the E2M1 grid of the second, so plain rounding of it gives the codes.
    """
    order, factor = basis.order, basis.factor
    left = weight[:, order].clone()
    result = torch.empty_like(weight)
    codes = torch.empty(weight.shape[0], weight.shape[1] // BLOCK, dtype=torch.uint8)
    for begin in range(0, weight.shape[1], BLOCK):
        end = begin + BLOCK
        near = factor[begin:end, begin:end]
        values, error, code = _round_block(left[:, begin:end], near, global_scale, rule)
        columns = order[begin:end]
        result[:, columns] = values
        codes[:, columns[0] // BLOCK] = code
        left[:, end:] -= error @ factor[begin:end, end:]
    return result, codes.view(torch.float8_e4m3fn)


def _round_block(
    block: torch.Tensor, near: torch.Tensor, global_scale: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scaled errors and scale code of the best candidate for each row of `block` [rows, 16]."""
    start = rule.block_scale(block.abs().amax(-1), global_scale).view(torch.uint8).short()
    offsets = torch.tensor(sorted(range(-BELOW, ABOVE + 1), key=abs), dtype=torch.int16)
    top = int(torch.tensor(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).item())
    codes = (start[:, None] + offsets).clamp(1, top).to(torch.uint8)
    step = rule.step(codes.view(torch.float8_e4m3fn), global_scale)
    left = block[:, None, :].expand(-1, len(offsets), -1).clone()
    values, errors = torch.empty_like(left), torch.empty_like(left)
    for j in range(BLOCK):
        values[..., j] = rounded(left[..., j] / step) * step
        errors[..., j] = (left[..., j] - values[..., j]) / near[j, j]
        left[..., j + 1 :] -= errors[..., j, None] * near[j, j + 1 :]
    best = errors.square().sum(-1).argmin(-1)
    rows = torch.arange(len(block))
    return values[rows, best], errors[rows, best], codes[rows, best]
