"""NVFP4 numbers to floating point, exactly.

A weight is e2m1 * block scale (E4M3, one per 16) * global scale (FP32, a multiplier). Two e2m1 codes share a
byte; the even column is in the low nibble. A code is sign << 3 | magnitude.
"""

from __future__ import annotations

import functools

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 16


@functools.cache
def _byte_table(device: torch.device) -> torch.Tensor:
    """Shape [256, 2], float32: a byte -> the values of its low and its high nibble."""
    values = torch.tensor(E2M1 + tuple(-x for x in E2M1), dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1).to(device)


def dequantise(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Weights [..., N, K] in `dtype`, rounded once from float32.

    packed: uint8 [..., N, K/2]; scale: E4M3 [..., N, K/16]; global_scale: float32, one for the leading
    dimensions of `scale` that it has (a scalar; [E] or [E, N] for experts; [N] for a matrix).
    """
    if packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(
            f"packed weight {tuple(packed.shape)} and scale {tuple(scale.shape)} do not fit: "
            f"a row of K weights has K/2 bytes and K/{GROUP} scales"
        )
    leading = global_scale.reshape(*global_scale.shape, *([1] * (scale.ndim - global_scale.ndim)))
    factors = scale.to(torch.float32) * leading
    values = _byte_table(packed.device)[packed.to(torch.int32)].reshape(*scale.shape, GROUP)
    out = (values * factors.unsqueeze(-1)).to(dtype)
    return out.reshape(*packed.shape[:-1], packed.shape[-1] * 2)
