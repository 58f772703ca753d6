"""The public functions without a GPU: what they refuse, what they promise to torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from voltriton_vllm.sm70 import glue, layout, linear, moe, ops, variants


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_unavailable_without_a_gpu() -> None:
    assert ops.why_unavailable() == "no CUDA device"
    assert ops.available() is False


def checkpoint(n: int, k: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (*lead, n, k // 16), dtype=torch.uint8)
    return weight, scale.view(torch.float8_e4m3fn)


def test_prepare_linear_takes_a_scale_a_row() -> None:
    weight, scale = checkpoint(6, 48)
    one = ops.prepare_linear(weight.clone(), scale, torch.tensor(0.5))
    assert one.row_scale.tolist() == [0.5] * 6
    rows = torch.arange(6) * 0.25
    assert ops.prepare_linear(weight.clone(), scale, rows).row_scale.tolist() == rows.tolist()
    with pytest.raises(
        ValueError, match=r"row_global_scale: got shape \(5,\), allowed is a scalar or \(6,\)"
    ):
        ops.prepare_linear(weight, scale, torch.ones(5))
    with pytest.raises(ValueError, match="row_global_scale: has a value that is not finite"):
        ops.prepare_linear(weight, scale, torch.tensor(float("inf")))


@pytest.mark.parametrize("inter", [32, 48])
def test_prepare_moe_keeps_experts_apart(inter: int) -> None:
    w13, s13 = checkpoint(2 * inter, 64, 3)
    w2, s2 = checkpoint(64, inter, 3)
    g13 = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    packed = ops.prepare_moe(w13.clone(), s13, g13, w2.clone(), s2, torch.tensor([7.0, 8.0, 9.0]))
    assert (packed.hidden, packed.intermediate) == (64, inter)
    for e in range(3):
        weight, scale = layout.unpack(packed.w2[e], packed.w2_scale[e], inter)
        assert torch.equal(weight, w2[e])
        assert torch.equal(scale.view(torch.uint8), s2[e].view(torch.uint8))
        assert packed.w13_row_scale[e].tolist() == [g13[e, 0]] * inter + [g13[e, 1]] * inter
        assert packed.w2_row_scale[e].tolist() == [7.0 + e] * 64


def test_prepare_moe_refuses_shapes_that_do_not_belong_together() -> None:
    w13, s13 = checkpoint(64, 64, 3)
    w2, s2 = checkpoint(64, 48, 3)
    with pytest.raises(ValueError, match="w13, w2: got shapes"):
        ops.prepare_moe(w13, s13, torch.ones(3), w2, s2, torch.ones(3))
    w2, s2 = checkpoint(64, 32, 3)
    with pytest.raises(ValueError, match="w2_global_scale: got shape"):
        ops.prepare_moe(w13, s13, torch.ones(3), w2, s2, torch.ones(2))


def test_shapes_for_torch_compile() -> None:
    with FakeTensorMode():
        x = torch.empty(5, 64, dtype=torch.float16, device="cuda")
        words = torch.empty(96, 8, dtype=torch.int32, device="cuda")
        scale = torch.empty(96, 4, dtype=torch.uint8, device="cuda")
        rows = torch.empty(96, device="cuda")
        y = linear.nvfp4_matmul(x, words, scale, rows, None)
        assert (y.shape, y.dtype) == ((5, 96), torch.float16)
        w = torch.empty(40, 64, dtype=torch.float16, device="cuda")
        assert linear.half_matmul(x, w, None).shape == (5, 40)
        ids = torch.empty(5, 2, dtype=torch.int32, device="cuda")
        weights = torch.empty(5, 2, device="cuda")
        z = moe.nvfp4_experts(x, words, scale, rows, words, scale, rows, weights, ids, None, 32)
        assert (z.shape, z.dtype) == ((5, 64), torch.float16)


@pytest.mark.parametrize("k", [16, 48, 160, 640, 2048, 5120, 12288, 25600, 53248])
def test_every_variant_fits_volta_s_shared_memory(k: int) -> None:
    limit = variants.MAX_SHARED
    gemv = [v for table in variants.GEMV.values() for _, v in table]
    for v in [*gemv, variants.MOE_UP, variants.MOE_UP_MANY]:
        assert v.staging(k)[1] <= limit
    gemm = [v for choices in variants.GEMM.values() for v in choices] + list(variants.GEMM_SHORT.values())
    for g in [*gemm, *(v for _, both in variants.MOE_GEMM for v in both)]:
        for fragment in (70, 80):
            assert g.staging(k, fragment)[1] <= limit
    for d in (variants.moe_down(m, k) for m in (1, 2, 8)):
        warps, shared = d.launch(k, 10)
        assert shared <= limit
        assert 0 <= warps <= 10
    for a in [v for table in variants.DECODE.values() for v in table.values()]:
        assert a.shared_bytes <= limit


@pytest.mark.parametrize("m", [1, 3, 8, 9, 17, 33, 64, 100])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (2560, 5120), (4096, 12288), (65536, 8192)])
def test_parts_of_k_are_never_empty(m: int, n: int, k: int) -> None:
    variant, parts = variants.gemm_for(m, n, k, 80)
    blocks = variants.ceil_div(k, 128)
    assert 1 <= parts <= max(1, blocks)
    assert variant.xb * 8 >= min(m, 64)


@pytest.mark.parametrize(
    ("m", "n", "k", "ours"),
    [
        (1, 512, 2560, True),
        (8, 512, 2560, True),
        (9, 512, 2560, False),
        (2, 336, 10240, True),
        (3, 336, 10240, False),
        (2, 10240, 320, True),
        (3, 10240, 320, False),
        (2, 62080, 2560, True),
        (3, 62080, 2560, False),
        (0, 64, 64, False),
    ],
)
def test_few_rows_have_a_kernel_for_half_matrices(m: int, n: int, k: int, ours: bool) -> None:
    variant = variants.half_gemv(m, n, k)
    assert (variant is not None) == ours
    if variant is not None:
        assert variant.m == m
        assert variant.shared_bytes(k) <= variants.MAX_SHARED
        assert variant in variants.all_variants(70)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 9).half()}, "logits: got torch.float16"),
        ({"logits": torch.zeros(9, 2).T}, "logits: got torch.float32, strides"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths: got torch.int32 \(3,\)"),
        ({"lengths": torch.zeros(2)}, "lengths: got torch.float32"),
        ({"output": torch.zeros(2, 4, dtype=torch.int64)}, "output: got torch.int64"),
        ({"output": torch.zeros(2, 8, dtype=torch.int32)[:, :4]}, "output: got torch.int32"),
    ],
)
def test_selection_refuses_what_its_kernel_does_not_take(
    change: dict[str, torch.Tensor], message: str
) -> None:
    tensors = {"logits": torch.zeros(2, 9), "lengths": torch.zeros(2, dtype=torch.int32)}
    tensors["output"] = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        glue.topk_rows(**(tensors | change))


def test_experts_beyond_the_kernel_are_refused() -> None:
    ids = torch.zeros(1, 33, dtype=torch.int32)
    with pytest.raises(ValueError, match="got 64 experts, top 33"):
        glue.topk_softmax(torch.zeros(1, 33), ids, None, torch.zeros(1, 64))
