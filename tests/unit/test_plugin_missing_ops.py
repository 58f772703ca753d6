"""Operators of vLLM's CUDA extensions that the plugin supplies: schemas, no doubles, refusals."""

import pytest
import torch
from voltriton_vllm import missing_ops


@pytest.fixture
def namespace(monkeypatch):
    """The same operators in namespaces of the test's own, without a GPU."""
    moved = [
        op._replace(namespace=f"voltriton_test{op.namespace}", dispatch="CompositeExplicitAutograd")
        for op in missing_ops.OPERATORS
    ]
    monkeypatch.setattr(missing_ops, "OPERATORS", tuple(moved))
    yield {op.name: getattr(torch.ops, op.namespace) for op in moved}
    missing_ops._libraries.clear()


def test_what_is_missing_is_defined_once(namespace):
    assert len(missing_ops.install()) == len(missing_ops.OPERATORS)
    assert missing_ops.install() == []
    assert namespace["cutlass_scaled_mm_supports_fp8"].cutlass_scaled_mm_supports_fp8(70) is False


def test_the_calls_of_vllm_fit_the_schemas(namespace):
    """As in vllm/_custom_ops.py: positional, with the optional ones given."""
    missing_ops.install()
    x = torch.zeros(2, 16, device="meta")
    ids = torch.zeros(2, 2, dtype=torch.int32, device="meta")
    moe, core = namespace["moe_sum"], namespace["rms_norm"]
    assert moe.moe_sum(x, x, None, None) is None
    assert moe.moe_align_block_size(ids, 4, 16, ids, ids, ids, None, None) is None
    assert moe.topk_softmax(x, ids, ids, x, True, None, None) is None
    assert core.rms_norm(x, x, None, 1e-6) is None
    assert core.fused_add_rms_norm(x, x, x, 1e-6) is None
    assert core.silu_and_mul(x, x) is None
    assert core.rotary_embedding(ids, x, None, 16, x, True) is None
    assert core.rotary_embedding(ids, x, x, 16, x, True, 0, False) is None


def test_what_has_no_kernel_says_so():
    x = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="rope_dim_offset"):
        missing_ops._rotary_embedding(x, x, None, 16, x, True, rope_dim_offset=2)
    with pytest.raises(NotImplementedError, match="correction bias"):
        missing_ops._topk_softmax(x, x, x, x, True, x, None)
