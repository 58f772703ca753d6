"""Experts as one small network each, which is how checkpoints hold them; transformers stacks them in two tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Expert(nn.Module):
    """SwiGLU of the tokens routed to it. `tokens` and `shares` say which those were in the last pass, and what their
    outputs are multiplied by."""

    def __init__(self, hidden: int, inner: int, act: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self._act = act
        self.tokens = torch.zeros(0, dtype=torch.int64)
        self.shares = torch.zeros(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self._act(self.gate_proj(inputs)) * self.up_proj(inputs))
        return out


class Experts(nn.ModuleList):
    """In place of transformers' experts (modeling_qwen3_moe.py, Qwen3MoeExperts), with the same arguments."""

    @staticmethod
    def like(stacked: Any) -> Experts:
        hidden, inner = stacked.hidden_dim, stacked.intermediate_dim
        return Experts(Expert(hidden, inner, stacked.act_fn) for _ in range(stacked.num_experts))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """`hidden` [tokens, width]; `chosen`, `shares` [tokens, experts a token]."""
        total = torch.zeros_like(hidden)
        for index, expert in enumerate(self):
            tokens, places = torch.where(chosen == index)
            expert.tokens, expert.shares = tokens, shares[tokens, places]
            if len(tokens):
                total.index_add_(0, tokens, expert(hidden[tokens]) * expert.shares[:, None])
        return total
