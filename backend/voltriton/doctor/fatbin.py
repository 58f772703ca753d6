"""Which GPU architectures a shared library carries code for, read from its fat binaries without CUDA's tools.

A fat binary is a 16-byte header (magic 0xBA55ED50, version, header size, size of the rest) and then entries.
An entry's header: kind (1 PTX, 2 machine code) u16, version u16, header size u32, payload size u64, ...,
at byte 28 the architecture as a number (70 for sm_70). NVIDIA does not document it; checked here against what
cuobjdump lists for NCCL 2.30.7 and vLLM 0.32.0.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_PTX, _ELF = 1, 2
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


class FatbinError(ValueError):
    """The file is no 64-bit little-endian ELF file, or is damaged."""


def device_code(path: Path) -> list[str]:
    """Sorted, without repeats: `sm_N` for machine code, `compute_N` for PTX."""
    with path.open("rb") as file:
        if path.stat().st_size < 64:
            raise FatbinError(f"{path}: too short for a shared library")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                found = {
                    code for start, size in _sections(data) for code in _codes(data, start, start + size)
                }
            except struct.error as error:
                raise FatbinError(f"{path}: damaged ELF file: {error}") from error
    return sorted(found, key=lambda code: (code.split("_")[0], int(code.split("_")[1])))


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Offset and size of each section that holds fat binaries."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise FatbinError("no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if not table or not count:
        return
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    for name, _kind, _flags, _address, offset, size in headers:
        start = names + name
        if data[start : data.find(b"\0", start)] in _SECTIONS:
            yield offset, size


def _codes(data: mmap.mmap, start: int, end: int) -> Iterator[str]:
    position = data.find(_MAGIC, start, end)
    while position >= 0:
        _version, header_size, size = struct.unpack_from("<HHQ", data, position + 4)
        stop = min(position + header_size + size, end)
        yield from _entries(data, position + header_size, stop)
        position = data.find(_MAGIC, max(stop, position + 4), end)


def _entries(data: mmap.mmap, position: int, stop: int) -> Iterator[str]:
    while position + 32 <= stop:
        kind, _version, header_size, size = struct.unpack_from("<HHIQ", data, position)
        (architecture,) = struct.unpack_from("<I", data, position + 28)
        if kind not in (_PTX, _ELF) or header_size < 32 or not 10 <= architecture < 1000:
            return
        yield f"{'compute' if kind == _PTX else 'sm'}_{architecture}"
        position += header_size + size
