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


def damped(moments: torch.Tensor, shrink: float) -> torch.Tensor:
    """The moments [columns, columns], float64, shrunk off the diagonal and damped on it."""
    diagonal = moments.diagonal().double()
    h = moments.double() * (1 - shrink)
    floor = diagonal.mean().clamp_min(1e-30) * DAMPING
    h.diagonal().copy_(diagonal + floor)
    return h


def inverse_factor(h: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of `h` [..., n, n], float32."""
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
    """What all rows of a layer share: the order of its columns, and in that order the damped moments, their
    `inverse_factor`, and for each block of 16 the inverse of its own part and that one's factor."""

    order: torch.Tensor
    moments: torch.Tensor
    factor: torch.Tensor
    block_inverse: torch.Tensor
    block_factor: torch.Tensor

    @staticmethod
    def of(moments: torch.Tensor, shrink: float) -> Basis:
        order = block_order(moments)
        h = damped(moments[order][:, order], shrink)
        count = len(h) // BLOCK
        blocks = h.reshape(count, BLOCK, count, BLOCK).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        inverse = torch.linalg.inv(blocks).float()
        return Basis(order, h.float(), inverse_factor(h), inverse, inverse_factor(blocks))


def feedback_scales(
    weight: torch.Tensor, basis: Basis, global_scale: torch.Tensor, rule: Rule, sweeps: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight to round [rows, columns], E4M3 scales [rows, columns / 16]).

    The first is on the E2M1 grid of the second, so plain rounding of it gives the codes. `sweeps`: how often every
    block is chosen again after the first pass.
    """
    wanted = weight[:, basis.order]
    values = torch.empty_like(wanted)
    codes = torch.empty(weight.shape[0], weight.shape[1] // BLOCK, dtype=torch.uint8)
    left = wanted.clone()
    for begin in range(0, weight.shape[1], BLOCK):
        end = begin + BLOCK
        near = basis.factor[begin:end, begin:end]
        values[:, begin:end], error, codes[:, begin // BLOCK] = _round_block(
            left[:, begin:end], near, global_scale, rule
        )
        left[:, end:] -= error @ basis.factor[begin:end, end:]
    for _ in range(sweeps):
        _choose_again(wanted, values, codes, basis, global_scale, rule)
    result, places = torch.empty_like(values), basis.order[::BLOCK] // BLOCK
    result[:, basis.order] = values
    chosen = torch.empty_like(codes)
    chosen[:, places] = codes
    return result, chosen.view(torch.float8_e4m3fn)


def _choose_again(
    wanted: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    basis: Basis,
    global_scale: torch.Tensor,
    rule: Rule,
) -> None:
    """Choose each block's scale and values again, all other blocks as they are, where that lowers the row's error
    (block coordinate descent; of single weights in QuantEase, arXiv:2309.01885). Changes `values` and `codes`."""
    slope = (wanted - values) @ basis.moments
    for i in range(codes.shape[1]):
        block = slice(i * BLOCK, (i + 1) * BLOCK)
        to_best = slope[:, block] @ basis.block_inverse[i]
        now = ((to_best @ basis.moments[block, block]) * to_best).sum(-1)
        old = values[:, block].clone()
        new, error, code = _round_block(old + to_best, basis.block_factor[i], global_scale, rule)
        better = error.square().sum(-1) < now
        values[:, block] = torch.where(better[:, None], new, old)
        codes[:, i] = torch.where(better, code, codes[:, i])
        slope += (old - values[:, block]) @ basis.moments[block]


def _round_block(
    block: torch.Tensor, near: torch.Tensor, global_scale: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scaled errors and scale code of the best candidate for each row of `block` [rows, 16].

    Work arrays are [16, candidates, rows]: what is computed for one of the 16 columns lies together.
    """
    start = rule.block_scale(block.abs().amax(-1), global_scale).view(torch.uint8).short()
    offsets = torch.tensor(sorted(range(-BELOW, ABOVE + 1), key=abs), dtype=torch.int16)
    top = int(torch.tensor(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).item())
    codes = (start + offsets[:, None]).clamp(1, top).to(torch.uint8)
    step = rule.step(codes.view(torch.float8_e4m3fn), global_scale)
    values, errors = torch.empty(BLOCK, *codes.shape), torch.empty(BLOCK, *codes.shape)
    columns, earlier = block.T.contiguous(), errors.view(BLOCK, -1)
    for j in range(BLOCK):
        left = columns[j] - (near[:j, j] @ earlier[:j]).view(codes.shape)
        torch.mul(rounded(left / step), step, out=values[j])
        torch.sub(left, values[j], out=errors[j]).div_(near[j, j])
    best = (errors * errors).sum(0).argmin(0)
    rows = torch.arange(len(block))
    return values[:, best, rows].T, errors[:, best, rows].T, codes[best, rows]
