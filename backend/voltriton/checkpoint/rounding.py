"""The matrices of one fused layer: rounded by their inputs' moments, and written."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from voltriton.checkpoint.codec import BLOCK, Rule, quantise
from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.feedback import Basis, feedback_scales
from voltriton.checkpoint.folder import ModelFolder
from voltriton.checkpoint.layout import tensor_names
from voltriton.checkpoint.moments import Moments
from voltriton.checkpoint.scales import searched_scales
from voltriton.checkpoint.source import Nvfp4, Weight
from voltriton.checkpoint.tuning import Tuning

TASK_ROWS = 1024  # rows of one piece of work: they do not depend on each other


@dataclass(frozen=True)
class Recipe:
    """How to calibrate. `shrink`: how much of the moments between different inputs is left out, 0 to 1; `follow`: how
    much of the error that earlier layers left in the inputs is corrected, 0 to 1; `sweeps`: see feedback_scales;
    `sinks`: what the tokens that attention rests on count for, all others together being 1; `tuning`: of the norms,
    after the rounding."""

    files: list[Path] = field(default_factory=list)
    tokens: int = 131072
    window: int = 512
    seed: int = 0
    feedback: bool = True
    shrink: float = 0.1
    follow: float = 1.0
    sweeps: int = 2
    sinks: float = 0.5
    tuning: Tuning = field(default_factory=Tuning)


@dataclass(frozen=True)
class Writer:
    """Quantise the matrices of one fused layer and write them."""

    folder: ModelFolder
    rule: Rule
    recipe: Recipe
    input_scale: bool
    pool: ThreadPoolExecutor

    def _names(self, matrices: Iterable[str]) -> list[str]:
        return [n for m in matrices for n in tensor_names(m, self.rule)[: 4 if self.input_scale else 3]]

    def done(self, matrices: Iterable[str]) -> bool:
        """Whether an earlier run has written them."""
        return set(self._names(matrices)) <= self.folder.done

    def written(self, module: str) -> Weight:
        packed, scale, top = (self.folder.stored(n) for n in tensor_names(module, self.rule)[:3])
        return Nvfp4(module, packed, scale, top, self.rule)

    def write(self, matrices: dict[str, Weight], moments: Moments) -> None:
        weights = {m: w.rows(0, w.spec.shape[0]) for m, w in matrices.items()}
        for module, weight in weights.items():
            if not torch.isfinite(weight).all():
                raise CheckpointError(f"{module}.weight has NaN or infinite values")
            moments.correct(weight, self.recipe.follow)
        # The standard one: smaller ones clip, larger ones gained nothing on real layers (docs/quality.md).
        top = self.rule.global_scale(torch.stack([w.abs().max() for w in weights.values()]).max())
        codes = {m: torch.empty(len(w), w.shape[1] // BLOCK, dtype=torch.uint8) for m, w in weights.items()}
        begin = 0
        for part in moments.groups():
            self._choose(part, begin, weights, codes, top)
            begin += len(part)
        for module, weight in weights.items():
            self._store(module, weight, codes[module].view(torch.float8_e4m3fn), top, moments.amax)
        self.folder.finish(*self._names(weights))

    def _choose(
        self,
        part: torch.Tensor,
        begin: int,
        weights: dict[str, torch.Tensor],
        codes: dict[str, torch.Tensor],
        top: torch.Tensor,
    ) -> None:
        """Round the columns from `begin` that `part`, their moments, is of, in place, and choose their scales."""
        basis = Basis.of(part, self.recipe.shrink) if self.recipe.feedback else None
        end = begin + len(part)

        def rows(weight: torch.Tensor, code: torch.Tensor) -> None:
            if basis is None:
                scale = searched_scales(weight, top, self.rule, part.diagonal())
            else:
                weight[:], scale = feedback_scales(weight, basis, top, self.rule, self.recipe.sweeps)
            code[:] = scale.view(torch.uint8)

        tasks = []
        for module, weight in weights.items():
            for first in range(0, len(weight), TASK_ROWS):
                some = slice(first, first + TASK_ROWS)
                code = codes[module][some, begin // BLOCK : end // BLOCK]
                tasks.append(self.pool.submit(rows, weight[some, begin:end], code))
        for task in tasks:
            task.result()

    def _store(
        self, module: str, weight: torch.Tensor, scale: torch.Tensor, top: torch.Tensor, amax: torch.Tensor
    ) -> None:
        packed_name, scale_name, top_name, input_name = tensor_names(module, self.rule)
        for begin in range(0, len(weight), TASK_ROWS):
            rows = slice(begin, begin + TASK_ROWS)
            packed = quantise(weight[rows], scale[rows], top, self.rule)
            self.folder.write(packed_name, begin * packed.shape[1], packed)
        self.folder.write(scale_name, 0, scale)
        self.folder.write(top_name, 0, top)
        if self.input_scale:
            self.folder.write(input_name, 0, self.rule.global_scale(amax))
