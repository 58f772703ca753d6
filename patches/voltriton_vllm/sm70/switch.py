"""`VOLTRITON_ATTENTION`: whose attention kernels run where vLLM chooses its Triton backend.

`triton` (the default) are vLLM's, `sm70` are ours (`backend`). Ours are off by default: they are tested alone
(tests/gpu/test_sm70_ops.py), a whole model has not run with them.
"""

from __future__ import annotations

import os

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

NAME = "VOLTRITON_ATTENTION"


def register() -> None:
    """Put our backend in the place of vLLM's Triton backend, if that is asked for. Raises ValueError."""
    wanted = os.environ.get(NAME, "triton")
    if wanted not in ("triton", "sm70"):
        raise ValueError(f"{NAME}: got {wanted!r}, allowed: triton, sm70")
    if wanted == "sm70":
        register_backend(AttentionBackendEnum.TRITON_ATTN, "voltriton_vllm.sm70.backend.Sm70AttentionBackend")
