"""The packed form of NVFP4 weights that the sm_70 kernels read: the checkpoint's bytes with the bits of each
32-bit word in another order, so the size stays 4.5 bits a weight and packing can be done in place.

Checkpoint: `weight` uint8 [N, K/2], the even element of a pair in the low nibble; a nibble is
sign << 3 | e2m1 code of 0, 0.5, 1, 1.5, 2, 3, 4, 6. `weight_scale` e4m3 [N, K/16]. w = e2m1 * scale * global.

Packed word (8 consecutive weights of a row, int32): element 2j in the low 16 bits, element 2j+1 in the high
16 bits, each at the bits below. Masks and shifts then give halves (`decode8` in csrc/sm70_common.cuh).

    pair j   sign bit   magnitude bits
    0        15         11..9
    1         7          3..1
    2         8         14..12
    3         0          6..4

K is padded with zero weights to a multiple of 32 (16 bytes). Scales stay e4m3 bytes in the checkpoint's order;
a negative scale is made positive and its sign put into its 16 weights; NaN scales are refused.
"""

from __future__ import annotations

import torch

GROUP = 16  # weights that share one scale
UNIT = 32  # weights that one 16-byte load brings
_SIGN_BITS = (15, 7, 8, 0)
_MAGNITUDE_SHIFTS = (9, 1, 12, 4)
_CHUNK_WORDS = 1 << 22  # bounds the scratch memory of packing (a few of these in int32)


def padded(k: int) -> int:
    """K rounded up to a whole load."""
    return -(-k // UNIT) * UNIT


def pack_words(words: torch.Tensor) -> torch.Tensor:
    """Checkpoint words (int32, nibble i at bits 4i..4i+3) to packed words; any shape."""
    out = torch.zeros_like(words)
    for element in range(8):
        j, half = element // 2, 16 * (element % 2)
        nibble = words >> (4 * element)
        out |= (nibble & 7) << (_MAGNITUDE_SHIFTS[j] + half)
        out |= ((nibble >> 3) & 1) << (_SIGN_BITS[j] + half)
    return out


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_words`."""
    out = torch.zeros_like(words)
    for element in range(8):
        j, half = element // 2, 16 * (element % 2)
        out |= ((words >> (_MAGNITUDE_SHIFTS[j] + half)) & 7) << (4 * element)
        out |= ((words >> (_SIGN_BITS[j] + half)) & 1) << (4 * element + 3)
    return out


def check_shapes(weight: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """(N, K) of a checkpoint's tensors, whose last two dimensions are a matrix.

    Raises ValueError with the shapes when they do not belong together.
    """
    if weight.dtype != torch.uint8:
        raise ValueError(f"weight: got dtype {weight.dtype}, allowed is torch.uint8")
    n, k = weight.shape[-2], weight.shape[-1] * 2
    if n == 0 or k == 0 or k % GROUP:
        raise ValueError(f"weight: got N={n}, K={k}; allowed is N > 0 and K a positive multiple of {GROUP}")
    if scale.shape != (*weight.shape[:-1], k // GROUP):
        got, want = tuple(scale.shape), (*weight.shape[:-1], k // GROUP)
        raise ValueError(f"weight_scale: got shape {got}, allowed is {want}")
    if scale.element_size() != 1:
        raise ValueError(
            f"weight_scale: got dtype {scale.dtype}, allowed is torch.float8_e4m3fn (or its bytes)"
        )
    return n, k


def pack(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Checkpoint tensors of one matrix to (words int32 [N, Kp/8], scales uint8 [N, Kp/16]), Kp = padded(K).

    Where K needs no padding and `weight` is contiguous and aligned, the words are written over it.
    Raises ValueError on shapes that do not fit and on NaN scales.
    """
    _, k = check_shapes(weight, scale)
    scale_bytes = scale.contiguous().view(torch.uint8)
    if bool(((scale_bytes & 0x7F) == 0x7F).any()):
        raise ValueError("weight_scale: has NaN")
    pad = padded(k) - k
    if pad:
        weight = torch.nn.functional.pad(weight, (0, pad // 2))
        scale_bytes = torch.nn.functional.pad(scale_bytes, (0, pad // GROUP))
    elif not weight.is_contiguous() or weight.data_ptr() % 16:
        weight = weight.clone(memory_format=torch.contiguous_format)
    words = weight.view(torch.int32)
    negative = scale_bytes >= 0x80
    if bool(negative.any()):
        flip = negative.repeat_interleave(2, dim=1).to(torch.int32) * -0x77777778  # 0x88888888
        words ^= flip
        scale_bytes = scale_bytes & 0x7F
    _pack_in_place(words)
    if scale_bytes.data_ptr() % 16:
        scale_bytes = scale_bytes.clone()
    return words, scale_bytes


def _pack_in_place(words: torch.Tensor) -> None:
    flat = words.view(-1)
    for start in range(0, flat.numel(), _CHUNK_WORDS):
        part = flat[start : start + _CHUNK_WORDS]
        part.copy_(pack_words(part))


def unpack(words: torch.Tensor, scale: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed tensors back to the checkpoint's (weight uint8 [N, K/2], weight_scale e4m3 [N, K/16])."""
    weight = unpack_words(words).view(torch.uint8)[:, : k // 2].contiguous()
    return weight, scale[:, : k // GROUP].contiguous().view(torch.float8_e4m3fn)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantise(weight: torch.Tensor, scale: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    """The oracle: checkpoint tensors to float64 [N, K]; `row_scale` is the global scale, [N] or a scalar."""
    table = torch.tensor(_E2M1, dtype=torch.float64, device=weight.device)
    values = torch.stack((table[(weight & 15).long()], table[(weight >> 4).long()]), dim=-1)
    values = values.flatten(-2)
    # e4m3 has no float64 conversion of its own on every device; float32 holds it exactly.
    factors = scale.view(torch.float8_e4m3fn).to(torch.float32).double().repeat_interleave(GROUP, dim=-1)
    return values * factors * row_scale.double().reshape(-1, 1)
