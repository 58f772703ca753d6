"""Second moments of a layer's inputs over the tokens of a text, which decide what a rounding error costs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from voltriton.checkpoint.errors import CheckpointError

# Second moments are kept between inputs of the same group of columns; larger ones cost too much memory.
GROUP_COLUMNS = 4096
ROWS = 4096
# Times the median energy: between the largest of ordinary tokens (6) and those that attention rests on (50 to 10,000).
MASSIVE = 20.0
RIDGE = 0.05  # of the mean square input, in the correction of drift


class Moments:
    """Sums of x_i x_j over tokens, by groups of columns, and the largest magnitude seen."""

    def __init__(self, columns: int, dtype: torch.dtype = torch.float32):
        """`dtype`: of each batch's products; bfloat16's rounding, 2^-9 of an entry and independent from batch to batch,
        is far below what `damped` adds to the diagonal."""
        self._dtype = dtype
        self._sums = [torch.zeros(n, n) for n in group_sizes(columns)]
        self._drift: list[torch.Tensor] = []
        self._count = 0
        self.amax = torch.zeros(())

    def add(
        self,
        inputs: torch.Tensor,
        token_weight: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> None:
        """`inputs` [..., columns]; `token_weight` [tokens] multiplies each token's share, default 1; `wanted`, of the
        shape of `inputs`: what they would be without the rounding of earlier layers."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        if not len(flat):
            return
        self.amax = torch.maximum(self.amax, flat.abs().max())
        gap = None if wanted is None else wanted.reshape(flat.shape).float() - flat
        if token_weight is not None:
            root = token_weight.sqrt()[:, None]
            flat, gap = flat * root, None if gap is None else gap * root
        sizes = [len(s) for s in self._sums]
        for part, sums in zip(flat.split_with_sizes(sizes, 1), self._sums, strict=True):
            self._add_product(sums, part, part)
        if gap is not None:
            self._drift = self._drift or [torch.zeros_like(s) for s in self._sums]
            pairs = zip(gap.split_with_sizes(sizes, 1), flat.split_with_sizes(sizes, 1), strict=True)
            for (g, x), sums in zip(pairs, self._drift, strict=True):
                self._add_product(sums, g, x)
        self._count += len(flat)

    def _add_product(self, sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        sums.add_(left.to(self._dtype).T @ right.to(self._dtype))

    def correct(self, weight: torch.Tensor, strength: float) -> None:
        """Change `weight` [rows, columns] to the one whose product with the inputs as they are is nearest to the
        wanted one's with the wanted inputs: W + W D H^-1, with H = sum x x^T and D = sum (wanted - x) x^T, least
        squares with a ridge. `strength`, 0 to 1, multiplies the change."""
        begin = 0
        for sums, drift in zip(self._sums, self._drift, strict=False):
            h = sums.double()
            h.diagonal().add_(h.diagonal().mean() * RIDGE + 1e-30)
            change = torch.linalg.solve(h, drift.double().T).T.float() * strength
            for first in range(0, len(weight), ROWS):
                part = weight[first : first + ROWS, begin : begin + len(sums)]
                part += part @ change
            begin += len(sums)

    def groups(self) -> list[torch.Tensor]:
        if not all(bool(torch.isfinite(s).all()) for s in self._sums):
            raise CheckpointError("the calibration text makes infinite activations in this model")
        if not self._count:  # an expert that no token was routed to: all inputs count the same
            return [torch.eye(len(s)) for s in self._sums]
        return [s / self._count for s in self._sums]


def group_sizes(columns: int) -> list[int]:
    """Equal groups, multiples of 16, none over GROUP_COLUMNS."""
    count = -(-columns // GROUP_COLUMNS)
    size = -(-columns // count // 16) * 16
    return [min(size, columns - begin) for begin in range(0, columns, size)]


def energy(state: torch.Tensor) -> torch.Tensor:
    """Mean square of the residual stream at each token [tokens].

    What a layer adds to the stream is divided by its size in the norms that follow, so an error there counts in
    proportion. Without this the few tokens with huge activations (attention sinks, arXiv:2309.17453) would be
    all that the scales are chosen for.
    """
    return state.reshape(-1, state.shape[-1]).square().mean(-1).clamp_min(1e-12)


def importance(energies: Iterable[list[torch.Tensor]], share: float) -> list[torch.Tensor]:
    """What each token counts for beside 1 over its energy, by batch, from the `energies` behind every layer.

    A text has a few tokens whose energy becomes hundreds of times that of the others in the middle layers; most of the
    attention of all others rests on them (arXiv:2402.17762), so an error there is an error everywhere. Together they
    get `share` times the weight of all other tokens.
    """
    peak: list[torch.Tensor] = []
    for batches in energies:
        usual = torch.cat(batches).median()
        now = [e / usual for e in batches]
        peak = [torch.maximum(a, b) for a, b in zip(peak, now, strict=True)] if peak else now
    massive = [p > MASSIVE for p in peak]
    count, total = sum(int(m.sum()) for m in massive), sum(len(m) for m in massive)
    weight = max(share * (total - count) / count, 1.0) if count else 1.0
    return [torch.where(m, weight, 1.0) for m in massive]
