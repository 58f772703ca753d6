"""Norms tuned end to end: their weights, which stay in 16 bit, moved until the quantised model predicts what the 16-bit
one does.

A step takes some windows through all layers and the gradient of KL(16 bit || quantised) back, one decoder layer at a
time: in memory is what a layer needs for a window. Each layer's inputs are in files, and on the way back the
layer is run again (gradient checkpointing, arXiv:1604.06174).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from voltriton.checkpoint.folder import ModelFolder
from voltriton.checkpoint.layers import LayerwiseModel, Streamed, products_dtype
from voltriton.checkpoint.progress import Meter, meter
from voltriton.checkpoint.source import Source, Weight
from voltriton.checkpoint.states import States

LOGIT_ROWS = 128  # tokens whose logits are in memory at a time
DECAYS = (0.9, 0.95)  # of Adam's two moments: there are few steps
WARM = 0.1  # of the steps: the rate rises


@dataclass(frozen=True)
class Tuning:
    """`tokens` seen in all, `batch` of them a step; `rate`: how far a step of Adam moves a weight, in units of the
    norm's mean magnitude. Half the batch at twice the rate made Qwen2.5-Coder-0.5B worse (docs/quality.md)."""

    tokens: int = 0
    batch: int = 4096
    rate: float = 0.0015

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.batch)

    def rate_at(self, step: int) -> float:
        """A linear rise, then half a cosine."""
        cosine = (1 + math.cos(math.pi * step / self.steps)) / 2
        return self.rate * min((step + 1) / (WARM * self.steps), 1.0) * cosine


def spilled_bytes(how: Tuning, tokens: int, hidden: int, layers: int) -> int:
    """Of disk that a step's states need beside those of a text of so many tokens."""
    return min(how.batch, tokens) * (layers + 2) * hidden * 4 if how.tokens else 0


def tune_norms(
    source: Source,
    text: list[torch.Tensor],
    wanted: States | list[torch.Tensor],
    written: dict[str, Weight],
    folder: ModelFolder,
    how: Tuning,
    seed: int,
) -> None:
    """Write the norms of the folder whose matrices, by module, are `written`. `wanted`: the text's states behind the
    last layer of the 16-bit model."""
    if {name for name in source.weights if is_norm(name)} <= folder.done:  # by an earlier run
        return
    model = LayerwiseModel(source, text, folder.path, products_dtype())
    tuner = Tuner(model, wanted, written, how, seed)
    layer_bytes = sum(w.spec.nbytes for w in written.values()) // len(model)
    with meter("tuning norms", how.steps * tuner.passes * layer_bytes) as shown:
        for _ in tuner.run(shown, layer_bytes):
            pass
    for name, weight in tuner.norms():
        folder.write(name, 0, weight.to(source.weights[name].spec.dtype))
    folder.finish(*(name for name, _ in tuner.norms()))
    folder.save()


class Norm:
    """A norm's weight, with Adam's moments of its gradient (arXiv:1412.6980)."""

    def __init__(self, parameter: torch.Tensor, zero_centred: bool):
        """`zero_centred`: it multiplies by one more than its weight."""
        self.weight = parameter.detach().clone()
        self._unit = float((self.weight + zero_centred).abs().mean())
        self._mean, self._square = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self._count = 0

    def put(self, parameter: torch.Tensor) -> None:
        """Into the layer, to gather its gradient there."""
        parameter.data.copy_(self.weight)
        parameter.grad = None
        parameter.requires_grad_()

    def move(self, gradient: torch.Tensor, rate: float) -> None:
        self._count += 1
        slow, slower = DECAYS
        self._mean.lerp_(gradient, 1 - slow)
        self._square.lerp_(gradient.square(), 1 - slower)
        mean, square = self._mean / (1 - slow**self._count), self._square / (1 - slower**self._count)
        self.weight -= mean / square.sqrt_().add_(1e-12) * (rate * self._unit)


class Tuner:
    """The norms, and the steps."""

    def __init__(
        self,
        model: LayerwiseModel,
        wanted: States | list[torch.Tensor],
        written: dict[str, Weight],
        how: Tuning,
        seed: int,
    ):
        """`model`: of the source, its `states` the embedded text; `wanted`: the same behind its last layer."""
        self._model, self._wanted, self._how, self._seed = model, wanted, how, seed
        self._norms: list[dict[str, Norm]] = []
        for index in range(len(model)):
            with model.layer(index) as layer:
                prefix = f"model.layers.{index}."
                for name, module in layer.named_modules():
                    if isinstance(module, Streamed):
                        module.replace(written.get(prefix + name, module.matrix))
                some = ((n, p) for n, p in layer.named_parameters() if is_norm(n))
                self._norms.append({n: Norm(p, model.zero_centred(n)) for n, p in some})
        self._head = model.load_head(products_dtype())
        self._last = Norm(model.norm.weight, model.zero_centred("norm.weight"))
        self._norm_before = copy.deepcopy(model.norm)

    @property
    def passes(self) -> int:
        """Through layers, in one step."""
        return 3 * len(self._model)

    def run(self, shown: Meter, layer_bytes: int) -> Iterator[float]:
        """The mean KL of each step's tokens, in nats, before the step."""
        for step, batches in enumerate(self._draw()):
            inputs, behind = self._forward(batches, shown, layer_bytes)
            slopes, loss = self._loss(behind, batches)
            rate = self._how.rate_at(step)
            self._move(self._last, self._model.norm.weight, rate)
            self._backward(inputs, slopes, rate, shown, layer_bytes)
            yield loss

    def norms(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Their weights by the names in the files."""
        for index, norms in enumerate(self._norms):
            for name, norm in norms.items():
                yield f"model.layers.{index}.{name}", norm.weight
        yield "model.norm.weight", self._last.weight

    def _draw(self) -> Iterator[list[int]]:
        """Batches of windows for each step: all of them in random order, and then again."""
        count, tokens = len(self._wanted), self._wanted[0].shape[:2].numel()
        size = min(max(self._how.batch // tokens, 1), count)
        order: list[int] = []
        chance = random.Random(self._seed)
        for _ in range(self._how.steps):
            if len(order) < size:
                order += chance.sample(range(count), count)
            yield order[:size]
            del order[:size]

    def _forward(
        self, batches: list[int], shown: Meter, layer_bytes: int
    ) -> tuple[list[States | list[torch.Tensor]], States | list[torch.Tensor]]:
        """The states before each layer, and those behind the last."""
        inputs = []
        now = self._model.kept(self._model.states[b] for b in batches)
        for index in range(len(self._model)):
            inputs.append(now)
            with self._layer(index) as layer:
                now = self._model.kept(self._model.run(layer, index, x) for x in inputs[-1])
            shown.add(layer_bytes)
        return inputs, now

    def _backward(
        self,
        inputs: list[States | list[torch.Tensor]],
        slopes: States | list[torch.Tensor],
        rate: float,
        shown: Meter,
        layer_bytes: int,
    ) -> None:
        """Move the norms; `slopes`: the loss's gradient behind the last layer."""
        for index in reversed(range(len(self._model))):
            with self._layer(index) as layer:
                for i, state in enumerate(inputs.pop()):
                    # A window at a time: what autograd keeps is several times what a forward pass needs.
                    pairs = zip(torch.split(state.detach(), 1), torch.split(slopes[i], 1), strict=True)
                    slopes[i] = torch.cat([self._back(layer, index, *pair) for pair in pairs])
                for name, norm in self._norms[index].items():
                    self._move(norm, layer.get_parameter(name), rate)
            shown.add(2 * layer_bytes)

    def _back(self, layer: nn.Module, index: int, state: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        """The loss's gradient before the layer, from that behind it."""
        state.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(self._model.through(layer, index, state), slope)
        return _gradient(state)

    @contextmanager
    def _layer(self, index: int) -> Iterator[nn.Module]:
        """The layer with its norms as they are now."""
        with self._model.layer(index) as layer:
            for name, norm in self._norms[index].items():
                norm.put(layer.get_parameter(name))
            yield layer

    @staticmethod
    def _move(norm: Norm, parameter: nn.Parameter, rate: float) -> None:
        norm.move(_gradient(parameter), rate)
        parameter.requires_grad_(False)

    def _loss(
        self, states: States | list[torch.Tensor], batches: list[int]
    ) -> tuple[States | list[torch.Tensor], float]:
        """The mean KL's gradient at the states behind the last layer, and that KL."""
        self._last.put(self._model.norm.weight)
        count = sum(state.shape[:2].numel() for state in states)
        slopes, total = self._model.kept(), 0.0
        for state, batch in zip(states, batches, strict=True):
            state = state.detach().requires_grad_()
            with torch.enable_grad():
                hidden = self._model.norm(state)
            with torch.no_grad():
                aim = self._norm_before(self._wanted[batch])
                parts = [self._divergence(*two) for two in zip(_rows(hidden), _rows(aim), strict=True)]
            total += sum(kl for kl, _ in parts)
            hidden.backward(torch.cat([slope for _, slope in parts]).view_as(hidden) / count)
            slopes.append(_gradient(state))
        return slopes, total / count

    def _divergence(self, now: torch.Tensor, aim: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Sum over tokens of the KL between what follows from `aim` and from `now` [tokens, hidden], and its gradient
        at `now`: the difference of the two predictions times the output matrix."""
        head = self._head
        q, p = (nn.functional.linear(x.to(head.dtype), head).float().log_softmax(-1) for x in (now, aim))
        likely = p.exp()
        kl = float((likely * p.sub_(q)).sum())
        return kl, (q.exp_().sub_(likely).to(head.dtype) @ head).float()


def is_norm(name: str) -> bool:
    """Of a layer's parameters: also those of queries and keys."""
    return name.endswith("norm.weight")


def _rows(states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(states.flatten(0, 1), LOGIT_ROWS)


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
