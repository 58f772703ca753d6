"""How far a checkpoint is from its source: by weight, and by what it predicts on given text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from voltriton.checkpoint.codec import blocks_of
from voltriton.checkpoint.convert import row_ranges
from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.layers import LayerwiseModel
from voltriton.checkpoint.source import Source

LOGIT_ROWS = 64  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class LayerError:
    """`relative`: Frobenius norm of the error over that of the weight; `worst_block`: the same for the worst
    block of 16 among those that hold at least a thousandth of the average energy."""

    module: str
    relative: float
    snr_db: float
    worst_block: float
    worst_row: int
    worst_column: int


def layer_errors(checkpoint: Source, source: Source) -> Iterator[LayerError]:
    for module, weight in checkpoint.nvfp4.items():
        original = source.weights.get(f"{module}.weight")
        if original is None or original.spec.shape != weight.spec.shape:
            raise CheckpointError(f"{source.path} has no {module}.weight of shape {weight.spec.shape}")
        error = energy = worst = 0.0
        place = (0, 0)
        for begin, end in row_ranges(original):
            wide = original.rows(begin, end)
            by_block = blocks_of(weight.rows(begin, end) - wide).square().sum(-1)
            size = blocks_of(wide).square().sum(-1)
            error, energy = error + float(by_block.sum()), energy + float(size.sum())
            ratio = torch.where(size > size.mean() * 1e-3, by_block / size, torch.zeros(()))
            if float(ratio.max()) > worst:
                worst = float(ratio.max())
                row, block = divmod(int(ratio.argmax()), ratio.shape[1])
                place = (begin + row, block * 16)
        relative = math.sqrt(error / energy) if energy else 0.0
        snr_db = -20 * math.log10(relative) if relative else math.inf
        yield LayerError(module, relative, snr_db, math.sqrt(worst), *place)


@dataclass(frozen=True)
class Quality:
    """Over all predicted tokens. `kl`: mean of KL(source || checkpoint) in nats; `agreement`: share of tokens
    whose most likely successor is the same."""

    tokens: int
    perplexity: float
    source_perplexity: float
    kl: float
    agreement: float

    @property
    def increase(self) -> float:
        return self.perplexity / self.source_perplexity - 1


def passed(source: Source, windows: list[torch.Tensor]) -> LayerwiseModel:
    """The model with the windows behind its last layer."""
    model = LayerwiseModel(source, windows)
    model.forward()
    return model


def perplexity(model: LayerwiseModel, windows: list[torch.Tensor]) -> float:
    """Of the `windows` that have `passed` the model."""
    loss = count = 0.0
    for index, ids in enumerate(windows):
        for begin, logits in model.logits(index, LOGIT_ROWS):
            target = ids[0, begin + 1 : begin + 1 + len(logits)]
            loss += float(nn.functional.cross_entropy(logits[: len(target)], target, reduction="sum"))
            count += len(target)
    return math.exp(loss / count)


def quality(checkpoint: Source, source: LayerwiseModel, windows: list[torch.Tensor]) -> Quality:
    """`source`: the model that it was made of, which the `windows` have `passed`."""
    models = (source, passed(checkpoint, windows))
    sums = torch.zeros(4, dtype=torch.float64)
    count = 0
    for index, ids in enumerate(windows):
        pairs = zip(*(m.logits(index, LOGIT_ROWS) for m in models), strict=True)
        for (begin, base), (_, ours) in pairs:
            target = ids[0, begin + 1 : begin + 1 + len(base)]
            sums += _compare(base[: len(target)], ours[: len(target)], target)
            count += len(target)
    ours_loss, base_loss, kl, same = (float(x) / count for x in sums)
    return Quality(count, math.exp(ours_loss), math.exp(base_loss), kl, same)


def _compare(base: torch.Tensor, ours: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p, q = base.log_softmax(-1), ours.log_softmax(-1)
    rows = torch.arange(len(target))
    kl = (p.exp() * (p - q)).sum()
    same = (p.argmax(-1) == q.argmax(-1)).sum()
    return torch.stack([-q[rows, target].sum(), -p[rows, target].sum(), kl, same]).double()
