"""`VOLTRITON_ATTENTION`: whose attention kernels run where vLLM chooses its Triton backend.

`triton` are vLLM's, `sm70` are ours (`backend`); `auto` (the default) takes ours on Volta, where Triton has no tensor
cores, and vLLM's elsewhere.
"""

from __future__ import annotations

import os

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from voltriton_vllm import gates

NAME = "VOLTRITON_ATTENTION"
FIRST_WITH_TENSOR_CORES = 75  # in Triton; below it multiplies by scalar instructions


def register() -> None:
    """Put our backend in the place of vLLM's Triton backend, if that is asked for. Raises ValueError."""
    wanted = os.environ.get(NAME, "auto")
    if wanted not in ("auto", "triton", "sm70"):
        raise ValueError(f"{NAME}: got {wanted!r}, allowed: auto, triton, sm70")
    capability = gates.capability()
    on_volta = capability is not None and capability < FIRST_WITH_TENSOR_CORES
    if wanted == "sm70" or (wanted == "auto" and on_volta):
        register_backend(AttentionBackendEnum.TRITON_ATTN, "voltriton_vllm.sm70.backend.Sm70AttentionBackend")
