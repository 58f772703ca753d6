"""Checks of an NVFP4 checkpoint's scales, and layers whose parts have unequal global scales.

vLLM allocates scales without a value and does not notice when a checkpoint lacks one: the layer then
computes with whatever was in memory. `before_load` therefore fills them with NaN, and `after_load` (before
vLLM changes names or layouts) refuses what is still NaN, infinite, or a global scale of zero, by the tensor's
name.

Fused layers (q/k/v, gate/up) have one global scale a part. vLLM keeps the largest (MoE: the first) for all
of them, which is wrong for the others by the ratio. `after_load` keeps one factor an output row where they
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from voltriton_vllm.codec import GROUP

# Parameter name (ModelOpt, compressed-tensors) -> True if it is a divisor.
LINEAR_GLOBAL = {"weight_scale_2": False, "weight_global_scale": True}
EXPERT_GLOBAL = {
    "w13_weight_scale_2": False,
    "w13_weight_global_scale": True,
    "w2_weight_scale_2": False,
    "w2_weight_global_scale": True,
}
INPUT_SCALES = ("input_scale", "input_global_scale")
EXPERT_INPUT_SCALES = (
    "w13_input_scale",
    "w13_input_global_scale",
    "w2_input_scale",
    "w2_input_global_scale",
)
PACKED = ("weight", "weight_packed")
EXPERT_PACKED = ("w13_weight", "w13_weight_packed", "w2_weight", "w2_weight_packed")


class CheckpointError(ValueError):
    """An NVFP4 checkpoint cannot be loaded; the message names the tensor, what was found and what to do."""


@dataclass(frozen=True)
class Layer:
    """A module with NVFP4 weights: its path, its scales by parameter name, and the names of its parts."""

    path: str
    module: nn.Module
    scales: dict[str, torch.Tensor]
    parts: tuple[str, ...]
    experts: bool


def before_load(model: nn.Module) -> None:
    """Refuse widths that cut a scale group; mark every scale as not loaded."""
    for layer in nvfp4_layers(model):
        _check_groups(layer)
        for tensor in layer.scales.values():
            tensor.fill_(float("nan"))


def after_load(model: nn.Module) -> None:
    """Refuse missing and non-finite scales; remember unequal global scales, one factor an output row."""
    for layer in nvfp4_layers(model):
        for name, scale in layer.scales.items():
            _check_finite(layer, name, scale)
        if layer.experts:
            _keep_expert_factors(layer)
        else:
            _keep_row_factors(layer)


def nvfp4_layers(model: nn.Module) -> Iterator[Layer]:
    """All modules that hold packed NVFP4 weights (uint8, with E4M3 scales), linear layers and experts."""
    mapping: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for path, module in model.named_modules():
        tensors = {name: p.data for name, p in module.named_parameters(recurse=False)}
        experts = any(name in tensors and tensors[name].dtype == torch.uint8 for name in EXPERT_PACKED)
        linear = any(name in tensors and tensors[name].dtype == torch.uint8 for name in PACKED)
        block = tensors.get("w13_weight_scale" if experts else "weight_scale")
        if not (experts or linear) or block is None or block.dtype != torch.float8_e4m3fn:
            continue
        wanted = _expert_scale_names(module) if experts else _linear_scale_names(module)
        scales = {name: tensors[name] for name in wanted if name in tensors}
        parts = tuple(mapping.get(path.rpartition(".")[2], ()))
        yield Layer(path, module, scales, parts, experts)


def _linear_scale_names(module: nn.Module) -> tuple[str, ...]:
    names = ("weight_scale", *LINEAR_GLOBAL)
    return names if _is_weight_only(module) else (*names, *INPUT_SCALES)


def _expert_scale_names(module: nn.Module) -> tuple[str, ...]:
    names = ("w13_weight_scale", "w2_weight_scale", *EXPERT_GLOBAL)
    return names if _is_weight_only(module) else (*names, *EXPERT_INPUT_SCALES)


def _is_weight_only(module: nn.Module) -> bool:
    """Such layers may have input scales too (for old exports), which no checkpoint needs to fill."""
    method = getattr(module, "quant_method", None)
    spec = getattr(method, "spec", None)  # ModelOptLinearMethod
    return bool(getattr(method, "use_a16", False)) or (spec is not None and spec.activation is None)


def _check_groups(layer: Layer) -> None:
    pairs = (
        (("w13_weight", "w13_weight_scale"), ("w2_weight", "w2_weight_scale"))
        if layer.experts
        else (("weight", "weight_scale"),)
    )
    tensors = dict(layer.module.named_parameters(recurse=False))
    for packed_name, _scale_name in pairs:
        packed = tensors.get(packed_name, tensors.get(packed_name + "_packed"))
        width = getattr(layer.module, "input_size_per_partition", None)
        if packed is not None and (layer.experts or width is None):
            width = packed.shape[-1] * 2
        if width is not None and width % GROUP:
            name = f"{layer.path}.{packed_name}" if layer.experts else layer.path
            raise CheckpointError(
                f"{name}: input width {width} of this rank is no multiple of the NVFP4 scale group {GROUP}; "
                "use a smaller tensor_parallel_size"
            )


def _check_finite(layer: Layer, name: str, scale: torch.Tensor) -> None:
    values = scale.to(torch.float32)
    bad = ~torch.isfinite(values)
    if name in LINEAR_GLOBAL or name in EXPERT_GLOBAL:
        bad |= values == 0
    if not bad.any():
        return
    index = tuple(int(i) for i in bad.nonzero()[0])
    found = "missing in the checkpoint, or NaN" if values[index].isnan() else f"{float(values[index])}"
    raise CheckpointError(
        f"{_tensor_name(layer, name, index)}: NVFP4 scale is {found} ({int(bad.sum())} of {bad.numel()} "
        f"values of {layer.path}.{name}); convert the checkpoint again (`voltriton verify` lists them)"
    )


def _tensor_name(layer: Layer, name: str, index: tuple[int, ...]) -> str:
    """The checkpoint's name of a scale, as far as the model tells: experts by number, fused parts by name."""
    if layer.experts:
        stem, part = _expert_part(layer, name, index)
        return f"{layer.path}.{index[0]}.{part}.{stem}"
    if len(layer.parts) < 2:
        return f"{layer.path}.{name}"
    which = index[0] if name != "weight_scale" else _part_of_row(layer, index[0])
    return f"{layer.path.rpartition('.')[0]}.{layer.parts[which]}.{name}"


def _expert_part(layer: Layer, name: str, index: tuple[int, ...]) -> tuple[str, str]:
    prefix, _, stem = name.partition("_")
    if prefix == "w2":
        return stem, "down_proj"
    half = layer.scales[name].shape[1] // 2 if layer.scales[name].ndim > 1 else 1
    second = len(index) > 1 and index[1] >= max(half, 1)
    return stem, "up_proj" if second else "gate_proj"


def _part_of_row(layer: Layer, row: int) -> int:
    widths: list[int] = list(getattr(layer.module, "logical_widths", ()))
    for i, width in enumerate(widths):
        if row < width:
            return min(i, len(layer.parts) - 1)
        row -= width
    return 0


def _multipliers(layer: Layer, names: Mapping[str, bool], prefix: str = "") -> torch.Tensor | None:
    for name, is_divisor in names.items():
        if name.startswith(prefix) and name in layer.scales:
            values = layer.scales[name].to(torch.float32)
            return 1.0 / values if is_divisor else values
    return None


def _keep_row_factors(layer: Layer) -> None:
    factors = _multipliers(layer, LINEAR_GLOBAL)
    if factors is None or factors.numel() < 2 or bool((factors == factors[0]).all()):
        return
    widths = torch.tensor(list(getattr(layer.module, "logical_widths", ())), device=factors.device)
    layer.module.nvfp4_row_factors = factors.repeat_interleave(widths)


def _keep_expert_factors(layer: Layer) -> None:
    factors = _multipliers(layer, EXPERT_GLOBAL, "w13")
    if factors is None or factors.ndim != 2 or factors.shape[1] != 2:
        return
    if not torch.equal(factors[:, 0], factors[:, 1]):
        rows = layer.scales["w13_weight_scale"].shape[1] // 2
        layer.module.nvfp4_w13_row_factors = factors.repeat_interleave(rows, 1)
