"""Is the NCCL that vLLM will load one that works on Volta? Asked in each rank, before it joins the others.

Needed: machine code for sm_70 (builds for CUDA 13 have none), and version 2.29.7 or newer: with an older one, which
lacks ncclCommSuspend, vLLM 0.32 leaves its own communicator out without a word (before 2.27.5 large all-reduces also
write out of bounds). Pinned for Volta is nvidia-nccl-cu12 2.30.7.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import struct
from pathlib import Path

PINNED = "nvidia-nccl-cu12==2.30.7"
LOWEST = (2, 29, 7)
MAGIC = struct.pack("<I", 0xBA55ED50)  # begins a fat binary
MACHINE_CODE = 2


class NcclError(RuntimeError):
    """NCCL does not work here; the message says what was found and what to install."""


def is_rank() -> bool:
    """True in a worker process of vLLM's multi-process executor, which is where NCCL is used."""
    return multiprocessing.current_process().name.startswith("VllmWorker")


def check(library: str) -> None:
    """Raises NcclError in one line. `library`: a path, or a name that the dynamic loader knows."""
    version = version_of(library)
    if version < LOWEST:
        raise NcclError(f"NCCL {_text(version)} in {library}: {_text(LOWEST)} or newer is needed; {_fix()}")
    path = path_of(library)
    found = architectures(path)
    if 70 not in found:
        names = ", ".join(f"sm_{number}" for number in sorted(found)) or "no GPU"
        raise NcclError(f"NCCL {_text(version)} in {path} has code for {names}, not for sm_70; {_fix()}")


def _fix() -> str:
    return f"install {PINNED}, or name another libnccl.so.2 in VLLM_NCCL_SO_PATH"


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def version_of(library: str) -> tuple[int, int, int]:
    try:
        number = ctypes.c_int()
        if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number)) != 0:
            raise NcclError(f"{library}: ncclGetVersion failed; {_fix()}")
    except (OSError, AttributeError) as error:
        raise NcclError(f"{library} is no NCCL library ({error}); {_fix()}") from None
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def path_of(library: str) -> Path:
    """Where the loaded library lies, from this process's memory map."""
    if "/" in library:
        return Path(library)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f"/{library}"):
            return Path(line.split(maxsplit=5)[5])
    raise NcclError(f"{library} is loaded, but from where is unknown; {_fix()}")


def architectures(path: Path) -> set[int]:
    """Numbers of the architectures with machine code in a library's fat binaries (70 for sm_70).

    A fat binary: magic, u16, u16 header size, u64 size; then entries of u16 kind, u16, u32 header size,
    u64 payload size, ..., at byte 28 the architecture. Undocumented; seen so in NCCL 2.30.7.
    """
    found: set[int] = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(MAGIC)
        while start >= 0:
            _, header, size = struct.unpack_from("<HHQ", data, start + 4)
            end = start + header + size
            found |= _entries(data, start + header, min(end, len(data)))
            start = data.find(MAGIC, start + 4 if end > len(data) else end)
    return found


def _entries(data: mmap.mmap, at: int, end: int) -> set[int]:
    found: set[int] = set()
    while at + 32 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        if header < 32 or not 10 <= architecture < 1000:
            break
        if kind == MACHINE_CODE:
            found.add(architecture)
        at += header + size
    return found
