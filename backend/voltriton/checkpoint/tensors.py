"""safetensors files as rows of bytes: read by range, written at fixed places, never whole in memory.

The format (huggingface/safetensors, README "Format"): 8 bytes little-endian header length, a JSON header of
{name: {dtype, shape, data_offsets}}, then the data. As all shapes are known before the first byte is
written, the header goes first and threads then write tensors at their places in any order.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from voltriton.checkpoint.errors import FETCH_AGAIN, CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Spec:
    """What a tensor is: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: what it is and where its bytes begin."""

    spec: Spec
    path: Path
    start: int

    def rows(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows begin..end (all of them by default) in the stored dtype."""
        shape = self.spec.shape
        if not shape:
            return self._read(0, self.spec.nbytes).view(self.spec.dtype).reshape(())
        end = shape[0] if end is None else end
        flat = self._read(begin * self.spec.row_bytes, (end - begin) * self.spec.row_bytes)
        return flat.view(self.spec.dtype).reshape(end - begin, *shape[1:])

    def _read(self, offset: int, nbytes: int) -> torch.Tensor:
        buffer = bytearray(nbytes)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + offset)
            if nbytes and file.readinto(buffer) != nbytes:
                raise CheckpointError(
                    f"{self.path}: the file ends inside tensor {self.spec.name}: {FETCH_AGAIN}"
                )
        return torch.frombuffer(buffer, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, its structure checked against its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path}: not a safetensors file, or cut off (header of {length} bytes): {FETCH_AGAIN}"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(
                f"{path}: the safetensors header is damaged ({error}): {FETCH_AGAIN}"
            ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is damaged (no JSON object): {FETCH_AGAIN}")
    return {n: _entry(path, n, row, 8 + length, size) for n, row in header.items() if n != "__metadata__"}


def _entry(path: Path, name: str, row: object, base: int, size: int) -> Stored:
    try:
        dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]  # type: ignore[index]
        numbers = all(isinstance(x, int) and x >= 0 for x in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header entry of {name} is damaged") from None
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; known are {', '.join(DTYPES)}")
    spec = Spec(name, DTYPES[dtype], shape)
    if not numbers or end - begin != spec.nbytes:
        raise CheckpointError(f"{path}: the header entry of {name} is damaged (shape and offsets disagree)")
    if base + end > size:
        raise CheckpointError(
            f"{path} is incomplete, cut off at byte {size}, where {name} ends at {base + end}: {FETCH_AGAIN}"
        )
    return Stored(spec, path, base + begin)


class FileWriter:
    """One safetensors file of known content, made at its full size; threads write into their own ranges."""

    def __init__(self, path: Path, specs: Iterable[Spec]):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._path = path
        self._start: dict[str, int] = {}
        self._specs: dict[str, Spec] = {}
        for spec in specs:
            self._specs[spec.name] = spec
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            self._start[spec.name] = offset
            offset += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.pwrite(self._fd, struct.pack("<Q", len(text)) + text, 0)
        os.ftruncate(self._fd, 8 + len(text) + offset)
        self._start = {name: 8 + len(text) + at for name, at in self._start.items()}

    def write(self, name: str, byte_offset: int, data: torch.Tensor) -> None:
        """Put the bytes of `data` at `byte_offset` of tensor `name`."""
        view = memoryview(data.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        at = self._start[name] + byte_offset
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done

    def stored(self, name: str) -> Stored:
        return Stored(self._specs[name], self._path, self._start[name])

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
