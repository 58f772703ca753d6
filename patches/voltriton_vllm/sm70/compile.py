"""Compile the CUDA sources of `csrc/` by NVRTC, keep the result on disk, load it and launch it.

No nvcc, no CUDA headers and no build step: NVRTC is a library that a CUDA build of PyTorch already
brings. Only CUDA 12's NVRTC compiles for compute capability 7.0 (CUDA 13 dropped it).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import tempfile
from pathlib import Path

import torch

log = logging.getLogger("voltriton.sm70")

SOURCE_DIR = Path(__file__).resolve().parent.parent / "csrc"
OPTIONS = ("--std=c++17", "-default-device", "--use_fast_math")
MAX_SHARED_BYTES = 96 * 1024  # what a block of compute capability 7.0 can be given
_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Argument = torch.Tensor | int | float | ctypes.c_uint64 | None


class CompileError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


def cache_dir() -> Path:
    """Where compiled kernels are kept: VOLTRITON_KERNEL_CACHE, or below the user's cache folder."""
    named = os.environ.get("VOLTRITON_KERNEL_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "voltriton" / "sm70"


def _nvrtc_candidates() -> list[str]:
    named = os.environ.get("VOLTRITON_NVRTC")
    found = [named] if named else []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        found += [str(p) for p in Path(root).glob("cuda_nvrtc/lib/libnvrtc.so.12")]
    return [*found, "libnvrtc.so.12"]


class Nvrtc:
    """The NVRTC library of CUDA 12."""

    def __init__(self) -> None:
        failures = []
        for path in _nvrtc_candidates():
            try:
                self._lib = self._open(path)
                break
            except OSError as e:
                failures.append(str(e))
        else:
            raise CompileError(f"no NVRTC of CUDA 12 (package nvidia-cuda-nvrtc-cu12): {failures[-1]}")
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    @staticmethod
    def _open(path: str) -> ctypes.CDLL:
        # NVRTC looks for its builtins library by bare name; loading it first makes it found.
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.12*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(path)

    def _check(self, code: int) -> None:
        if code:
            raise CompileError(f"NVRTC: {self._lib.nvrtcGetErrorString(code).decode()}")

    def compile(self, source: str, arch: str) -> bytes:
        """CUDA C++ to a cubin (`sm_70`) or to PTX (`compute_70`)."""
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"sm70.cu", 0, None, None)
        )
        options = [f"--gpu-architecture={arch}", *OPTIONS]
        array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        failed = self._lib.nvrtcCompileProgram(program, len(options), array)
        if failed:
            message = self._fetch(program, "ProgramLog").decode(errors="replace")
            raise CompileError(f"{arch}: {message.strip()}")
        image = self._fetch(program, "CUBIN" if arch.startswith("sm_") else "PTX")
        self._lib.nvrtcDestroyProgram(ctypes.byref(program))
        return image

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw


@functools.cache
def nvrtc() -> Nvrtc:
    return Nvrtc()


def read_source(*names: str) -> str:
    """Files of `csrc/` as one text, each `#include "..."` replaced by that file, every file at most once."""
    seen: set[str] = set()

    def read(name: str) -> list[str]:
        if name in seen:
            return []
        seen.add(name)
        lines: list[str] = []
        for line in (SOURCE_DIR / name).read_text(encoding="utf-8").splitlines():
            lines += read(line.split('"')[1]) if line.startswith('#include "') else [line]
        return lines

    return "\n".join(line for name in names for line in read(name)) + "\n"


def build(source: str, arch: str) -> bytes:
    """The compiled image, from the disk cache when the same source was compiled for `arch` before.

    A filled cache needs no NVRTC, so an image can bring its kernels compiled.
    """
    key = hashlib.sha256(repr((source, arch, OPTIONS)).encode()).hexdigest()
    path = cache_dir() / f"{key[:32]}.{'cubin' if arch.startswith('sm_') else 'ptx'}"
    try:
        return path.read_bytes()
    except OSError:  # not there, or a folder that cannot be read
        image = nvrtc().compile(source, arch)
        _store(path, image)
        return image


def _store(path: Path, image: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(image)
        Path(f.name).chmod(0o644)  # another user's process may read an image's cache
        Path(f.name).replace(path)  # several ranks may compile the same source at once
    except OSError as e:
        log.warning("compiled kernels are not kept in %s: %s", path.parent, e)


@functools.cache
def _driver() -> ctypes.CDLL:
    lib = ctypes.CDLL("libcuda.so.1")
    lib.cuLaunchKernel.argtypes = [
        ctypes.c_void_p,
        *[ctypes.c_uint] * 7,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return lib


def _check_driver(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CompileError(f"{what}: CUDA error {code} ({(text.value or b'unknown').decode()})")


class Kernel:
    """One function of a loaded module."""

    def __init__(self, handle: ctypes.c_void_p, name: str) -> None:
        self._handle, self._name = handle, name
        static = ctypes.c_int()
        code = _driver().cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED, handle)
        _check_driver(code, f"{name}: static shared memory")
        dynamic = MAX_SHARED_BYTES - static.value
        code = _driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, dynamic)
        _check_driver(code, f"{name}: dynamic shared memory of {dynamic} bytes")

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int | tuple[int, int, int],
        shared_bytes: int,
        *args: Argument,
    ) -> None:
        """Launch on torch's current stream. Tensors pass as addresses (None: null), int as int32, float as float32."""
        values = [_argument(a) for a in args]
        array = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        stream = torch.cuda.current_stream().cuda_stream
        block = (threads, 1, 1) if isinstance(threads, int) else threads
        code = _driver().cuLaunchKernel(self._handle, *grid, *block, shared_bytes, stream, array, None)
        _check_driver(code, f"{self._name}: launch, grid {grid}, {block} threads, {shared_bytes} bytes")


def _argument(value: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float | ctypes.c_uint64:
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p(0 if value is None else value.data_ptr())
    if isinstance(value, ctypes.c_uint64):
        return value
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


class Module:
    """A compiled source, loaded on one device."""

    def __init__(self, image: bytes) -> None:
        torch.cuda.current_stream().synchronize()  # makes torch's context current in this thread
        self._handle = ctypes.c_void_p()
        _check_driver(_driver().cuModuleLoadData(ctypes.byref(self._handle), image), "loading kernels")
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            handle = ctypes.c_void_p()
            code = _driver().cuModuleGetFunction(ctypes.byref(handle), self._handle, name.encode())
            _check_driver(code, f"no kernel {name}")
            self._kernels[name] = Kernel(handle, name)
        return self._kernels[name]


def device_arch(device: int) -> str:
    """Machine code on Volta itself; elsewhere PTX for Volta, which the driver translates."""
    return "sm_70" if torch.cuda.get_device_capability(device) == (7, 0) else "compute_70"
