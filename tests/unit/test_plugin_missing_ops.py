"""Operators of vLLM's CUDA extensions that the plugin supplies: schemas, no doubles, refusals."""

import subprocess
import sys

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


def test_the_cuda_platform_defines_them_before_any_plugin():
    """A spawned engine unpickles its configuration first, whose modules ask at import (found on an H200)."""
    code = "import vllm.platforms.cuda, torch; print(torch.ops._C.cutlass_scaled_mm_supports_block_fp8(70))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr[-2000:]


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
    assert core.persistent_topk(x, ids, ids, x, 2, 2) is None
    assert core.rotary_embedding(ids, x, None, 16, x, True) is None
    assert core.rotary_embedding(ids, x, x, 16, x, True, 0, False) is None


def test_what_has_no_kernel_says_so():
    x = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="rope_dim_offset"):
        missing_ops._rotary_embedding(x, x, None, 16, x, True, rope_dim_offset=2)
    with pytest.raises(ValueError, match="got k 3 for output"):
        missing_ops._persistent_topk(x, x, torch.zeros(1, 2), x, 3, 1)
    with pytest.raises(NotImplementedError, match="correction bias"):
        missing_ops._topk_softmax(x, x, x, x, True, x, None)


def test_embedding_of_a_rank_is_that_of_vllms_unfused_path(namespace):
    from vllm.model_executor.layers.vocab_parallel_embedding import get_masked_input_and_mask

    missing_ops.install()
    bounds = (100, 140, 8, 1000, 1004)  # rows 0..39 of the vocabulary, 8 of padding, 4 added
    ids, weight = torch.tensor([99, 100, 139, 140, 999, 1000, 1003, 1004, 0]), torch.randn(52, 6)
    rows, foreign = get_masked_input_and_mask(ids, *bounds)
    want = weight[rows].masked_fill(foreign.unsqueeze(1), 0)
    out = torch.full((9, 6), float("nan"))
    namespace["vocab_parallel_embedding"].vocab_parallel_embedding(out, ids.int(), weight, *bounds)
    assert torch.equal(out, want)
    assert int(foreign.sum()) == 5


def test_names_for_the_compiler_are_declared_and_fail_by_name(monkeypatch):
    from vllm.config.compilation import PassConfig
    from voltriton_vllm import compiler

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config):
            vllm_config.seen = True

    monkeypatch.setattr(compiler, "current_platform", Platform())
    monkeypatch.setattr(compiler, "NAMES", ("voltriton_test_name",))
    compiler.prepare()
    config = type("Config", (), {"compilation_config": type("C", (), {"pass_config": PassConfig()})()})()
    Platform.check_and_update_config(config)
    assert config.seen
    assert not any(getattr(config.compilation_config.pass_config, name) for name in compiler.FUSIONS)
    with pytest.raises((RuntimeError, NotImplementedError), match="voltriton_test_name"):
        torch.ops._C.voltriton_test_name()
    first = Platform.check_and_update_config
    compiler.prepare()
    assert Platform.check_and_update_config == first, "once is enough"
