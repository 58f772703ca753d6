"""Products with weights that stay in 16 bits (lm_head, routers, projections of Gated DeltaNet, hyper-connections).

With few rows they are bound by reading the weights: on devices that run our kernels because vLLM has none, one of ours
does that. Elsewhere, with more rows, and everywhere with `VOLTRITON_UNQUANTISED=vllm`, it is cuBLAS as in vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from voltriton_vllm import gates

NAME = "VOLTRITON_UNQUANTISED"


def gemm() -> Callable[..., torch.Tensor] | None:
    """Asked by the hook in `dispatch_unquantized_gemm`: what multiplies in place of vLLM's own, or None.

    Raises ValueError on a value of the switch that is not one.
    """
    wanted = os.environ.get(NAME, "auto")
    if wanted not in ("auto", "vllm"):
        raise ValueError(f"{NAME}: got {wanted!r}, allowed: auto, vllm")
    if wanted == "vllm" or not gates.needs_our_kernels() or gates.mode() == "oracle":
        return None
    from voltriton_vllm.sm70 import ops

    return _multiply if ops.available() else None  # lm_head asks at every step: kept by `available`


def _multiply(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    from voltriton_vllm.sm70 import linear

    if x.dtype != torch.float16 or weight.dtype != torch.float16:
        return torch.nn.functional.linear(x, weight, bias)
    y: torch.Tensor = linear.half_matmul(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], -1)
