"""The model folder that is read: its configuration, its tensors, and weights as float32 rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from voltriton.checkpoint.codec import Rule, dequantise
from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.tensors import Spec, Stored, read_header

SIXTEEN_BIT = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Weight(Protocol):
    """A matrix whose rows can be had as float32."""

    @property
    def spec(self) -> Spec: ...

    @property
    def row_multiple(self) -> int: ...

    def rows(self, begin: int, end: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Plain:
    stored: Stored
    row_multiple: int = 1

    @property
    def spec(self) -> Spec:
        return self.stored.spec

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.stored.rows(begin, end).float()


@dataclass(frozen=True)
class Fp8Block:
    """FP8 weight [N, K] with a scale a block of `block` x `block`, stored as `weight_scale_inv` (a multiplier
    in spite of its name: DeepSeek-V3's layout, also Qwen's FP8 releases)."""

    weight: Stored
    scale: Stored
    row_multiple: int

    @property
    def spec(self) -> Spec:
        return Spec(self.weight.spec.name, torch.bfloat16, self.weight.spec.shape)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        block = self.row_multiple
        scale = self.scale.rows(begin // block, -(-end // block)).float()
        wide = scale.repeat_interleave(block, 0)[: end - begin].repeat_interleave(block, 1)
        return self.weight.rows(begin, end).float() * wide[:, : self.spec.shape[1]]


@dataclass(frozen=True)
class Nvfp4:
    """An NVFP4 weight of either layout; `global_scale` as stored."""

    module: str
    packed: Stored
    scale: Stored
    global_scale: Stored
    rule: Rule
    input_scale: Stored | None = None
    row_multiple: int = 1

    @property
    def spec(self) -> Spec:
        rows, half = self.packed.spec.shape
        return Spec(f"{self.module}.weight", torch.bfloat16, (rows, half * 2))

    def rows(self, begin: int, end: int) -> torch.Tensor:
        scale, top = self.scale.rows(begin, end), self.global_scale.rows().reshape(())
        return dequantise(self.packed.rows(begin, end), scale, top, self.rule)


class Source:
    """A Hugging Face folder. `weights`: name -> matrix or vector; `nvfp4`: module -> packed weight."""

    def __init__(self, path: Path):
        self.path = path
        self.config = read_config(path)
        self.stored = read_folder(path)
        self.quantisation = quantisation_of(path, self.config)
        self.weights: dict[str, Weight] = {}
        self.nvfp4: dict[str, Nvfp4] = {}
        self._sort()

    def _sort(self) -> None:
        method = str(self.quantisation.get("quant_method", ""))
        if not self.quantisation:
            self.weights = {name: Plain(t) for name, t in self.stored.items()}
        elif method == "fp8" and self.quantisation.get("weight_block_size"):
            self._sort_fp8(self.quantisation["weight_block_size"])
        elif self.rule is not None:
            self._sort_nvfp4(self.rule)
        else:
            what = self.quantisation.get("format") or self.quantisation.get("quant_algo") or method
            raise CheckpointError(
                f"{self.path} is already quantised ({method}, {what}): give the 16-bit model, FP8 with block "
                "scales, or NVFP4 in the other layout"
            )

    @property
    def names(self) -> set[str]:
        """All weights by the names they have in a 16-bit folder."""
        return set(self.weights) | {f"{module}.weight" for module in self.nvfp4}

    def matrix(self, name: str) -> Weight:
        """A weight as numbers, packed or not."""
        packed = self.nvfp4.get(name.removesuffix(".weight"))
        if packed is not None:
            return packed
        if name not in self.weights:
            raise CheckpointError(f"{self.path}: {name} is missing")
        return self.weights[name]

    @property
    def rule(self) -> Rule | None:
        """The NVFP4 layout of this folder, or None."""
        return nvfp4_rule(self.quantisation)

    def _sort_fp8(self, block: list[int]) -> None:
        if len(block) != 2 or block[0] != block[1]:
            raise CheckpointError(
                f"{self.path}: weight_block_size {block} is not handled, only square blocks"
            )
        for name, tensor in self.stored.items():
            if name.endswith("_scale_inv"):
                continue
            if tensor.spec.dtype is not torch.float8_e4m3fn:
                self.weights[name] = Plain(tensor)
                continue
            scale = self.stored.get(f"{name}_scale_inv")
            if scale is None:
                raise CheckpointError(f"{self.path}: {name} is FP8 but {name}_scale_inv is missing")
            want = tuple(-(-n // block[0]) for n in tensor.spec.shape)
            if scale.spec.shape != want:
                raise CheckpointError(
                    f"{self.path}: {scale.spec.name} has shape {scale.spec.shape}, not {want}"
                )
            self.weights[name] = Fp8Block(tensor, scale, block[0])

    def _sort_nvfp4(self, rule: Rule) -> None:
        ct = rule is Rule.COMPRESSED_TENSORS
        packed_name, global_name = (
            ("weight_packed", "weight_global_scale") if ct else ("weight", "weight_scale_2")
        )
        input_name = "input_global_scale" if ct else "input_scale"
        used: set[str] = set()
        for name, tensor in self.stored.items():
            if not name.endswith("." + packed_name) or tensor.spec.dtype is not torch.uint8:
                continue
            module = name.removesuffix("." + packed_name)
            parts = [f"{module}.weight_scale", f"{module}.{global_name}"]
            for part in parts:
                if part not in self.stored:
                    raise CheckpointError(f"{self.path}: {part} is missing beside {name}")
            extra = f"{module}.{input_name}"
            scale, top = (self.stored[p] for p in parts)
            self.nvfp4[module] = Nvfp4(module, tensor, scale, top, rule, self.stored.get(extra))
            used |= {name, *parts, extra}
        self.weights = {name: Plain(t) for name, t in self.stored.items() if name not in used}
        if not self.nvfp4:
            raise CheckpointError(f"{self.path}: the configuration says NVFP4 but no packed weight is there")


def read_config(path: Path) -> dict[str, Any]:
    return read_json(path / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file.parent} is no model folder: {file.name} is missing")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged: no JSON object")
    return content


def quantisation_of(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The quantisation of a folder in one form; ModelOpt's older exports keep it in hf_quant_config.json."""
    inline = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if inline:
        return dict(inline)
    legacy = path / "hf_quant_config.json"
    if legacy.is_file():
        return {"quant_method": "modelopt", **read_json(legacy).get("quantization", {})}
    return {}


def nvfp4_rule(quantisation: dict[str, Any]) -> Rule | None:
    """By metadata only, never by looking at magnitudes."""
    method = str(quantisation.get("quant_method", ""))
    if method == "compressed-tensors" and quantisation.get("format") == "nvfp4-pack-quantized":
        return Rule.COMPRESSED_TENSORS
    if method.startswith("modelopt") and "NVFP4" in str(quantisation.get("quant_algo", "")):
        return Rule.MODELOPT
    return None


def read_folder(path: Path) -> dict[str, Stored]:
    """All tensors of a folder, by its index if it has one; every file is checked against its size."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        single = path / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{path} has no model.safetensors and no index of several")
        return read_header(single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} is damaged: no weight_map")
    files: dict[str, dict[str, Stored]] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing (named by {index.name})")
        files[name] = read_header(path / name)
    for tensor, name in weight_map.items():
        if tensor not in files[name]:
            raise CheckpointError(f"{path / name}: tensor {tensor} is missing (named by {index.name})")
    return {tensor: files[name][tensor] for tensor, name in weight_map.items()}


def split_experts(weights: dict[str, Weight]) -> dict[str, Weight]:
    """Stacked experts [E, 2I, H] and [E, H, I] as one matrix an expert and projection, which is how NVFP4
    checkpoints hold them; gate is the first half of `gate_up_proj` (transformers, modeling_qwen3_5_moe.py)."""
    split: dict[str, Weight] = {}
    for name, weight in weights.items():
        stem, _, leaf = name.rpartition(".")
        stacked = leaf in ("gate_up_proj", "down_proj") and stem.endswith("experts")
        if not (stacked and isinstance(weight, Plain) and len(weight.spec.shape) == 3):
            split[name] = weight
            continue
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        count, rows, columns = weight.spec.shape
        shape = (rows // len(leaves), columns)
        for i in range(count * len(leaves)):
            spec = Spec(
                f"{stem}.{i // len(leaves)}.{leaves[i % len(leaves)]}.weight", weight.spec.dtype, shape
            )
            split[spec.name] = Plain(Stored(spec, weight.stored.path, weight.stored.start + i * spec.nbytes))
    return split
