"""RMS norm on CPUs: vLLM's C++ operators beside its native implementation, through vLLM's own choice among them."""

import pytest
import torch
from voltriton_vllm.cpu import norm

BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of numbers about 1: roundings


@pytest.fixture(scope="module")
def ops():
    from vllm import ir
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's platform here is not the CPU")
    norm.register()
    norm.register()  # a second time does nothing
    return ir.ops


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found.float() - wanted.float()).abs() / (wanted.float().abs() + 1)).max())


@pytest.mark.parametrize("dtype", BOUNDS)
def test_norm(ops, dtype):
    torch.manual_seed(0)
    for shape in ((1, 576), (7, 576), (3, 4, 64), (5, 24)):
        x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
        wanted = ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-5)
        before = x.clone()
        with ops.rms_norm.set_priority([norm.PROVIDER, "native"]):
            found = ops.rms_norm(x, weight, 1e-5)
        assert found.dtype == dtype
        assert relative(found, wanted) < BOUNDS[dtype], shape
        assert torch.equal(x, before)


def test_heads_of_a_part_of_qkv(ops):
    qkv, weight = torch.randn(5, 256), torch.randn(32)
    heads = qkv[:, 64:192].unflatten(1, (4, 32))
    assert not heads.is_contiguous()
    with ops.rms_norm.set_priority([norm.PROVIDER, "native"]):
        found = ops.rms_norm(heads, weight, 1e-5)
    assert relative(found, ops.rms_norm.impls["native"].impl_fn(heads, weight, 1e-5)) < 1e-6


@pytest.mark.parametrize("dtype", BOUNDS)
def test_norm_of_a_sum_in_place(ops, dtype):
    torch.manual_seed(0)
    x, residual = torch.randn(9, 576).to(dtype), torch.randn(9, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    wanted = ops.fused_add_rms_norm.impls["native"].impl_fn(x.clone(), residual.clone(), weight, 1e-5)
    with ops.fused_add_rms_norm.set_priority([norm.PROVIDER, "native"]):
        found = ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, 1e-5)
    assert found[0].data_ptr() == x.data_ptr()
    assert found[1].data_ptr() == residual.data_ptr()
    assert all(relative(a, b) < BOUNDS[dtype] for a, b in zip(found, wanted, strict=True))


def test_what_the_operators_do_not_take_is_left_to_vllm(ops):
    x, weight = torch.randn(3, 64), torch.randn(64)
    takes = ops.rms_norm.impls[norm.PROVIDER].supports_args
    assert takes(x, weight, 1e-5)
    assert not takes(x, None, 1e-5)
    assert not takes(x, weight.half(), 1e-5)
    assert not takes(x, weight, 1e-5, 32)
    assert not ops.fused_add_rms_norm.impls[norm.PROVIDER].supports_args(x.t(), x.t(), weight, 1e-5)
    with ops.rms_norm.set_priority([norm.PROVIDER, "native"]):
        assert torch.equal(ops.rms_norm(x, None, 1e-5), ops.rms_norm.impls["native"].impl_fn(x, None, 1e-5))
