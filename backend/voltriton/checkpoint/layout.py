"""Names, shapes and metadata of the two NVFP4 layouts that vLLM reads."""

from __future__ import annotations

from typing import Any

import torch

from voltriton import __version__
from voltriton.checkpoint.codec import BLOCK, Rule
from voltriton.checkpoint.tensors import Spec


def tensor_names(module: str, rule: Rule) -> tuple[str, str, str, str]:
    """Packed values, block scales, global scale, input scale."""
    if rule is Rule.COMPRESSED_TENSORS:
        leaves = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    else:
        leaves = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    packed, scale, top, given = (f"{module}.{leaf}" for leaf in leaves)
    return packed, scale, top, given


def tensor_specs(module: str, shape: tuple[int, ...], rule: Rule, input_scale: bool) -> list[Spec]:
    """What a quantised [rows, columns] weight becomes. ModelOpt stores scalars, compressed-tensors [1]."""
    rows, columns = shape
    packed, scale, top, given = tensor_names(module, rule)
    scalar: tuple[int, ...] = (1,) if rule is Rule.COMPRESSED_TENSORS else ()
    specs = [
        Spec(packed, torch.uint8, (rows, columns // 2)),
        Spec(scale, torch.float8_e4m3fn, (rows, columns // BLOCK)),
        Spec(top, torch.float32, scalar),
    ]
    return [*specs, Spec(given, torch.float32, scalar)] if input_scale else specs


def quantisation_config(rule: Rule, input_scale: bool, kept: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. `kept`: modules that stay in 16 bit."""
    ignore = sorted({*kept, "lm_head"})
    producer = {"name": "voltriton", "version": __version__}
    if rule is Rule.MODELOPT:
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if input_scale else "W4A16_NVFP4",
            "group_size": BLOCK,
            "ignore": ignore,
            "producer": producer,
        }
    weights = _ct_arguments(dynamic=False)
    given = _ct_arguments(dynamic="local") if input_scale else None
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": given,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _ct_arguments(dynamic: bool | str) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": dynamic,
        "observer": "minmax",
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    }


def legacy_config(quantisation: dict[str, Any]) -> dict[str, Any]:
    """hf_quant_config.json, which older readers of ModelOpt checkpoints want beside config.json."""
    return {
        "producer": quantisation["producer"],
        "quantization": {
            "quant_algo": quantisation["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": quantisation["group_size"],
            "exclude_modules": quantisation["ignore"],
        },
    }
