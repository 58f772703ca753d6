"""The NVFP4 bytes are those of compressed-tensors and of ModelOpt, and the arithmetic is right by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from voltriton.checkpoint.codec import (
    E2M1,
    Rule,
    blocks_of,
    dequantise,
    e2m1_codes,
    pack,
    quantise,
    unpack,
)
from voltriton.checkpoint.scales import max_scales, rounded, searched_scales


def awkward_weight(seed: int = 0, rows: int = 64, columns: int = 96) -> torch.Tensor:
    """Random blocks beside zeros, negative zeros, ties, tiny and huge blocks, one-hot blocks."""
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * torch.logspace(-6, 1, rows)[:, None]
    blocks = blocks_of(weight)
    blocks[0, 0] = 0.0
    blocks[1, 0] = -0.0
    blocks[2, 0] = 1e-38
    blocks[3, 0] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * torch.tensor(
        [1.0, -1.0] * 8
    )
    blocks[4, 0] = torch.nn.functional.one_hot(torch.tensor(5), 16).float() * 3
    blocks[5, 0] = torch.arange(-8, 8) * 0.25
    return blocks.reshape(rows, columns)


WEIGHTS = {
    "random": awkward_weight(0),
    "bfloat16": awkward_weight(1).bfloat16().float(),
    "float16": awkward_weight(2).half().float(),
    # Global scale a power of two and values on the grid's midpoints: every value is a tie.
    "ties": torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4).repeat(8, 1) * 448,
    "zeros": torch.zeros(4, 32),
    "subnormal": torch.full((2, 32), 1e-40),
}


def ours(weight: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top = rule.global_scale(weight.abs().max())
    scale = max_scales(weight, top, rule)
    return quantise(weight, scale, top, rule), scale, top


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # its own use of torch
@pytest.mark.parametrize("name", WEIGHTS)
def test_bytes_equal_compressed_tensors(name: str) -> None:
    from compressed_tensors.compressors.nvfp4 import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.quant_args import round_to_quantized_type_args
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, calculate_range, generate_gparam

    args: QuantizationArgs = NVFP4A16["weights"]
    weight = WEIGHTS[name]
    top = generate_gparam(weight.min(), weight.max())
    blocks = blocks_of(weight)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=top)
    low, high = calculate_range(args, "cpu")
    scaled = (blocks / (scale / top).unsqueeze(-1)).flatten(-2)
    # Their rounding is compiled by torch on first use; the same function without the compiler.
    with torch.compiler.set_stance("force_eager"):
        values = round_to_quantized_type_args(scaled, args, low, high)
    packed, our_scale, our_top = ours(weight, Rule.COMPRESSED_TENSORS)
    assert our_top.item() == top.item()
    assert torch.equal(our_scale.view(torch.uint8), scale.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(packed, pack_fp4_to_uint8(values))


@pytest.mark.filterwarnings("ignore::Warning")  # its own imports
@pytest.mark.parametrize("name", [n for n in WEIGHTS if n != "zeros"])  # there ModelOpt writes NaN scales
def test_bytes_equal_modelopt(name: str) -> None:
    pytest.importorskip(
        "modelopt.torch.quantization.qtensor.nvfp4_tensor",
        reason="nvidia-modelopt is not installed (docs/quality.md says how to have it beside the venv)",
        exc_type=ImportError,
    )
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    weight = WEIGHTS[name]
    tensor, scale, top = NVFP4QTensor.quantize(weight.clone(), 16)
    packed, our_scale, our_top = ours(weight, Rule.MODELOPT)
    assert our_top.item() == top.item()
    assert torch.equal(our_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(packed, tensor._quantized_data)
    back = tensor.dequantize(torch.float32, scale=scale, double_scale=top, block_sizes={-1: 16})
    assert torch.equal(dequantise(packed, our_scale, our_top, Rule.MODELOPT), back)


def test_e2m1_is_nearest_with_ties_to_the_even_code() -> None:
    values = torch.cat([torch.linspace(-8, 8, 64001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    codes = e2m1_codes(values)
    assert torch.equal((codes >> 3).bool(), values < 0)
    distance = (values.abs().unsqueeze(-1) - E2M1).abs()
    chosen = distance.gather(-1, (codes & 7).long().unsqueeze(-1)).squeeze(-1)
    assert torch.equal(chosen, distance.amin(-1))
    tied = (distance == distance.amin(-1, keepdim=True)).sum(-1) == 2
    assert tied.sum() >= 7
    assert not (codes[tied] & 1).any()


def test_the_short_way_of_rounding_is_the_same() -> None:
    values = torch.cat(
        [torch.linspace(-8, 8, 64001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0, 1e-40])]
    )
    codes = e2m1_codes(values)
    by_code = E2M1[(codes & 7).int()] * torch.where(codes > 7, -1.0, 1.0)
    assert torch.equal(rounded(values), by_code)


def test_pack_and_unpack_are_inverse() -> None:
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8).reshape(16, 32)
    packed = pack(codes)
    assert packed[0, 1].item() == 0x10  # the even column is the low nibble
    assert torch.equal(unpack(packed), codes)


@pytest.mark.parametrize("rule", list(Rule))
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30))
def test_quantising_what_was_dequantised_changes_nothing(rule: Rule, seed: int, exponent: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(4, 32) * 2.0**exponent
    packed, scale, top = ours(weight, rule)
    back = dequantise(packed, scale, top, rule)
    assert torch.isfinite(back).all()
    again = quantise(back, scale, top, rule)
    # -0 and 0 are the same value: modulo the sign of zeros the codes are equal.
    assert torch.equal(dequantise(again, scale, top, rule), back)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("name", WEIGHTS)
def test_scales_are_finite_and_positive(rule: Rule, name: str) -> None:
    weight = WEIGHTS[name]
    top = rule.global_scale(weight.abs().max())
    assert torch.isfinite(top)
    assert top > 0
    for scale in (max_scales(weight, top, rule), searched_scales(weight, top, rule)):
        assert torch.isfinite(scale.float()).all()
        assert (scale.float() > 0).all()


@pytest.mark.parametrize("rule", list(Rule))
def test_searched_scales_never_lose_to_the_maximum(rule: Rule) -> None:
    weight = awkward_weight(3)
    importance = torch.rand(weight.shape[1]) + 0.1
    top = rule.global_scale(weight.abs().max())

    def errors(scale: torch.Tensor) -> torch.Tensor:
        back = dequantise(quantise(weight, scale, top, rule), scale, top, rule)
        return blocks_of((back - weight).square() * importance).sum(-1)

    by_max = errors(max_scales(weight, top, rule))
    searched = errors(searched_scales(weight, top, rule, importance))
    assert (searched <= by_max * (1 + 1e-6) + 1e-30).all()
    assert searched.sum() < 0.95 * by_max.sum()
