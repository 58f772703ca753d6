"""Reads a model's folder: `config.json`, and names, types and shapes out of the safetensors headers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voltriton.errors import InvalidArgument
from voltriton.settings import read_object

# A header is JSON of some hundred bytes a tensor; 512 MiB is beyond any real one.
_MAX_HEADER = 512 << 20
BYTES = {
    "F64": 8.0,
    "F32": 4.0,
    "F16": 2.0,
    "BF16": 2.0,
    "I64": 8.0,
    "I32": 4.0,
    "I16": 2.0,
    "I8": 1.0,
    "U8": 1.0,
    "BOOL": 1.0,
    "F8_E4M3": 1.0,
    "F8_E5M2": 1.0,
    "F4": 0.5,
}


class PlanError(ValueError):
    """The model's folder or the request cannot be planned; the message says what is wrong and what is needed."""


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return int(count * BYTES.get(self.dtype, 1.0))


@dataclass(frozen=True)
class Config:
    """`config.json`, the text model's part; every look-up that fails names the key and what it is for."""

    values: dict[str, Any]
    architecture: str
    model_type: str
    quantization: dict[str, Any] = field(default_factory=dict)
    has_vision: bool = False

    def number(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise PlanError(f"config.json: key {name} is missing; {self.model_type} needs it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlanError(f"config.json: {name}: got {value!r}, a whole number of at least 0 is needed")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.values.get(name, default))

    def numbers(self, name: str) -> list[int]:
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise PlanError(f"config.json: {name}: got {value!r}, a list of whole numbers is needed")
        return value


@dataclass(frozen=True)
class ModelFiles:
    folder: Path
    config: Config
    tensors: dict[str, Tensor]
    """Empty where the folder has no safetensors file (only its JSON files)."""
    total_bytes: int | None
    """Of all tensors: from the headers, else from the index's `total_size`."""


def read_model(folder: Path) -> ModelFiles:
    if not folder.is_dir():
        raise PlanError(f"{folder}: no such folder; a local folder with config.json is needed")
    tensors = dict(_tensors(folder))
    index = _optional_json(folder / "model.safetensors.index.json")
    total = sum(tensor.bytes for tensor in tensors.values()) if tensors else None
    said = (index or {}).get("metadata", {})
    if total is None and isinstance(said, dict) and isinstance(said.get("total_size"), int | float):
        total = int(said["total_size"])
    return ModelFiles(folder, read_config(folder), tensors, total)


def read_config(folder: Path) -> Config:
    raw = _json(folder / "config.json")
    text = raw.get("text_config")
    values = {**raw, **text} if isinstance(text, dict) else raw
    # transformers 5 saves Qwen3-MoE's under the other name.
    values = {**values, "num_experts": values.get("num_experts") or values.get("num_local_experts")}
    names = raw.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    return Config(
        values=values,
        architecture=architecture,
        model_type=str(values.get("model_type") or "an unknown model type"),
        quantization=_quantization(folder, raw),
        has_vision=isinstance(raw.get("vision_config"), dict),
    )


def _quantization(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """From config.json, or ModelOpt's older file beside it."""
    found = raw.get("quantization_config") or raw.get("compression_config")
    if isinstance(found, dict):
        return found
    legacy = (_optional_json(folder / "hf_quant_config.json") or {}).get("quantization")
    return dict(legacy) if isinstance(legacy, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except InvalidArgument as error:
        raise PlanError(str(error)) from None


def _optional_json(path: Path) -> dict[str, Any] | None:
    return _json(path) if path.is_file() else None


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                yield name, _tensor(path, name, entry)


def _header(path: Path) -> dict[str, Any]:
    """The file begins with the header's length as a little-endian u64, then that many bytes of JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                raise PlanError(
                    f"{path}: a header of {length} bytes; the file is damaged or no safetensors file"
                )
            header = json.loads(file.read(length))
    except (OSError, struct.error, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path}: the header cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise PlanError(f"{path}: the header is no JSON object")
    return header


def _tensor(path: Path, name: str, entry: Any) -> Tensor:
    try:
        return Tensor(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
    except (KeyError, TypeError, ValueError):
        raise PlanError(f"{path}: tensor {name} has no dtype and shape") from None
