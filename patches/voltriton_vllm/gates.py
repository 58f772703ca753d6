"""What the device can do, asked in one place.

`VOLTRITON_FORCE_CAPABILITY=7.0` is a switch for tests: vLLM and this plugin then see that compute capability
on a newer GPU, so that the code path of a V100 is the one that runs. It never makes an old GPU look newer.
"""

from __future__ import annotations

import functools
import os

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

logger = init_logger("vllm.voltriton")

# The first capability with NVFP4 kernels in vLLM itself (Marlin, weight-only): marlin_utils_fp4.py.
FIRST_WITH_KERNELS = 75


def mode() -> str:
    """`VOLTRITON_NVFP4`: `auto`, or `oracle`, which multiplies with dequantised weights (slow, for tests)."""
    value = os.environ.get("VOLTRITON_NVFP4", "auto")
    if value not in ("auto", "oracle"):
        raise ValueError(f"VOLTRITON_NVFP4: got {value!r}, allowed: auto, oracle")
    return value


def on_cuda() -> bool:
    return bool(current_platform.is_cuda())


def force_capability() -> None:
    """Obey `VOLTRITON_FORCE_CAPABILITY` (see above). Torch and Triton go on seeing the real device."""
    wanted = os.environ.get("VOLTRITON_FORCE_CAPABILITY")
    if not wanted or not on_cuda():
        return
    forced = _parse_capability(wanted)
    real = current_platform.get_device_capability()
    if real is not None and real < forced:
        raise ValueError(f"VOLTRITON_FORCE_CAPABILITY: got {wanted}, allowed: at most the device's {real}")
    logger.warning("Compute capability is taken to be %s (VOLTRITON_FORCE_CAPABILITY).", wanted)
    platform = type(current_platform)
    platform.get_device_capability = classmethod(lambda cls, device_id=0: forced)


def _parse_capability(text: str) -> DeviceCapability:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise ValueError(f"VOLTRITON_FORCE_CAPABILITY: got {text!r}, allowed: MAJOR.MINOR, as 7.0")
    return DeviceCapability(int(major), int(minor))


def capability() -> int | None:
    """Compute capability as 70, 90, ...; None where the platform is not CUDA."""
    if not current_platform.is_cuda():
        return None
    found = current_platform.get_device_capability()
    return None if found is None else int(found.to_int())


def real_capability() -> int:
    """That of the device, whatever the test switch says; CUDA only."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def needs_our_kernels() -> bool:
    """True on a CPU and on GPUs older than vLLM's own NVFP4 kernels."""
    found = capability()
    return current_platform.is_cpu() or (found is not None and found < FIRST_WITH_KERNELS)


@functools.cache
def fp8_kv_cache_usable() -> bool:
    """vLLM's CPU attention needs AVX-512 for an FP8 KV cache; Triton has no fp8 type below 8.9."""
    if current_platform.is_cpu():
        return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    found = capability()
    return found is None or found >= 89


def kv_cache_dtype_or_auto(wanted: str) -> str:
    """The KV cache type that a checkpoint asks for, or `auto` (that of the activations) if it cannot be."""
    if "fp8" not in wanted or fp8_kv_cache_usable():
        return wanted
    logger.info_once(
        "The checkpoint asks for a KV cache in %s, which this device lacks: 16 bits are used.", wanted
    )
    return "auto"


def require_triton_fp8(cache_dtype: str) -> None:
    """Refuse a KV cache of fp8 for a model whose attention reads it by Triton, where that has no fp8 type."""
    if cache_dtype.startswith("fp8") and not fp8_kv_cache_usable():
        raise ValueError(
            f"kv_cache_dtype: got {cache_dtype!r} on compute capability {current_platform.get_device_capability()}; "
            "this model's attention reads it from 8.9 on only, allowed here is auto"
        )
