"""Scales and rounding chosen by what a layer's inputs look like on the user's own text."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from voltriton.checkpoint.codec import Rule, dequantise, quantise
from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.feedback import Basis, feedback_scales
from voltriton.checkpoint.folder import ModelFolder
from voltriton.checkpoint.layers import LayerwiseModel
from voltriton.checkpoint.layout import tensor_names
from voltriton.checkpoint.progress import meter
from voltriton.checkpoint.scales import searched_scales
from voltriton.checkpoint.source import Source
from voltriton.checkpoint.texts import load_tokenizer, windows

# Second moments are kept between inputs of the same group of columns; larger ones cost too much memory.
GROUP_COLUMNS = 4096
RIDGE = 0.05  # of the mean square input, in the correction of drift
TASK_ROWS = 1024  # rows of one piece of work: they do not depend on each other


@dataclass(frozen=True)
class Recipe:
    """How to calibrate. `shrink`: how much of the moments between different inputs is left out, 0 to 1."""

    files: list[Path] = field(default_factory=list)
    tokens: int = 32768
    window: int = 512
    seed: int = 0
    feedback: bool = True
    shrink: float = 0.3
    follow: float = 0.0  # how much of the error that earlier layers left in the inputs is corrected, 0 to 1


class Moments:
    """Sums of x_i x_j over tokens, by groups of columns, and the largest magnitude seen."""

    def __init__(self, columns: int):
        self._sums = [torch.zeros(n, n) for n in group_sizes(columns)]
        self._drift: list[torch.Tensor] = []
        self._count = 0
        self.amax = torch.zeros(())

    def add(self, inputs: torch.Tensor, token_weight: torch.Tensor | None = None) -> None:
        """`inputs` [..., columns]; `token_weight` [tokens] multiplies each token's share, default 1."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        self.amax = torch.maximum(self.amax, flat.abs().max())
        if token_weight is not None:
            flat = flat * token_weight.sqrt()[:, None]
        for part, sums in zip(
            flat.split_with_sizes([len(s) for s in self._sums], 1), self._sums, strict=True
        ):
            sums.addmm_(part.T, part)
        self._count += len(flat)

    def add_drift(
        self, inputs: torch.Tensor, wanted: torch.Tensor, token_weight: torch.Tensor | None
    ) -> None:
        """Also sum (wanted - input)_i input_j; call it with what `add` gets."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        gap = wanted.reshape(flat.shape).float() - flat
        if token_weight is not None:
            gap = gap * token_weight[:, None]
        self._drift = self._drift or [torch.zeros_like(s) for s in self._sums]
        sizes = [len(s) for s in self._sums]
        pairs = zip(gap.split_with_sizes(sizes, 1), flat.split_with_sizes(sizes, 1), strict=True)
        for (g, x), sums in zip(pairs, self._drift, strict=True):
            sums.addmm_(g.T, x)

    def corrected(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
        """The weight whose product with the inputs as they are is nearest to the wanted one's with the wanted
        inputs: W + W D H^-1, with H = sum x x^T and D = sum (wanted - x) x^T, least squares with a ridge."""
        if not self._drift or not strength:
            return weight
        parts = weight.split_with_sizes([len(s) for s in self._sums], 1)
        return torch.cat(
            [self._correct(*p, strength) for p in zip(parts, self._sums, self._drift, strict=True)], 1
        )

    @staticmethod
    def _correct(
        weight: torch.Tensor, sums: torch.Tensor, drift: torch.Tensor, strength: float
    ) -> torch.Tensor:
        h = sums.double()
        h.diagonal().add_(h.diagonal().mean() * RIDGE + 1e-30)
        change: torch.Tensor = torch.linalg.solve(h, (weight.double() @ drift.double()).T).T
        return weight + strength * change.float()

    def groups(self) -> list[torch.Tensor]:
        if not all(bool(torch.isfinite(s).all()) for s in self._sums):
            raise CheckpointError("the calibration text makes infinite activations in this model")
        return [s / max(self._count, 1) for s in self._sums]


def group_sizes(columns: int) -> list[int]:
    """Equal groups, multiples of 16, none over GROUP_COLUMNS."""
    count = -(-columns // GROUP_COLUMNS)
    size = -(-columns // count // 16) * 16
    return [min(size, columns - begin) for begin in range(0, columns, size)]


def calibrate(
    source: Source,
    groups: dict[str, list[str]],
    folder: ModelFolder,
    rule: Rule,
    recipe: Recipe,
    input_scale: bool,
    threads: int,
) -> None:
    """Write the quantised tensors of all `groups` (module names by fused layer), layer after layer."""
    tokenizer = load_tokenizer(source.path)
    model = LayerwiseModel(
        source, windows(tokenizer, recipe.files, recipe.tokens, recipe.window, recipe.seed)
    )
    by_layer = {i: groups_of_layer(groups, i) for i in range(len(model))}
    outside = set(groups) - {g for members in by_layer.values() for g in members}
    if outside:
        raise CheckpointError(
            f"{sorted(outside)[0]} is in no decoder layer and cannot be calibrated: --exclude it"
        )
    total = sum(source.weights[f"{m}.weight"].spec.nbytes for members in groups.values() for m in members)
    drifted = list(model.states) if recipe.follow else []  # the states of the model quantised so far
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    with pool, meter("calibrating", total) as shown:
        for index, members in by_layer.items():
            with model.layer(index) as layer:
                torch.set_num_threads(threads)  # the forward pass: large products
                moments, states = _observe(model, layer, index, members, drifted)
                torch.set_num_threads(1)  # the rounding: many small steps, so several pieces at once
                for group, modules in members.items():
                    weights = {m: _linear(layer, index, m).weight.data for m in modules}
                    _Writer(folder, rule, moments[group], recipe, input_scale).group(weights, pool)
                    shown.add(sum(source.weights[f"{m}.weight"].spec.nbytes for m in modules))
                model.states = states
                if recipe.follow:
                    torch.set_num_threads(threads)
                    drifted = [model.run(layer, index, state) for state in drifted]


def groups_of_layer(groups: dict[str, list[str]], index: int) -> dict[str, list[str]]:
    prefix = f"model.layers.{index}."
    return {g: modules for g, modules in groups.items() if modules[0].startswith(prefix)}


def _linear(layer: nn.Module, index: int, module: str) -> nn.Linear:
    linear = layer.get_submodule(module.removeprefix(f"model.layers.{index}."))
    if not isinstance(linear, nn.Linear):
        raise CheckpointError(f"{module} is no linear layer")
    return linear


def _observe(
    model: LayerwiseModel,
    layer: nn.Module,
    index: int,
    members: dict[str, list[str]],
    drifted: list[torch.Tensor],
) -> tuple[dict[str, Moments], list[torch.Tensor]]:
    """Moments by group (its matrices have the same input) and the states behind the layer. With `drifted`, the
    inputs are those of the model quantised so far, and the drift from the true ones is kept too."""
    seen: dict[str, torch.Tensor] = {}
    moments: dict[str, Moments] = {}
    hooks = []
    for group, modules in members.items():
        linear = _linear(layer, index, modules[0])
        moments[group] = Moments(linear.in_features)
        hooks.append(linear.register_forward_pre_hook(_keeper(seen, group)))
    states = []
    for i, state in enumerate(model.states):
        states.append(model.run(layer, index, state))
        wanted = dict(seen)
        if drifted:
            model.run(layer, index, drifted[i])
        for group, modules in members.items():
            share = None if _mixes_tokens(modules[0]) else 1 / energy(states[-1])
            moments[group].add(seen[group], share)
            if drifted:
                moments[group].add_drift(seen[group], wanted[group], share)
    for hook in hooks:
        hook.remove()
    return moments, states


def _mixes_tokens(module: str) -> bool:
    """Queries, keys and values act on other tokens too, and their inputs are normalised."""
    return module.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")


def energy(state: torch.Tensor) -> torch.Tensor:
    """Mean square of the residual stream at each token [tokens].

    What a layer adds to the stream is divided by its size in the norms that follow, so an error there counts in
    proportion. Without this the few tokens with huge activations (attention sinks, arXiv:2309.17453) would be
    all that the scales are chosen for.
    """
    return state.reshape(-1, state.shape[-1]).square().mean(-1).clamp_min(1e-12)


def _keeper(
    seen: dict[str, torch.Tensor], group: str
) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[group] = inputs[0]

    return keep


@dataclass(frozen=True)
class _Writer:
    """Quantise the matrices of one fused layer and write them."""

    folder: ModelFolder
    rule: Rule
    moments: Moments
    recipe: Recipe
    input_scale: bool

    def group(self, weights: dict[str, torch.Tensor], pool: ThreadPoolExecutor) -> None:
        names = [n for m in weights for n in tensor_names(m, self.rule)[: 4 if self.input_scale else 3]]
        if set(names) <= self.folder.done and not self.recipe.follow:
            return
        for module, weight in weights.items():
            if not torch.isfinite(weight).all():
                raise CheckpointError(f"{module}.weight has NaN or infinite values")
        parts = self.moments.groups()
        importance = torch.cat([p.diagonal() for p in parts])
        bases = [Basis.of(p, self.recipe.shrink) for p in parts] if self.recipe.feedback else []
        targets = {m: self.moments.corrected(w, self.recipe.follow) for m, w in weights.items()}
        # The standard one: smaller ones clip, larger ones gained nothing on real layers (docs/quality.md).
        top = self.rule.global_scale(torch.stack([t.abs().max() for t in targets.values()]).max())
        tasks = [
            pool.submit(self._rows, module, begin, target[begin : begin + TASK_ROWS], bases, importance, top)
            for module, target in targets.items()
            for begin in range(0, len(target), TASK_ROWS)
        ]
        results = [task.result() for task in tasks]
        if self.recipe.follow:
            _replace(list(weights.values()), results)
        for module in weights:
            self._scalars(module, top)
        self.folder.finish(*names)

    def _rows(
        self,
        module: str,
        begin: int,
        weight: torch.Tensor,
        bases: list[Basis],
        importance: torch.Tensor,
        top: torch.Tensor,
    ) -> torch.Tensor:
        """Write some rows; returns them as they will be read back."""
        if bases:
            columns = weight.split_with_sizes([len(b.order) for b in bases], 1)
            done = [feedback_scales(w, b, top, self.rule) for w, b in zip(columns, bases, strict=True)]
            weight = torch.cat([rounded for rounded, _ in done], 1)
            scale = torch.cat([codes.view(torch.uint8) for _, codes in done], 1).view(torch.float8_e4m3fn)
        else:
            scale = searched_scales(weight, top, self.rule, importance)
        packed_name, scale_name, _, _ = tensor_names(module, self.rule)
        packed = quantise(weight, scale, top, self.rule)
        self.folder.write(packed_name, begin * packed.shape[1], packed)
        self.folder.write(scale_name, begin * scale.shape[1], scale)
        return dequantise(packed, scale, top, self.rule) if self.recipe.follow else weight

    def _scalars(self, module: str, top: torch.Tensor) -> None:
        _, _, top_name, input_name = tensor_names(module, self.rule)
        self.folder.write(top_name, 0, top)
        if self.input_scale:
            self.folder.write(input_name, 0, self.rule.global_scale(self.moments.amax))


def _replace(weights: list[torch.Tensor], pieces: list[torch.Tensor]) -> None:
    """Put the rows of all matrices, in order, into them."""
    todo = iter(pieces)
    for weight in weights:
        for begin in range(0, len(weight), TASK_ROWS):
            weight[begin : begin + TASK_ROWS] = next(todo)
