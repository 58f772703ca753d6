"""NVFP4 numbers to floating point."""

import pytest
import torch
from voltriton_vllm.codec import E2M1, dequantise

CODES = torch.arange(16, dtype=torch.uint8)


def packed_row() -> torch.Tensor:
    """All sixteen codes in order, one row: the even column is the low nibble."""
    return (CODES[0::2] | (CODES[1::2] << 4)).reshape(1, 8)


def test_every_code_and_its_place():
    scale = torch.ones(1, 1).to(torch.float8_e4m3fn)
    out = dequantise(packed_row(), scale, torch.tensor(1.0), torch.float32)
    assert out.tolist() == [[*E2M1, *(-x for x in E2M1)]]


def test_block_and_global_scales_multiply_before_the_one_rounding():
    scale = torch.tensor([[0.40625]]).to(torch.float8_e4m3fn)
    factor = torch.tensor(1 / 3)
    out = dequantise(packed_row(), scale, factor, torch.float16)
    exact = torch.tensor(E2M1).double() * 0.40625 * factor.double()
    assert torch.equal(out[0, :8], exact.half())


@pytest.mark.parametrize("shape", [(), (3,), (3, 5)])
def test_a_global_scale_per_expert_or_per_row(shape):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (3, 5, 16), generator=generator, dtype=torch.uint8)
    scale = torch.rand(3, 5, 2, generator=generator).to(torch.float8_e4m3fn)
    factor = torch.rand(shape, generator=generator) + 0.5
    out = dequantise(packed, scale, factor, torch.float32)
    for e in range(3):
        for n in range(5):
            one = factor if not shape else factor[e] if len(shape) == 1 else factor[e, n]
            assert torch.equal(
                out[e, n], dequantise(packed[e, n : n + 1], scale[e, n : n + 1], one, torch.float32)[0]
            )


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"packed weight \(4, 8\) and scale \(4, 2\) do not fit"):
        dequantise(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 2), torch.tensor(1.0), torch.float32)
