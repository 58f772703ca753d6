"""NVFP4 as numbers: blocks of 16 E2M1 values, an E4M3 scale a block, an FP32 scale a tensor.

Two packages define the files that are out there, and they differ in the order of their float operations,
in the zero block and in what the global scale means (`weight_global_scale` of compressed-tensors divides,
`weight_scale_2` of ModelOpt multiplies). `Rule` holds these differences; with the same rule the bytes are
equal to that package's (tests/unit/test_checkpoint_codec.py compares them).
"""

from __future__ import annotations

import enum

import torch

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIGNED_E2M1 = torch.cat([E2M1, -E2M1])

# The two values of each byte; the even column is the low nibble.
BYTE_VALUES = torch.stack([SIGNED_E2M1[torch.arange(256) & 15], SIGNED_E2M1[torch.arange(256) >> 4]], -1)


class Rule(enum.StrEnum):
    """Whose arithmetic: the value is also the name of the layout on the command line."""

    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"

    def global_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """FP32 scalar as this layout stores it, from the largest magnitude of a tensor (or fused group)."""
        if self is Rule.COMPRESSED_TENSORS:
            # A divisor. An all-zero tensor gives infinity, for which the package stores 1.
            scale = E4M3_MAX * E2M1_MAX / amax.float().clamp(min=torch.finfo(torch.float32).tiny)
            return torch.nan_to_num(scale, posinf=1.0)
        scale = amax.float() / (E2M1_MAX * E4M3_MAX)
        # ModelOpt would store 0 here and then NaN block scales.
        return torch.where(scale == 0, torch.ones_like(scale), scale)

    def block_scale(self, block_amax: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
        """E4M3 scales of blocks with the given largest magnitudes, rounded to nearest even."""
        if self is Rule.COMPRESSED_TENSORS:
            scale = (global_scale * (block_amax / E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
            # The package puts the type's eps where the scale rounds to zero, so that nothing divides by it.
            return torch.where(scale.float() == 0, torch.tensor(0.125), scale.float()).to(torch.float8_e4m3fn)
        wide = block_amax / (E2M1_MAX * global_scale)
        wide = torch.where(wide == 0, torch.ones_like(wide), wide)
        return wide.clamp(min=2.0**-9, max=E4M3_MAX).to(torch.float8_e4m3fn)

    def step(self, block_scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
        """What an E2M1 value is multiplied by, float32, shape of `block_scale`."""
        if self is Rule.COMPRESSED_TENSORS:
            return block_scale.float() / global_scale
        return block_scale.float() * global_scale

    def other(self) -> Rule:
        return Rule.MODELOPT if self is Rule.COMPRESSED_TENSORS else Rule.COMPRESSED_TENSORS


def blocks_of(weight: torch.Tensor) -> torch.Tensor:
    """[rows, columns] -> [rows, columns / 16, 16]."""
    return weight.reshape(*weight.shape[:-1], -1, BLOCK)


def e2m1_codes(scaled: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code (0..7, bit 3 is the sign) as uint8; ties to even, saturating at 6.

    E2M1 is linear below 2, from 2 to 4 and from 4 up, with steps 0.5, 1 and 2; rounding to even in each of
    the three, counted in codes, is rounding to the even code, and the least of the three is the right one.
    """
    size = scaled.abs()
    code = torch.round(size * 2)
    torch.minimum(code, torch.round(size).add_(2), out=code)
    torch.minimum(code, torch.round(size * 0.5).add_(4), out=code)
    code = code.clamp_(max=7).to(torch.uint8)
    return code.bitwise_or_((scaled < 0).to(torch.uint8).mul_(8))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., columns] -> bytes [..., columns / 2]; the even column is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., columns / 2] -> uint8 codes [..., columns]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantise(
    weight: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """float32 [rows, columns] with chosen scales -> packed bytes [rows, columns / 2]."""
    step = rule.step(block_scale, global_scale)
    scaled = blocks_of(weight) / step.unsqueeze(-1)
    return pack(e2m1_codes(scaled.flatten(-2)))


def dequantise(
    packed: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Packed bytes and scales -> float32 [rows, columns]."""
    values = BYTE_VALUES[packed.int()].flatten(-2)
    return (blocks_of(values) * rule.step(block_scale, global_scale).unsqueeze(-1)).flatten(-2)
