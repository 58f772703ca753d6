"""Values to and from the bytes of KServe tensors, for the few types of the contract.

Raw contents are little-endian; BYTES elements are each led by their length as uint32
(https://github.com/kserve/kserve/blob/master/docs/predict-api/v2/extensions).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

_FORMATS = {"INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f", "FP64": "d", "BOOL": "?"}


def pack(datatype: str, values: Sequence[Any]) -> bytes:
    """The raw contents of a one-dimensional tensor of `values` (str or bytes for BYTES)."""
    if datatype == "BYTES":
        return b"".join(_pack_text(value) for value in values)
    return struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)


def _pack_text(value: str | bytes) -> bytes:
    data = value.encode("utf-8") if isinstance(value, str) else value
    return struct.pack("<I", len(data)) + data


def unpack(datatype: str, data: bytes) -> list[Any]:
    """The elements of a tensor's raw contents, in order; BYTES become text.

    ValueError: the contents do not fit the type.
    """
    if datatype == "BYTES":
        return _unpack_texts(data)
    form = _FORMATS.get(datatype)
    if form is None or len(data) % struct.calcsize(form):
        raise ValueError(f"{len(data)} bytes are no tensor of type {datatype}")
    return list(struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data))


def _unpack_texts(data: bytes) -> list[str]:
    texts, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise ValueError("a BYTES tensor ends inside a length")
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if at + length > len(data):
            raise ValueError(f"a BYTES tensor ends after {len(data) - at} of {length} bytes")
        texts.append(data[at : at + length].decode("utf-8", errors="replace"))
        at += length
    return texts
