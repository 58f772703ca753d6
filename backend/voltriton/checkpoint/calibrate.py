"""Scales and rounding chosen by what a layer's inputs look like on the user's own text."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from voltriton.checkpoint.codec import Rule
from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.experts import Expert
from voltriton.checkpoint.folder import ModelFolder
from voltriton.checkpoint.layers import LayerwiseModel, Streamed, check_family, products_dtype
from voltriton.checkpoint.moments import Moments, energy, importance
from voltriton.checkpoint.progress import Meter, meter
from voltriton.checkpoint.rounding import Recipe, Writer
from voltriton.checkpoint.source import Source, Weight
from voltriton.checkpoint.states import States
from voltriton.checkpoint.texts import load_tokenizer, windows
from voltriton.checkpoint.tuning import spilled_bytes, tune_norms

STAGE_BYTES = 256 << 20  # of moments kept at a time


def calibrate(
    source: Source,
    groups: dict[str, list[str]],
    folder: ModelFolder,
    rule: Rule,
    recipe: Recipe,
    input_scale: bool,
    threads: int,
) -> None:
    """Write the quantised tensors of all `groups` (module names by fused layer), layer after layer; then the norms, if
    the recipe tunes them."""
    check_family(source)
    tokenizer = load_tokenizer(source.path)
    text = windows(tokenizer, recipe.files, recipe.tokens, recipe.window, recipe.seed)
    tokens = sum(w.shape[1] for w in text)
    spilled = tokens * token_bytes(source, groups) + _step_bytes(source, groups, recipe, tokens)
    folder.check_room(spilled, f"calibrating on {tokens:,} tokens (fewer: --calib-tokens)")
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    with pool, _all_threads(threads):
        writer = Writer(folder, rule, recipe, input_scale, pool)
        wanted = _round_matrices(source, groups, text, writer)
        if recipe.tuning.tokens:
            written = {m: writer.written(m) for members in groups.values() for m in members}
            tune_norms(source, text, wanted, written, folder, recipe.tuning, recipe.seed)


def _round_matrices(
    source: Source, groups: dict[str, list[str]], text: list[torch.Tensor], writer: Writer
) -> States | list[torch.Tensor]:
    """The 16-bit model's states behind the last layer."""
    folder, recipe = writer.folder, writer.recipe
    model = LayerwiseModel(source, text, folder.path, products_dtype())
    by_layer = {i: groups_of_layer(groups, i) for i in range(len(model))}
    outside = set(groups) - {g for members in by_layer.values() for g in members}
    if outside:
        raise CheckpointError(
            f"{sorted(outside)[0]} is in no decoder layer and cannot be calibrated: --exclude it"
        )

    def nbytes(members: dict[str, list[str]]) -> int:
        return sum(source.weights[f"{m}.weight"].spec.nbytes for modules in members.values() for m in modules)

    with meter("finding what attention rests on", nbytes(groups)) as shown:
        sizes = map(nbytes, by_layer.values())
        energies = _energies(LayerwiseModel(source, text, folder.path, products_dtype()), sizes, shown)
        counts = importance(energies, recipe.sinks)
    drifted = model.kept(model.states)  # as `model.states`, of the model quantised so far
    with meter("calibrating", nbytes(groups)) as shown:
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
    return model.states


def _step_bytes(source: Source, groups: dict[str, list[str]], recipe: Recipe, tokens: int) -> int:
    layers = len({_layer_of(group) for group in groups})
    return spilled_bytes(recipe.tuning, tokens, _hidden(source), layers)


def _hidden(source: Source) -> int:
    return source.matrix("model.embed_tokens.weight").spec.shape[1]


def _layer_of(group: str) -> str:
    return ".".join(group.split(".")[:3])


def token_bytes(source: Source, groups: dict[str, list[str]]) -> int:
    """Of disk that a token of the text needs: three states in float32, and in bfloat16 the inputs of a layer's matrices
    (not of experts)."""
    inputs: dict[str, int] = {}
    for group, modules in groups.items():
        layer = _layer_of(group)
        if ".experts." not in group:
            columns = source.weights[f"{modules[0]}.weight"].spec.shape[1]
            inputs[layer] = inputs.get(layer, 0) + columns
    return 3 * 4 * _hidden(source) + 2 * max(inputs.values(), default=0)


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

    Their inputs are those of the model quantised so far; a pass through the layer as it was, before anything is
    replaced, says what they should be.
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
