"""The packed NVFP4 layout, against the oracle and against what the kernels' decoding does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from voltriton_vllm.sm70 import layout


def random_matrix(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator)
    return weight, scale.view(torch.float8_e4m3fn)


def decode8(words: torch.Tensor) -> torch.Tensor:
    """`decode8` of csrc/sm70_common.cuh on int64 words: the 8 values of each, in the order of k."""
    mask, magnitudes = 0x8E008E00, 0x0E0E0E0E
    q = words.long() & 0xFFFFFFFF
    moved = ((q >> 3) & magnitudes) | ((q << 7) & ~magnitudes)
    pairs = (q & mask, (q << 8) & mask, moved & mask, (moved << 8) & mask)
    halves = [part for pair in pairs for part in (pair & 0xFFFF, pair >> 16)]
    bits = torch.stack(halves, dim=-1)
    as_half = torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(torch.float16)
    return as_half.double() * 2**14


def decode_scales(scale: torch.Tensor) -> torch.Tensor:
    """`scales2` of csrc/sm70_common.cuh."""
    return (scale.to(torch.int16) << 7).view(torch.float16).double() * 2**8


@pytest.mark.parametrize(("n", "k"), [(1, 16), (3, 32), (5, 48), (16, 160), (7, 4096)])
def test_kernels_see_the_oracle_s_weights(n: int, k: int) -> None:
    weight, scale = random_matrix(n, k)
    words, scales = layout.pack(weight.clone(), scale)
    assert words.shape == (n, layout.padded(k) // 8)
    assert scales.shape == (n, layout.padded(k) // 16)
    seen = decode8(words).flatten(1) * decode_scales(scales).repeat_interleave(16, dim=1)
    assert torch.equal(seen[:, :k], layout.dequantise(weight, scale, torch.tensor(1.0)))
    assert bool((seen[:, k:] == 0).all())


@given(st.integers(0, 2**32 - 1))
def test_any_word_round_trips(word: int) -> None:
    signed = word - 2**32 if word >= 2**31 else word
    words = torch.tensor([signed], dtype=torch.int32)
    assert torch.equal(layout.unpack_words(layout.pack_words(words)), words)


def test_every_bit_of_a_word_is_used_once() -> None:
    packed = [
        layout.pack_words(torch.tensor([1 << b if b < 31 else -(2**31)], dtype=torch.int32))
        for b in range(32)
    ]
    assert sorted(int(p) & 0xFFFFFFFF for p in packed) == [1 << b for b in range(32)]


@pytest.mark.parametrize("k", [32, 48])
def test_unpack_gives_the_checkpoint_back(k: int) -> None:
    weight, scale = random_matrix(6, k)
    back_weight, back_scale = layout.unpack(*layout.pack(weight.clone(), scale), k)
    assert torch.equal(back_weight, weight)
    assert torch.equal(back_scale.view(torch.uint8), scale.view(torch.uint8))


def test_size_and_memory_stay_those_of_the_checkpoint() -> None:
    weight, scale = random_matrix(8, 256)
    address, size = weight.data_ptr(), weight.numel() + scale.numel()
    words, scales = layout.pack(weight, scale)
    assert words.data_ptr() == address
    assert words.numel() * 4 + scales.numel() == size == 8 * 256 * 9 // 16


def test_negative_scales_move_into_the_weights() -> None:
    weight, scale = random_matrix(4, 64)
    raw = scale.view(torch.uint8).clone()
    raw[:, 1] |= 0x80
    negative = raw.view(torch.float8_e4m3fn)
    want = layout.dequantise(weight, negative, torch.tensor(1.0))
    words, scales = layout.pack(weight.clone(), negative)
    assert int(scales.max()) < 0x80
    seen = decode8(words).flatten(1) * decode_scales(scales).repeat_interleave(16, dim=1)
    assert torch.equal(seen, want)


def test_the_oracle_is_plain_arithmetic() -> None:
    weight = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scale = torch.tensor([[1.5]]).to(torch.float8_e4m3fn)
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    got = layout.dequantise(weight, scale, torch.tensor(2.0))
    assert got.tolist() == [[v * 3 for v in want]]


@pytest.mark.parametrize(
    ("weight_shape", "scale_shape", "message"),
    [
        ((4, 12), (4, 1), "K=24; allowed is"),
        ((0, 16), (0, 2), "N=0"),
        ((4, 16), (4, 3), r"weight_scale: got shape \(4, 3\), allowed is \(4, 2\)"),
    ],
)
def test_shapes_that_do_not_fit(
    weight_shape: tuple[int, int], scale_shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layout.pack(torch.zeros(weight_shape, dtype=torch.uint8), torch.zeros(scale_shape, dtype=torch.uint8))


def test_wrong_types_and_nan_are_refused() -> None:
    weight, scale = random_matrix(2, 32)
    with pytest.raises(ValueError, match=r"weight: got dtype torch.int8"):
        layout.pack(weight.to(torch.int8), scale)
    with pytest.raises(ValueError, match=r"weight_scale: got dtype torch.float32"):
        layout.pack(weight, scale.to(torch.float32))
    bad = scale.view(torch.uint8).clone()
    bad[1, 1] = 0xFF
    with pytest.raises(ValueError, match="has NaN"):
        layout.pack(weight, bad.view(torch.float8_e4m3fn))
