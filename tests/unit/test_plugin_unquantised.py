"""Which product 16-bit weights get: the hook in vLLM's `dispatch_unquantized_gemm`."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers import utils
from voltriton_vllm import gates, unquantised
from voltriton_vllm.sm70 import linear, ops


class Cuda:
    def is_cuda(self) -> bool:
        return True

    def is_cpu(self) -> bool:
        return False

    def is_rocm(self) -> bool:
        return False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """A made-up CUDA device of a compute capability, on which our kernels load or do not."""

    def make(capability: int, why_not: str | None = None) -> None:
        monkeypatch.setattr(utils, "current_platform", Cuda())
        monkeypatch.setattr(gates, "current_platform", Cuda())
        monkeypatch.setattr(gates, "capability", lambda: capability)
        monkeypatch.setattr(ops, "why_unavailable", lambda device=None: why_not)
        ops.available.cache_clear()

    yield make
    ops.available.cache_clear()


def test_vllm_asks_on_volta(device):
    device(70)
    assert utils.dispatch_unquantized_gemm() is unquantised._multiply


@pytest.mark.parametrize("capability", [75, 80, 90])
def test_newer_devices_keep_vllms_own(device, capability):
    device(capability)
    assert utils.dispatch_unquantized_gemm() is utils.default_unquantized_gemm


def test_without_kernels_vllms_own_is_kept(device):
    device(70, "no compiler")
    assert utils.dispatch_unquantized_gemm() is utils.default_unquantized_gemm


def test_the_oracle_keeps_vllms_own(device, monkeypatch):
    device(70)
    monkeypatch.setenv("VOLTRITON_NVFP4", "oracle")
    assert utils.dispatch_unquantized_gemm() is utils.default_unquantized_gemm


def test_the_switch(device, monkeypatch):
    device(70)
    monkeypatch.setenv("VOLTRITON_UNQUANTISED", "vllm")
    assert utils.dispatch_unquantized_gemm() is utils.default_unquantized_gemm
    monkeypatch.setenv("VOLTRITON_UNQUANTISED", "cublas")
    with pytest.raises(ValueError, match="VOLTRITON_UNQUANTISED: got 'cublas', allowed: auto, vllm"):
        utils.dispatch_unquantized_gemm()


def test_rows_of_any_shape_reach_the_kernel(monkeypatch):
    seen = []

    def half_matmul(x, weight, bias):
        seen.append(x.shape)
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(linear, "half_matmul", half_matmul)
    weight, bias = torch.randn(5, 8).half(), torch.randn(5).half()
    for shape in [(3, 8), (2, 3, 8), (8,)]:
        x = torch.randn(shape).half()
        found = unquantised._multiply(None, x, weight, bias)
        assert torch.equal(found, torch.nn.functional.linear(x, weight, bias))
        assert found.shape == (*shape[:-1], 5)
    assert seen == [(3, 8), (6, 8), (1, 8)]


def test_other_types_are_torchs(monkeypatch):
    monkeypatch.setattr(linear, "half_matmul", None)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(unquantised._multiply(None, x, weight), x @ weight.T)
