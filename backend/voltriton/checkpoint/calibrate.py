"""Scales and rounding chosen by what a layer's inputs look like on the user's own text."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from voltriton.checkpoint.codec import BLOCK, Rule, quantise
from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.experts import Expert
from voltriton.checkpoint.feedback import Basis, feedback_scales
from voltriton.checkpoint.folder import ModelFolder
from voltriton.checkpoint.layers import LayerwiseModel, Streamed, products_dtype
from voltriton.checkpoint.layout import tensor_names
from voltriton.checkpoint.moments import Moments, energy, importance
from voltriton.checkpoint.progress import Meter, meter
from voltriton.checkpoint.scales import searched_scales
from voltriton.checkpoint.source import Nvfp4, Source, Weight
from voltriton.checkpoint.states import States
from voltriton.checkpoint.texts import load_tokenizer, windows

TASK_ROWS = 1024  # rows of one piece of work: they do not depend on each other
STAGE_BYTES = 256 << 20  # of moments kept at a time


@dataclass(frozen=True)
class Recipe:
    """How to calibrate. `shrink`: how much of the moments between different inputs is left out, 0 to 1; `follow`: how
    much of the error that earlier layers left in the inputs is corrected, 0 to 1; `sweeps`: see feedback_scales;
    `sinks`: what the tokens that attention rests on count for, all others together being 1."""

    files: list[Path] = field(default_factory=list)
    tokens: int = 65536
    window: int = 512
    seed: int = 0
    feedback: bool = True
    shrink: float = 0.1
    follow: float = 1.0
    sweeps: int = 2
    sinks: float = 0.5


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
    text = windows(tokenizer, recipe.files, recipe.tokens, recipe.window, recipe.seed)
    model = LayerwiseModel(source, text, folder.path, products_dtype())
    by_layer = {i: groups_of_layer(groups, i) for i in range(len(model))}
    outside = set(groups) - {g for members in by_layer.values() for g in members}
    if outside:
        raise CheckpointError(
            f"{sorted(outside)[0]} is in no decoder layer and cannot be calibrated: --exclude it"
        )

    def nbytes(members: dict[str, list[str]]) -> int:
        return sum(source.weights[f"{m}.weight"].spec.nbytes for modules in members.values() for m in modules)

    with meter("finding what attention rests on", nbytes(groups)) as shown, _all_threads(threads):
        sizes = map(nbytes, by_layer.values())
        energies = _energies(LayerwiseModel(source, text, folder.path, products_dtype()), sizes, shown)
        counts = importance(energies, recipe.sinks)
    drifted = model.kept(model.states)  # as `model.states`, of the model quantised so far
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    with pool, meter("calibrating", nbytes(groups)) as shown, _all_threads(threads):
        writer = _Writer(folder, rule, recipe, input_scale, pool)
        for index, members in by_layer.items():
            with model.layer(index) as layer:
                work = _Layer(model, layer, index, members, drifted, counts, recipe.follow > 0)
                for stage in work.stages():
                    todo = [g for g in stage if not writer.done(work.matrices(g))]
                    moments = work.moments(todo)
                    for group in stage:
                        matrices = work.matrices(group)
                        if group in moments:
                            writer.write(matrices, moments[group])
                        work.replace({m: writer.written(m) for m in matrices})
                        shown.add(sum(w.spec.nbytes for w in matrices.values()))
                work.finish()
            folder.save()


@contextlib.contextmanager
def _all_threads(threads: int) -> Iterator[None]:
    """Large products in the forward pass; elsewhere one thread each, several pieces of work at once."""
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(1)


def groups_of_layer(groups: dict[str, list[str]], index: int) -> dict[str, list[str]]:
    prefix = f"model.layers.{index}."
    return {g: modules for g, modules in groups.items() if modules[0].startswith(prefix)}


class _Reached(Exception):
    """The matrices in question have got their input: the rest of the pass is not needed."""


class _Layer:
    """One decoder layer whose matrices are replaced by what they were rounded to, one stage after another.

    Their inputs are those of the model quantised so far; the layer as it was, kept aside, says what they should be.
    """

    def __init__(
        self,
        model: LayerwiseModel,
        layer: nn.Module,
        index: int,
        members: dict[str, list[str]],
        drifted: States | list[torch.Tensor],
        counts: list[torch.Tensor],
        compare: bool,
    ):
        """`counts`: see `importance`; `compare`: with the inputs as they should be."""
        self._model, self._layer, self._index, self._members = model, layer, index, members
        self._drifted, self._counts, self._compare = drifted, counts, compare
        self._matrices = {m: self._linear(m).matrix for modules in members.values() for m in modules}
        self._wanted: dict[str, States | list[torch.Tensor]] = {}
        self._after = model.kept()
        hooks = [self._first(g).register_forward_pre_hook(self._note(g)) for g in members]
        for state in model.states:
            self._after.append(model.run(layer, index, state))
        for hook in hooks:
            hook.remove()

    def _note(self, group: str) -> Callable[..., None]:
        """Keep what the group's inputs should be, batch after batch; not of experts, whose tokens may differ."""

        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            compare = self._compare and ".experts." not in group
            if group not in self._wanted:
                self._wanted[group] = self._model.kept() if compare else []
            if compare:
                self._wanted[group].append(inputs[0].bfloat16())

        return hook

    def _module(self, name: str) -> nn.Module:
        return self._layer.get_submodule(name.removeprefix(f"model.layers.{self._index}."))

    def _linear(self, name: str) -> Streamed:
        module = self._module(name)
        if not isinstance(module, Streamed):
            raise CheckpointError(f"{name} is no linear layer")
        return module

    def _first(self, group: str) -> Streamed:
        """All matrices of a group have the same input."""
        return self._linear(self._members[group][0])

    def matrices(self, group: str) -> dict[str, Weight]:
        """The group's weights as they were."""
        return {m: self._matrices[m] for m in self._members[group]}

    def replace(self, matrices: dict[str, Weight]) -> None:
        for name, matrix in matrices.items():
            self._linear(name).replace(matrix)

    def stages(self) -> Iterator[list[str]]:
        """Groups in the order they run; the same matrices of several experts at once, as far as memory allows."""
        order = [*self._wanted, *(g for g in self._members if g not in self._wanted)]
        for _, alike in itertools.groupby(sorted(order, key=self._place(order)), key=_kind):
            stage: list[str] = []
            size = 0
            for group in alike:
                nbytes = 4 * self._first(group).matrix.spec.shape[1] ** 2
                if stage and size + nbytes > STAGE_BYTES:
                    yield stage
                    stage, size = [], 0
                stage.append(group)
                size += nbytes
            yield stage

    @staticmethod
    def _place(order: list[str]) -> Callable[[str], int]:
        kinds = list(dict.fromkeys(map(_kind, order)))
        return lambda group: kinds.index(_kind(group))

    def moments(self, groups: list[str]) -> dict[str, Moments]:
        """Of the groups' inputs, and how they differ from what they should be."""
        if not groups:
            return {}
        found = {g: Moments(self._first(g).matrix.spec.shape[1], products_dtype()) for g in groups}
        states = zip(self._drifted, self._after, self._counts, strict=True)
        for i, (drifted, after, counts) in enumerate(states):
            for group, inputs in self._inputs(groups, drifted).items():
                wanted = self._wanted.get(group, [])
                found[group].add(
                    inputs, self._shares(group, after, counts), wanted[i] if len(wanted) else None
                )
        for group in groups:
            self._wanted.pop(group, None)  # its place on the disk is free again
        return found

    def _shares(self, group: str, after: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What each token that the group has just seen counts."""
        module = self._members[group][0]
        if _mixes_tokens(module):
            return counts
        shares = counts / energy(after)
        expert = self._module(module.rpartition(".")[0])
        if isinstance(expert, Expert):
            return expert.shares.square() * shares[expert.tokens]
        return shares

    def _inputs(self, groups: list[str], state: torch.Tensor) -> dict[str, torch.Tensor]:
        """By group; an expert that no token was routed to has none."""
        found: dict[str, torch.Tensor] = {}

        def keep(group: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                found[group] = inputs[0]
                if len(found) == len(groups):
                    raise _Reached

            return hook

        hooks = [self._first(g).register_forward_pre_hook(keep(g)) for g in groups]
        with contextlib.suppress(_Reached):
            self._model.run(self._layer, self._index, state)
        for h in hooks:
            h.remove()
        return found

    def finish(self) -> None:
        """Take both kinds of states behind the layer."""
        self._model.states = self._after
        for i, state in enumerate(self._drifted):
            self._drifted[i] = self._model.run(self._layer, self._index, state)


def _energies(model: LayerwiseModel, sizes: Iterable[int], shown: Meter) -> Iterator[list[torch.Tensor]]:
    """Of every batch's tokens, behind each layer; `sizes` are the layers', in bytes."""
    for _, size in zip(model.passes(), sizes, strict=True):
        yield [energy(state) for state in model.states]
        shown.add(size)


def _kind(group: str) -> str:
    """The same for all experts of a layer."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", group)


def _mixes_tokens(module: str) -> bool:
    """Queries, keys and values act on other tokens too, and their inputs are normalised."""
    return module.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "in_proj_qkvz")


@dataclass(frozen=True)
class _Writer:
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
