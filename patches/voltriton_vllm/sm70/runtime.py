"""The kernels of one device: compiled, loaded and checked once."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from voltriton_vllm.sm70.compile import CompileError, Kernel, Module, build, device_arch, read_source
from voltriton_vllm.sm70.variants import all_variants

log = logging.getLogger("voltriton.sm70")

_PLAIN_MATRIX = ("fragment_check", "dequant", "split_sum")
_PLAIN_GLUE = ("rms_norm", "silu_and_mul", "rotary", "topk_softmax", "moe_sum", "moe_align", "moe_sort")
_PLAIN_ATTENTION = tuple(f"decode_combine_d{size}" for size in (64, 128, 256))
_MATRIX = ("sm70_moe.cu", "sm70_gemm.cu")
_ATTENTION = ("sm70_attention.cu",)
_GLUE = ("sm70_glue.cu",)


def sources(fragment: int) -> list[str]:
    """The texts that are compiled, each with the variants in use; several, so that they compile side by side."""
    variants = all_variants(fragment)
    files_of = {
        v: _ATTENTION if v.macro in ("DECODE", "PREFILL") else _GLUE if v.macro == "HGEMV" else _MATRIX
        for v in variants
    }
    texts = []
    for files in (_MATRIX, _GLUE, _ATTENTION):
        lines = [v.line() for v in variants if files_of[v] == files]
        texts.append("\n".join([f"#define FRAG {fragment}", read_source(*files), *lines]) + "\n")
    return texts


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
        modules = [Module(image) for image in images]
        names = [_PLAIN_MATRIX, _PLAIN_GLUE, _PLAIN_ATTENTION]
        macros = [("GEMV", "GEMM", "MOE_UP", "MOE_DOWN", "MOE_GEMM"), ("HGEMV",), ("DECODE", "PREFILL")]
        return {
            name: module.kernel(name)
            for module, plain, kinds in zip(modules, names, macros, strict=True)
            for name in (*plain, *(v.name for v in all_variants(self.fragment) if v.macro in kinds))
        }

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
