"""Which quantisations run on a GPU older than 7.5, asked before anything is allocated.

vLLM's own check looks at a format's lowest capability only. Several formats pass it on Volta although every
kernel behind them needs 7.5 or more, or an extension that was not built: those fail in the middle of the
load, or worse, compute with an empty kernel. Here each has one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CONVERT = "convert the 16-bit model to NVFP4 (`voltriton convert`)"
SERVED = ("modelopt_fp4", "modelopt_mixed", "compressed-tensors")
# Per layer, by the module that makes it: these parts of a mixed checkpoint have kernels of ours.
SERVED_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
CUDA_CORE = "needs kernels for compute capability 7.5 or newer"
FP8 = "needs FP8 arithmetic, which begins with compute capability 8.9 (weight-only: 7.5)"
REASONS = {
    "awq": CUDA_CORE,
    "auto_awq": CUDA_CORE,
    "awq_marlin": CUDA_CORE,
    "gptq": CUDA_CORE,
    "auto_gptq": CUDA_CORE,
    "gptq_marlin": CUDA_CORE,
    "moe_wna16": CUDA_CORE,
    "humming": CUDA_CORE,
    "inc": CUDA_CORE,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "modelopt": FP8,
    "modelopt_mxfp8": FP8,
    "deepseek_v4_fp8": FP8,
    "mxfp4": CUDA_CORE,
    "gpt_oss_mxfp4": CUDA_CORE,
}


class FormatError(ValueError):
    """The quantisation of a checkpoint has no kernel on this device; the message says what to do."""


class Named(Protocol):
    def get_name(self) -> str: ...


def refusal(name: str, capability: int, algorithms: Sequence[str] = ()) -> str | None:
    """Why quantisation `name` does not run at `capability` (70 for 7.0); None where it does.

    algorithms: of the layers of a `modelopt_mixed` checkpoint.
    """
    if capability >= 75:
        return None
    device = f"compute capability {capability // 10}.{capability % 10}"
    foreign = sorted({a for a in algorithms if a.upper() not in SERVED_ALGORITHMS})
    if name in SERVED and not foreign:
        return None
    if foreign:
        return f"quantisation {name}: layers in {', '.join(foreign)} have no kernel for {device}; {CONVERT}"
    return f"quantisation {name} {REASONS.get(name, 'has no kernel')} and this is {device}; {CONVERT}"


def check(config: Named, capability: int) -> None:
    """Hook in `VllmConfig._get_quantization_config`. Raises FormatError in one line."""
    layers = getattr(config, "quantized_layers", None) or {}
    algorithms = [str(layer.get("quant_algo", "")) for layer in layers.values()]
    reason = refusal(config.get_name(), capability, algorithms)
    if reason is not None:
        raise FormatError(reason)
