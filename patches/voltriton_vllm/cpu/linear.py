"""NVFP4 matrices in the layout of the CPU kernel (`csrc/cpu_nvfp4.h`), and products with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from voltriton_vllm.codec import GROUP

TILE = 16  # output rows that the kernel works on side by side


@dataclass(frozen=True)
class PackedLinear:
    """4.5 bits a weight, as in the checkpoint; n output rows, the last tile filled up with zeros."""

    words: torch.Tensor  # int32 [tiles, K/8, 16]
    scale: torch.Tensor  # uint8 [tiles, K/16, 16]
    factor: torch.Tensor  # float32 [tiles * 16]
    n: int

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.words, self.scale, self.factor))


def pack(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> PackedLinear:
    """packed uint8 [N, K/2], scale E4M3 [N, K/16], global_scale float32, a scalar or [N]."""
    n, k = packed.shape[0], packed.shape[1] * 2
    if k % GROUP or scale.shape != (n, k // GROUP):
        raise ValueError(f"weight {tuple(packed.shape)} and scale {tuple(scale.shape)} do not fit")
    words = _tiles(_pair_columns(packed.contiguous()).view(torch.int32))
    # Explicit: vLLM loads under a default type of 16 bits.
    factor = torch.zeros(words.shape[0] * TILE, dtype=torch.float32)
    factor[:n] = global_scale
    return PackedLinear(words, _tiles(scale.contiguous().view(torch.uint8)), factor, n)


def _pair_columns(packed: torch.Tensor) -> torch.Tensor:
    """Of each 8 columns: the codes of the even ones into the first two bytes, of the odd ones into the last."""
    first, second = packed[:, 0::2], packed[:, 1::2]
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 0xF0)
    pairs = torch.stack([even[:, 0::2], even[:, 1::2], odd[:, 0::2], odd[:, 1::2]], -1)
    return pairs.reshape(packed.shape)


def _tiles(rows: torch.Tensor) -> torch.Tensor:
    """[N, columns] -> [tiles, columns, 16]."""
    n, columns = rows.shape
    tiles = -(-n // TILE)
    out = torch.zeros(tiles, TILE, columns, dtype=rows.dtype)
    out.view(-1, columns)[:n] = rows
    return out.transpose(1, 2).contiguous()


def linear(x: torch.Tensor, packed: PackedLinear, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] float32, bfloat16 or float16 -> [..., N] of the same type; sums are float32."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out: torch.Tensor = torch.ops.voltriton_cpu.nvfp4_linear(
        rows, packed.words, packed.scale, packed.factor, None if bias is None else bias.float(), packed.n
    )
    return out.reshape(*x.shape[:-1], packed.n)
