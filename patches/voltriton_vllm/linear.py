"""NVFP4 linear layers, weight-only: activations keep their 16 (or 32) bits, also for W4A4 checkpoints.

One kernel class for vLLM, three ways behind it: the C++ kernel on a CPU, the CUDA kernels on an NVIDIA GPU,
and the oracle (dequantise, then multiply), which the others are tested against and which runs anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.platforms import PlatformEnum, current_platform

from voltriton_vllm import gates
from voltriton_vllm.codec import dequantise

logger = init_logger("vllm.voltriton")

BACKEND = "voltriton"


class VoltritonNvFp4LinearKernel(NvFp4LinearKernel):  # type: ignore[misc]  # vLLM is untyped
    """vLLM hands over, per rank and for both checkpoint layouts: `weight` uint8 [N, K/2]; `weight_scale` E4M3
    [N, K/16], row-major; `weight_global_scale`, a float32 scalar and multiplier; N is the fused width."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        vllm_config = get_current_vllm_config_or_none()
        model_config = getattr(vllm_config, "model_config", None)
        self.dtype: torch.dtype = torch.get_default_dtype() if model_config is None else model_config.dtype

    @classmethod
    def takes(cls, linear_backend: str, use_a16: bool) -> bool:
        """Asked by the hook in `init_nvfp4_linear_kernel`: is this the kernel for a new layer?"""
        taken = linear_backend == BACKEND or (linear_backend == "auto" and gates.needs_our_kernels())
        if taken and not use_a16:
            logger.info_once(
                "The checkpoint is made for 4-bit activations (W4A4); here they keep their 16 bits."
            )
        return taken

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: object) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        if current_platform.is_cpu() and gates.mode() != "oracle":
            _expand(layer, self.dtype)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if hasattr(layer, "cpu_linear"):
            return layer.cpu_linear(x, layer.weight, bias)
        weight = dequantise(layer.weight, layer.weight_scale, global_factors(layer), x.dtype)
        return torch.nn.functional.linear(x, weight, bias)


def global_factors(layer: Any) -> torch.Tensor:
    """One multiplier, or one an output row where the fused parts differ (`scales.after_load`)."""
    rows: torch.Tensor | None = getattr(layer, "nvfp4_row_factors", None)
    return layer.weight_global_scale.data if rows is None else rows


def _expand(layer: Any, dtype: torch.dtype) -> None:
    """Replace the packed weight by its values and let vLLM's own CPU GEMM multiply."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    weight = dequantise(layer.weight.data, layer.weight_scale.data, global_factors(layer), dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    del layer.weight_scale
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


def register() -> None:
    """Make the kernel known to vLLM under `linear_backend="voltriton"`. May be called more than once."""
    kernels = vllm_linear._LINEAR_BACKEND_KERNEL_MAP.setdefault(BACKEND, set())
    if VoltritonNvFp4LinearKernel in kernels:
        return
    kernels.add(VoltritonNvFp4LinearKernel)
    for platform in (PlatformEnum.CPU, PlatformEnum.CUDA):
        vllm_linear.register_linear_kernel(VoltritonNvFp4LinearKernel, platform, "nvfp4")
