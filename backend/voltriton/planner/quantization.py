"""Which matrices are NVFP4 in a checkpoint: from the safetensors headers, else from the configuration's exclusions."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter

from voltriton.planner.files import ModelFiles, PlanError
from voltriton.planner.layout import Weight

# 4 bits a number and an e4m3 scale (8 bits) a block of 16.
NVFP4_BYTES = 0.5 + 1 / 16
_NUMBERS = re.compile(r"\.\d+(?=\.|$)")
_MODEL_PREFIX = re.compile(r"^(model\.)?(language_model\.)?(model\.)?(layers\.)?")
_SCALES = (".weight_scale", ".weight_scale_inv", "_weight_scale", ".weight_packed")
# vLLM holds these fused; a checkpoint may hold the parts.
_FUSED = {
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}


def is_nvfp4(files: ModelFiles) -> bool:
    found = files.config.quantization
    text = " ".join(
        str(found.get(key, "")) for key in ("quant_algo", "format", "quant_method", "quantization")
    ).lower()
    return "nvfp4" in text or ("fp4" in text and "mxfp4" not in text)


def quantized_names(files: ModelFiles, layout: list[Weight]) -> frozenset[str]:
    """Names of `layout` whose matrices are NVFP4; mixed over the layers counts when most are."""
    if not is_nvfp4(files):
        return frozenset()
    if files.tensors:
        return _from_headers(files, layout)
    excluded = (
        files.config.quantization.get("ignore") or files.config.quantization.get("exclude_modules") or []
    )
    patterns = [str(item) for item in excluded] if isinstance(excluded, list) else []
    return frozenset(
        weight.name for weight in layout if weight.quantizable and not _excluded(weight.name, patterns)
    )


def plain(name: str) -> str:
    """`model.layers.3.mlp.experts.7.down_proj` -> `mlp.experts.down_proj`."""
    return _MODEL_PREFIX.sub("", _NUMBERS.sub("", name))


def _from_headers(files: ModelFiles, layout: list[Weight]) -> frozenset[str]:
    have: Counter[str] = Counter()
    for name in files.tensors:
        for ending in _SCALES:
            if name.endswith(ending):
                have[plain(name.removesuffix(ending))] += 1
                break
    return frozenset(
        weight.name
        for weight in layout
        if weight.quantizable and any(have[part] for part in (weight.name, *_FUSED.get(weight.name, ())))
    )


def _excluded(name: str, patterns: list[str]) -> bool:
    """ModelOpt writes globs (`*self_attn*`), compressed-tensors names and `re:` expressions."""
    full = f"model.layers.0.{name}"
    return any(_matches(pattern, full, name) for pattern in patterns)


def _matches(pattern: str, full: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return bool(re.match(pattern[3:], full) or re.match(pattern[3:], name))
        except re.error as error:
            raise PlanError(f"quantization_config: {pattern!r} is no regular expression: {error}") from None
    if "*" in pattern:
        return fnmatch.fnmatch(full, pattern) or fnmatch.fnmatch(name, pattern)
    return bool(plain(pattern)) and plain(pattern) in name
