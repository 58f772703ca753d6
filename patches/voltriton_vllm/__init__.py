"""vLLM general plugin: NVFP4 checkpoints on devices that vLLM has no NVFP4 kernel for.

vLLM calls `register` once in every process (server, engine core, each rank). What has a registration point in
vLLM is registered here; the rest is reached by the hooks of the patch series beside this package.

    pin       is the installed vLLM the one that our patches were made for, and does it carry them?
    gates     what the device can do (with a test switch for its compute capability)
    codec     NVFP4 numbers -> floating point
    scales    checks of a checkpoint's scales; layers whose parts have unequal global scales
    linear    NVFP4 linear kernel (`linear_backend`: "voltriton")
    moe       NVFP4 experts (`moe_backend`: "voltriton")
    cpu       C++ kernel for CPUs
    sm70      CUDA kernels for Volta
    missing_ops  operators of vLLM's extensions where those are not built (Volta)
    compiler  torch.compile there
    unquantised  products with 16-bit weights on Volta
    qwen4_exp tiles of Qwen3.8-Flash-Next on Volta
    formats   which quantisations run on Volta
    lifetime  engine processes end with their parent
"""

from __future__ import annotations


def register() -> None:
    """Entry point of `vllm.general_plugins`. Raises `pin.PinError` if vLLM is not the patched, pinned one."""
    from voltriton_vllm import pin

    if pin.is_other_distribution():
        return
    pin.check()
    from voltriton_vllm import gates

    gates.force_capability()
    if gates.on_cuda():
        from voltriton_vllm import compiler, missing_ops

        missing_ops.install()
        compiler.prepare()
        _check_nccl()
        from voltriton_vllm.sm70 import switch

        switch.register()
    else:
        from voltriton_vllm import cpu
        from voltriton_vllm.cpu import norm

        cpu.allow_amx()
        norm.register()
    from voltriton_vllm import linear

    linear.register()


def _check_nccl() -> None:
    from voltriton_vllm import gates, nccl

    if nccl.is_rank() and gates.real_capability() == 70:
        from vllm.utils.nccl import find_nccl_library

        nccl.check(find_nccl_library())
