"""NVFP4 experts (fused MoE), weight-only. vLLM asks for the classes through the hook in `oracle/nvfp4.py`.

vLLM hands over, per rank, in the checkpoint's own layout: `w13_weight` uint8 [E, 2I, H/2] (gate rows, then
up), `w13_weight_scale` E4M3 [E, 2I, H/16], `w13_weight_scale_2` float32 [E], a multiplier; `w2_*` likewise
with [E, H, I/2]. Input scales may be unset and are not used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from voltriton_vllm.codec import dequantise


def accepts(weight_key: object, activation_key: object) -> bool:
    """NVFP4 weights, with or without 4-bit activations in the checkpoint."""
    return weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic)


def expert_factors(layer: nn.Module, which: str) -> torch.Tensor:
    """Multipliers of `w13` or `w2`: [E], or [E, rows] where gate and up differ (`scales.after_load`)."""
    rows: torch.Tensor | None = getattr(layer, f"nvfp4_{which}_row_factors", None)
    return getattr(layer, f"{which}_weight_scale_2").data if rows is None else rows


@functools.cache
def experts_classes() -> list[type]:
    """Candidates in the order vLLM should try them; each refuses what it cannot run."""
    return _expanding_classes() if current_platform.is_cpu() else []


def _expanding_classes() -> list[type]:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    return [_expanding(cpu_moe.X86CPUUnquantizedExperts), _expanding(cpu_moe.CPUUnquantizedExperts)]


def _expanding(base: Any) -> type:
    """vLLM's own CPU experts, fed with weights that are expanded at load."""

    class Expanding(base):  # type: ignore[misc]  # vLLM is untyped
        @staticmethod
        def _supports_quant_scheme(weight_key: object, activation_key: object) -> bool:
            return accepts(weight_key, activation_key)

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            for which in ("w13", "w2"):
                packed = getattr(layer, f"{which}_weight")
                if packed.dtype == torch.uint8:
                    scale = getattr(layer, f"{which}_weight_scale").data
                    weight = dequantise(
                        packed.data, scale, expert_factors(layer, which), self.moe_config.in_dtype
                    )
                    replace_parameter(layer, f"{which}_weight", weight)
            super().process_weights_after_loading(layer)

    Expanding.__name__ = Expanding.__qualname__ = "NvFp4" + base.__name__
    return Expanding
