"""A model's forward pass one decoder layer at a time, and within it one matrix at a time.

transformers supplies the layers' code, built without storage; norms and biases are loaded with their layer, matrices
are read from the source's files whenever they are used. What a layer gets beside the hidden states (masks, rotary
angles) is recorded once, from a run through empty layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.experts import Experts
from voltriton.checkpoint.source import Source, Weight
from voltriton.checkpoint.states import States

# Their layers' parameters have the names of the files, once the experts are taken apart.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "qwen3_next")
ZERO_CENTRED = ("gemma3_text", "qwen3_next")
BATCH_TOKENS = 2048  # taken through a matrix for each time that it is read
HEAD_ROWS = 8192  # of the output matrix in float32 at a time
KEPT_BYTES = 64 << 20  # a layer whose matrices are not larger is read once only


def empty_model(source: Source) -> Any:
    """transformers' model of the configuration, its parameters without storage and under the names of the files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        for name, module in list(model.named_modules()):
            if name.endswith(".mlp.experts"):
                model.set_submodule(name, Experts.like(module))
    return model


class _Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}

    def forward(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        self.given = given
        return hidden


def products_dtype() -> torch.dtype:
    """What products may be computed in where float32's last bits do not matter: bfloat16 if this CPU multiplies it
    faster (2.2 times with AVX512_BF16), else float32."""
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


class Streamed(nn.Module):
    """nn.Linear, float32 in and out, that reads its weight whenever it is called, or once if it may `keep` it."""

    def __init__(self, matrix: Weight, bias: nn.Parameter | None, dtype: torch.dtype, keep: bool):
        """`dtype`: of the product."""
        super().__init__()
        self.bias = bias
        self._dtype, self._keep = dtype, keep
        self.replace(matrix)

    @property
    def matrix(self) -> Weight:
        return self._matrix

    def replace(self, matrix: Weight) -> None:
        self._matrix = matrix
        self._kept: torch.Tensor | None = None

    def _weight(self) -> torch.Tensor:
        if self._kept is not None:
            return self._kept
        weight = self._matrix.rows(0, self._matrix.spec.shape[0]).to(self._dtype)
        if self._keep:
            self._kept = weight
        return weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product = nn.functional.linear(inputs.to(self._dtype), self._weight()).float()
        return product if self.bias is None else product.add_(self.bias)


class LayerwiseModel:
    """`states` are those of the windows, several in each [windows, window, hidden], float32."""

    def __init__(
        self,
        source: Source,
        windows: list[torch.Tensor],
        spill: Path | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        """`windows`: token ids, each [1, window]; `spill`: folder for the states, by default they are in memory;
        `dtype`: of the products with matrices, all else is in float32."""
        check_family(source)
        self._source, self._dtype = source, dtype
        model = empty_model(source)
        self._base = model.model.eval()
        self.norm = self._base.norm
        self._head: torch.Tensor | None = None
        self._layers = list(self._base.layers)
        self._batch = max(BATCH_TOKENS // windows[0].shape[1], 1)
        self._spill = spill
        self.states = self.kept(self._embed(torch.cat(ids)) for ids in batched(windows, self._batch))
        self._given = self._record(model.config)

    def __len__(self) -> int:
        return len(self._layers)

    def kept(self, states: Iterable[torch.Tensor] = ()) -> States | list[torch.Tensor]:
        """Where such states lie: in a file if there is a folder for them."""
        found: States | list[torch.Tensor] = States(self._spill) if self._spill else []
        for state in states:
            found.append(state)
        return found

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Only the rows in use are read."""
        table = self._source.matrix("model.embed_tokens.weight")
        unique, places = torch.unique(ids, return_inverse=True)
        rows = torch.cat([table.rows(i, i + 1) for i in unique.tolist()])
        scale = float(getattr(self._base.embed_tokens, "scalar_embed_scale", 1.0))  # Gemma's
        return rows[places] * scale

    @torch.no_grad()
    def _record(self, config: Any) -> list[dict[str, Any]]:
        recorders = [_Recorder() for _ in self._layers]
        self._base.layers = nn.ModuleList(recorders)
        self._base.norm = nn.Identity()
        self._base.rotary_emb = type(self._base.rotary_emb)(config=config)
        self._base(inputs_embeds=self.states[0][:1], use_cache=False)
        return [r.given for r in recorders]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """The layer with its weights, by the names that follow `model.layers.N.`."""
        layer = self._layers[index]
        prefix = f"model.layers.{index}."
        linears = {n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
        keep = sum(m.weight.numel() for m in linears.values()) * self._dtype.itemsize <= KEPT_BYTES
        for name, module in linears.items():
            matrix = self._matrix(f"{prefix}{name}.weight", module.weight)
            layer.set_submodule(name, Streamed(matrix, module.bias, self._dtype, keep))
        layer.to_empty(device="cpu")
        for name, parameter in layer.named_parameters():
            self._fill(parameter, prefix + name)
        try:
            yield layer
        finally:
            layer.to("meta")
            for module in layer.modules():
                if isinstance(module, Streamed):
                    module.replace(module.matrix)  # forgets what it kept

    def _matrix(self, name: str, like: torch.Tensor) -> Weight:
        weight = self._source.matrix(name)
        if weight.spec.shape != tuple(like.shape):
            raise CheckpointError(f"{self._source.path}: {name} has shape {weight.spec.shape}")
        return weight

    def _fill(self, parameter: nn.Parameter, name: str) -> None:
        weight = self._matrix(name, parameter)
        parameter.requires_grad_(False).copy_(weight.rows(0, parameter.shape[0]))

    @torch.no_grad()
    def logits(self, index: int, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first token, logits [rows, vocabulary]) of window `index`, its states having passed all layers."""
        if self._head is None:
            self._head = self.load_head(torch.float32)
        batch, place = divmod(index, self._batch)
        hidden = self.norm(self.states[batch][place])
        for begin in range(0, len(hidden), rows):
            yield begin, hidden[begin : begin + rows] @ self._head.T

    def zero_centred(self, norm: str) -> bool:
        """Whether the norm of this parameter name multiplies by one more than its weight."""
        gated = norm.endswith("linear_attn.norm.weight")  # Qwen3-Next's, in its layers without attention
        return self._source.config.get("model_type") in ZERO_CENTRED and not gated

    def load_head(self, dtype: torch.dtype) -> torch.Tensor:
        """What gives the logits [vocabulary, hidden], behind `norm`, which is loaded too."""
        self.norm = self.norm.to_empty(device="cpu")
        self._fill(self.norm.weight, "model.norm.weight")
        tied = self._source.config.get("tie_word_embeddings") or "lm_head.weight" not in self._source.names
        head = self._source.matrix("model.embed_tokens.weight" if tied else "lm_head.weight")
        found = torch.empty(head.spec.shape, dtype=dtype)
        for begin in range(0, len(found), HEAD_ROWS):
            found[begin : begin + HEAD_ROWS] = head.rows(begin, min(begin + HEAD_ROWS, len(found)))
        return found

    @torch.no_grad()
    def run(self, layer: nn.Module, index: int, state: torch.Tensor) -> torch.Tensor:
        """The states of some windows behind this layer."""
        return self.through(layer, index, state)

    def through(self, layer: nn.Module, index: int, state: torch.Tensor) -> torch.Tensor:
        """The same, for gradients."""
        return self._first(layer(state, **self._given[index]))

    def forward(self) -> None:
        """Take all states through all layers."""
        for _ in self.passes():
            pass

    def passes(self) -> Iterator[None]:
        """Take all states through one layer after another."""
        for index in range(len(self)):
            with self.layer(index) as layer:
                for i, state in enumerate(self.states):
                    self.states[i] = self.run(layer, index, state)
            yield

    @staticmethod
    def _first(out: Any) -> torch.Tensor:
        tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return tensor


def check_family(source: Source) -> None:
    family = str(source.config.get("model_type"))
    if family not in FAMILIES:
        raise CheckpointError(
            f"calibration does not handle {family!r}; it handles {', '.join(FAMILIES)} (convert without --calib)"
        )


def batched(windows: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    for begin in range(0, len(windows), size):
        yield windows[begin : begin + size]
