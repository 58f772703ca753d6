"""The kernels of one device: compiled, loaded and checked once."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from voltriton_vllm.sm70.compile import CompileError, Kernel, Module, build, device_arch, read_source
from voltriton_vllm.sm70.variants import all_variants

log = logging.getLogger("voltriton.sm70")


class Part(NamedTuple):
    """Files that are compiled as one, with the variants of some macros; and the kernels that are in them anyway."""

    files: tuple[str, ...]
    macros: tuple[str, ...]
    plain: tuple[str, ...] = ()

    def source(self, fragment: int) -> str:
        lines = [v.line() for v in all_variants(fragment) if v.macro in self.macros]
        return "\n".join([f"#define FRAG {fragment}", read_source(*self.files), *lines]) + "\n"

    def names(self, fragment: int) -> list[str]:
        """The kernels that are in it."""
        return [*self.plain, *(v.name for v in all_variants(fragment) if v.macro in self.macros)]


PARTS = (
    Part(
        ("sm70_moe.cu", "sm70_gemm.cu"),
        ("GEMV", "GEMM", "MOE_UP", "MOE_DOWN", "MOE_GEMM"),
        ("fragment_check", "dequant", "split_sum"),
    ),
    Part(
        ("sm70_glue.cu", "sm70_select.cu"),
        ("HGEMV",),
        (
            "rms_norm",
            "silu_and_mul",
            "rotary",
            "moe_sum",
            "moe_align",
            "moe_sort",
            "topk_softmax",
            "topk_rows",
        ),
    ),
    Part(
        ("sm70_decode.cu", "sm70_cache.cu"),
        ("DECODE",),
        ("write_cache", *(f"decode_combine_d{size}" for size in (64, 128, 256))),
    ),
    Part(("sm70_prefill.cu",), ("PREFILL",)),
)


def sources(fragment: int) -> list[str]:
    """The texts that are compiled, one for each of `PARTS`; several, so that they compile side by side."""
    return [part.source(fragment) for part in PARTS]


def fragment_of(capability: tuple[int, int]) -> int:
    """How tensor-core fragments lie in registers (FRAG of csrc/sm70_common.cuh)."""
    return 70 if capability < (7, 5) else 80


class Runtime:
    """Loaded kernels of one device. Raises CompileError when they cannot be had."""

    def __init__(self, device: int) -> None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (7, 0):
            raise CompileError(f"compute capability {capability[0]}.{capability[1]}, needed is 7.0 or later")
        self.fragment = fragment_of(capability)
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels = self._load(device)
        self.tensor_cores = self._check_fragments(device)

    def _load(self, device: int) -> dict[str, Kernel]:
        """Every kernel by name, so that nothing is looked up during a graph capture."""
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(partial(build, arch=device_arch(device)), sources(self.fragment)))
        kernels: dict[str, Kernel] = {}
        for part, image in zip(PARTS, images, strict=True):
            module = Module(image)
            kernels.update((name, module.kernel(name)) for name in part.names(self.fragment))
        return kernels

    def kernel(self, name: str) -> Kernel:
        return self._kernels[name]

    def _check_fragments(self, device: int) -> bool:
        ok = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
        self.kernel("fragment_check")((1, 1, 1), 32, 1024, ok)
        if ok.item():
            return True
        log.warning("tensor-core fragments are laid out in an unknown way; cuBLAS is used instead")
        return False


@functools.cache
def runtime(device: int) -> Runtime:
    with torch.cuda.device(device):
        return Runtime(device)
