"""torch.compile in a vLLM without its CUDA extensions.

vLLM's compiler passes name operators of the extensions when they are imported and while they clean up a graph, whether
or not they fuse anything into them. The names are declared here, where nobody else has; a call fails by the name. The
fusions themselves (of activations and norms with FP8 and FP4 quantisation) are turned off: they have no operators.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from voltriton_vllm import missing_ops

# Named without a question by vllm/compilation/passes.
NAMES = (
    "static_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "silu_and_mul_quant",
    "silu_and_mul_per_block_quant",
    "fused_qk_norm_rope",
)
FUSIONS = (
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_attn_quant",
    "fuse_rope_kvcache_cat_mla",
    "enable_qk_norm_rope_fusion",
)


def prepare() -> None:
    """Declare the names; where one was missing, keep the fusions off. May be called again."""
    missing = [name for name in NAMES if not hasattr(torch.ops._C, name)]
    for name in missing:
        missing_ops.library("_C").define(f"{name}() -> ()")  # type: ignore[no-untyped-call]
    if missing:
        _keep_fusions_off(type(current_platform))


def _keep_fusions_off(platform: Any) -> None:
    original = platform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(vllm_config)
        for name in FUSIONS:
            setattr(vllm_config.compilation_config.pass_config, name, False)

    platform.check_and_update_config = classmethod(check_and_update_config)
