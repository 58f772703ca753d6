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
from voltriton_vllm.cpu import build as cpu_build
from voltriton_vllm.cpu import linear as cpu_linear

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
        way = choose_way()
        if way == "expand":
            _expand(layer, self.dtype)
        elif way == "cpu":
            packed = cpu_linear.pack(layer.weight.data, layer.weight_scale.data, global_factors(layer))
            _replace(layer, packed.words, packed.scale, packed.factor, packed.n)
        elif way == "sm70":
            from voltriton_vllm.sm70 import ops

            rows = ops.prepare_linear(layer.weight.data, layer.weight_scale.data, global_factors(layer))
            _replace(layer, rows.words, rows.scale, rows.row_scale, rows.n)
            layer.nvfp4_k = rows.k
        layer.nvfp4_way = way

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return WAYS[layer.nvfp4_way](layer, x, bias)


def choose_way() -> str:
    """Which of WAYS the layers of this process take; the reason for a slow one is logged once."""
    if gates.mode() == "oracle":
        return "oracle"
    if current_platform.is_cpu():
        reason = cpu_build.load()
        if reason is None:
            return "cpu"
        logger.info_once(
            "NVFP4 weights are expanded at load, with the memory of the 16-bit model: %s", reason
        )
        return "expand"
    from voltriton_vllm.sm70 import ops

    reason = ops.why_unavailable()
    if reason is None:
        return "sm70"
    logger.warning_once("NVFP4 layers are dequantised at every step, which is slow: %s", reason)
    return "oracle"


def _by_oracle(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = dequantise(layer.weight, layer.weight_scale, global_factors(layer), x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def _expanded(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = layer.cpu_linear(x, layer.weight, bias)
    return result


def _by_cpu_kernel(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    packed = cpu_linear.PackedLinear(layer.weight, layer.weight_scale, layer.nvfp4_factor, layer.nvfp4_n)
    return cpu_linear.linear(x, packed, bias)


def _by_sm70_kernel(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from voltriton_vllm.sm70 import ops

    packed = ops.PackedLinear(
        layer.weight, layer.weight_scale, layer.nvfp4_factor, layer.nvfp4_n, layer.nvfp4_k
    )
    return ops.nvfp4_linear(x, packed, bias)


WAYS = {"oracle": _by_oracle, "expand": _expanded, "cpu": _by_cpu_kernel, "sm70": _by_sm70_kernel}


def _replace(layer: Any, words: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, n: int) -> None:
    """The packed tensors take the place of the checkpoint's, as parameters, where torch.compile finds them."""
    for name, tensor in (("weight", words), ("weight_scale", scale), ("nvfp4_factor", factor)):
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
    layer.nvfp4_n = n


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
