"""A model's forward pass one decoder layer at a time: only one layer's weights are in memory.

transformers supplies the layers' code, built without storage; the weights come from the source's files. What a
layer gets beside the hidden states (masks, rotary angles) is recorded once, from a run through empty layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.source import Source

# Their layers hold nothing but nn.Linear and norms under the names of the files.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


def empty_model(source: Source) -> Any:
    """transformers' model of the configuration, its parameters without storage."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


class _Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}

    def forward(self, hidden: torch.Tensor, **given: Any) -> torch.Tensor:
        self.given = given
        return hidden


class LayerwiseModel:
    """`states` are the hidden states of all windows, each [1, window, hidden], float32."""

    def __init__(self, source: Source, windows: list[torch.Tensor]):
        family = str(source.config.get("model_type"))
        if family not in FAMILIES:
            raise CheckpointError(
                f"calibration does not handle {family!r}; it handles {', '.join(FAMILIES)} (convert without --calib)"
            )
        self._source = source
        model = empty_model(source)
        self._base = model.model.eval()
        self._norm = self._base.norm
        self._head: torch.Tensor | None = None
        self._layers = list(self._base.layers)
        self.states = [self._embed(ids) for ids in windows]
        self._given = self._record(model.config)

    def __len__(self) -> int:
        return len(self._layers)

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
        self._base(inputs_embeds=self.states[0], use_cache=False)
        return [r.given for r in recorders]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """The layer with its weights, by the names that follow `model.layers.N.`."""
        layer = self._layers[index].to_empty(device="cpu")
        prefix = f"model.layers.{index}."
        for name, parameter in layer.named_parameters():
            self._fill(parameter, prefix + name)
        try:
            yield layer
        finally:
            layer.to("meta")

    def _fill(self, parameter: nn.Parameter, name: str) -> None:
        weight = self._source.matrix(name)
        if weight.spec.shape != tuple(parameter.shape):
            raise CheckpointError(f"{self._source.path}: {name} has shape {weight.spec.shape}")
        parameter.requires_grad_(False).copy_(weight.rows(0, parameter.shape[0]))

    @torch.no_grad()
    def logits(self, index: int, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first token, logits [rows, vocabulary]) of window `index`, its states having passed all layers."""
        if self._head is None:
            self._norm = self._norm.to_empty(device="cpu")
            self._fill(self._norm.weight, "model.norm.weight")
            tied = (
                self._source.config.get("tie_word_embeddings") or "lm_head.weight" not in self._source.names
            )
            head = self._source.matrix("model.embed_tokens.weight" if tied else "lm_head.weight")
            self._head = head.rows(0, head.spec.shape[0])
        hidden = self._norm(self.states[index])[0]
        for begin in range(0, len(hidden), rows):
            yield begin, hidden[begin : begin + rows] @ self._head.T

    @torch.no_grad()
    def run(self, layer: nn.Module, index: int, state: torch.Tensor) -> torch.Tensor:
        """The state of one window behind this layer."""
        return self._first(layer(state, **self._given[index]))

    def forward(self) -> None:
        """Take all states through all layers."""
        for index in range(len(self)):
            with self.layer(index) as layer:
                self.states = [self.run(layer, index, state) for state in self.states]

    @staticmethod
    def _first(out: Any) -> torch.Tensor:
        tensor: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return tensor
