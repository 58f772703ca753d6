"""The sm_70 kernels against float64 on fresh random data, outputs and scratch poisoned with NaN."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from voltriton_vllm.sm70 import attention, glue, layout, linear, ops  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert ops.why_unavailable() is None


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that an output that is not written shows."""
    blocks = [torch.full((1 << 22,), float("nan"), device=DEVICE) for _ in range(8)]
    del blocks


def error(
    got: torch.Tensor,
    want: torch.Tensor,
    x: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> float:
    """Largest relative error of a row, less what rounding to the smallest halves takes.

    For a product x @ weights.T: a row that cancels to less than a quarter of the magnitudes that were added is
    measured against that, and with many rows weights are rounded to halves, the smallest of which are coarse.
    """
    got, want = got.double(), want.double()
    coarse, norm = 2**-24 * torch.ones_like(want), want.norm(dim=-1).clamp_min(1e-30)
    if x is not None and weights is not None:
        magnitudes = x.double().abs()
        coarse = coarse * (1 + magnitudes.sum(dim=-1, keepdim=True))
        norm = norm.maximum((magnitudes @ weights.abs().T).norm(dim=-1) / 4)
    off = ((got - want).abs() - coarse).clamp_min(0) + torch.where((got - want).isnan(), float("inf"), 0.0)
    return float((off.norm(dim=-1) / norm).nan_to_num(float("inf")).max())


def matrix(n: int, k: int, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device=DEVICE)
    scale = torch.randint(0, 0x7F, (*lead, n, k // 16), dtype=torch.uint8, device=DEVICE)
    return weight, scale.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("m", [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 129, 300])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (1, 16),
        (7, 48),
        (33, 272),
        (2560, 5120),
        (4096, 1040),
        (3072, 160),
        (8200, 512),
        (20480, 256),
        (96, 12288),
    ],
)
def test_linear(m: int, n: int, k: int) -> None:
    weight, scale = matrix(n, k)
    rows = torch.rand(n, device=DEVICE) * 1e-3 + 1e-5
    want_w = layout.dequantise(weight, scale, rows)
    packed = ops.prepare_linear(weight.clone(), scale, rows)
    x = torch.randn(m, k, device=DEVICE) * 10.0 ** torch.randint(-3, 3, (m, 1), device=DEVICE)
    x = x.half()
    bias = torch.randn(n, device=DEVICE).half()
    for b in (None, bias):
        poison()
        y = ops.nvfp4_linear(x, packed, b)
        want = x.double() @ want_w.T + (0 if b is None else b.double())
        assert y.shape == (m, n)
        if m:
            # Over 64 rows weights are rounded to halves: of a row that cancels, 4 * 2^-11 beside the result's 2^-11.
            assert error(y, want, x, want_w) < (2e-3 if m <= 64 else 2.5e-3)
            assert torch.equal(y, ops.nvfp4_linear(x, packed, b)), "the same input must give the same bits"


def test_linear_activations_of_any_size() -> None:
    """Massive activations overflow no half-precision sum, tiny ones do not vanish, a NaN stays one."""
    weight, scale = matrix(256, 4096)
    rows = torch.tensor(1e-6, device=DEVICE)
    want_w = layout.dequantise(weight, scale, rows)
    packed = ops.prepare_linear(weight, scale, rows)
    for size in (6e4, 1e-4, 6e-6):
        x = torch.full((1, 4096), size, device=DEVICE).half() * torch.randn(4096, device=DEVICE).sign().half()
        x[:, ::7] *= 0.01
        for m in (1, 2, 4, 16):
            y = ops.nvfp4_linear(x.expand(m, -1), packed)
            want = x.double() @ want_w.T
            assert float((y.double() - want).abs().max()) <= 2e-3 * float(want.abs().max()) + 6e-8
    x = torch.randn(1, 4096, device=DEVICE).half()
    x[0, 5] = float("nan")
    assert bool(ops.nvfp4_linear(x, packed).isnan().any())


def test_linear_strided_and_unaligned_input() -> None:
    weight, scale = matrix(64, 128)
    packed = ops.prepare_linear(weight.clone(), scale, torch.tensor(1.0, device=DEVICE))
    want_w = layout.dequantise(weight, scale, torch.tensor(1.0, device=DEVICE))
    wide = torch.randn(4, 512, device=DEVICE).half()
    for x in (wide[:, 128:256], wide[:, 3:131], wide.t()[:128].t()):
        assert error(ops.nvfp4_linear(x, packed), x.double() @ want_w.T) < 2e-3


@pytest.mark.parametrize("special", ["zero", "max", "subnormal", "negative"])
def test_special_scales(special: str) -> None:
    weight, scale = matrix(48, 256)
    byte = {"zero": 0x00, "max": 0x7E, "subnormal": 0x01, "negative": 0xB5}[special]
    raw = scale.view(torch.uint8).clone()
    raw[:, ::2] = byte
    raw[5] = byte
    scale = raw.view(torch.float8_e4m3fn)
    weight[3] = 0
    rows = torch.tensor(1e-3, device=DEVICE)
    want_w = layout.dequantise(weight, scale, rows)
    packed = ops.prepare_linear(weight.clone(), scale, rows)
    for m in (1, 8, 200):
        x = torch.randn(m, 256, device=DEVICE).half()
        got, want = ops.nvfp4_linear(x, packed).double(), x.double() @ want_w.T
        assert float((got - want).abs().max()) <= 2e-3 * float(want.abs().max())
        assert bool((got[:, 3] == 0).all())


def test_linear_in_a_cuda_graph_and_under_compile() -> None:
    weight, scale = matrix(512, 1024)
    packed = ops.prepare_linear(weight, scale, torch.tensor(1e-3, device=DEVICE))
    for m in (1, 4, 16, 200):
        x = torch.randn(m, 1024, device=DEVICE).half()
        ops.nvfp4_linear(x, packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ops.nvfp4_linear(x, packed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, ops.nvfp4_linear(x, packed))


@pytest.mark.parametrize(
    ("experts", "inter", "hidden", "topk"),
    [(8, 64, 128, 2), (128, 768, 2048, 8), (32, 160, 2560, 10), (16, 48, 80, 4)],
)
@pytest.mark.parametrize("m", [0, 1, 3, 8, 40, 100, 300, 1100])
def test_moe(experts: int, inter: int, hidden: int, topk: int, m: int) -> None:
    w13, s13 = matrix(2 * inter, hidden, experts)
    w2, s2 = matrix(hidden, inter, experts)
    g13 = torch.rand(experts, 2, device=DEVICE) * 2e-4 + 1e-5
    g2 = torch.rand(experts, device=DEVICE) * 2e-4 + 1e-5
    x = torch.randn(m, hidden, device=DEVICE).half()
    ids = (
        torch.stack([torch.randperm(experts, device=DEVICE)[:topk] for _ in range(m)])
        if m
        else torch.zeros(0, topk, dtype=torch.int64, device=DEVICE)
    )
    weights = torch.rand(m, topk, device=DEVICE)
    expert_map = torch.arange(experts, dtype=torch.int32, device=DEVICE)
    expert_map[1] = -1
    packed = ops.prepare_moe(w13.clone(), s13, g13, w2.clone(), s2, g2)
    for mapping in (None, expert_map):
        want = torch.zeros(m, hidden, dtype=torch.float64, device=DEVICE)
        for e in ids.unique().tolist():
            if mapping is not None and mapping[e] < 0:
                continue
            a = layout.dequantise(w13[e], s13[e], g13[e].repeat_interleave(inter))
            b = layout.dequantise(w2[e], s2[e], g2[e])
            row, t = (ids == e).nonzero(as_tuple=True)
            h = x[row].double() @ a.T
            act = torch.nn.functional.silu(h[:, :inter]) * h[:, inter:]
            want.index_add_(0, row, weights[row, t].double()[:, None] * (act @ b.T))
        poison()
        y = ops.nvfp4_moe(x, packed, weights, ids, mapping)
        assert y.shape == x.shape
        if m:
            assert error(y, want) < 3e-3
            assert torch.equal(y, ops.nvfp4_moe(x, packed, weights, ids, mapping))


@pytest.mark.parametrize("m", [0, *range(1, 10)])
def test_half_matmul(m: int) -> None:
    for n, k in (
        (1, 2560),
        (24, 2560),
        (33, 64),
        (336, 10240),
        (640, 10240),
        (2560, 2560),
        (2561, 320),
        (10240, 320),
    ):
        w = torch.randn(n, k, device=DEVICE).half() * 0.02
        x = torch.randn(m, k, device=DEVICE).half()
        bias = torch.randn(n, device=DEVICE).half()
        poison()
        y = linear.half_matmul(x, w, bias)
        assert y.shape == (m, n)
        if m:
            assert error(y, x.double() @ w.double().T + bias.double()) < 1e-3


@pytest.mark.parametrize("hidden", [128, 2560, 5120, 12288])
def test_norms(hidden: int) -> None:
    x, r = (torch.randn(5, hidden, device=DEVICE).half() for _ in range(2))
    w = torch.rand(hidden, device=DEVICE).half()
    want = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
    out = torch.full_like(x, float("nan"))
    glue.rms_norm(out, x, w, 1e-6)
    assert error(out, want) < 1e-3
    total = (x.float() + r.float()).half().double()
    want = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
    glue.fused_add_rms_norm(x, r, w, 1e-6)
    assert torch.equal(r.double(), total)
    assert error(x, want) < 1e-3


def test_silu_and_mul() -> None:
    x = torch.randn(37, 2 * 96, device=DEVICE).half() * 3
    out = torch.full((37, 96), float("nan"), device=DEVICE, dtype=torch.half)
    glue.silu_and_mul(out, x)
    assert error(out, torch.nn.functional.silu(x[:, :96].double()) * x[:, 96:].double()) < 1e-3


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [32, 64])
def test_rotary(neox: bool, rotary: int) -> None:
    cache = torch.randn(50, rotary, device=DEVICE).half()
    positions = torch.randint(0, 50, (7,), device=DEVICE)
    q, k = torch.randn(7, 4 * 64, device=DEVICE).half(), torch.randn(7, 2 * 64, device=DEVICE).half()
    want = []
    for t in (q, k):
        h = t.double().view(7, -1, 64)
        cos, sin = (c.double()[:, None] for c in cache[positions].chunk(2, dim=-1))
        part = h[..., :rotary]
        a, b = part.chunk(2, -1) if neox else (part[..., ::2], part[..., 1::2])
        x, y = a * cos - b * sin, b * cos + a * sin
        turned = torch.cat((x, y), -1) if neox else torch.stack((x, y), -1).flatten(-2)
        want.append(torch.cat((turned, h[..., rotary:]), -1).view(7, -1))
    glue.rotary_embedding(positions, q, k, 64, cache, neox)
    assert error(q, want[0]) < 1e-3
    assert error(k, want[1]) < 1e-3


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("columns", "k"), [(64, 16), (2048, 512), (65536, 512)])
def test_topk_rows(columns: int, k: int, ties: bool) -> None:
    """Rows of any length; what lies behind a row's length is NaN. Ties go to the first."""
    lengths = torch.tensor(
        [0, 1, k, k + 1, columns // 2, columns, columns + 5], dtype=torch.int32, device=DEVICE
    )
    logits = torch.randn(len(lengths), columns, device=DEVICE)
    logits = logits.round() if ties else logits
    for row, length in enumerate(lengths.tolist()):
        logits[row, length:] = float("nan")
    output = torch.full((len(lengths), k), 77, dtype=torch.int32, device=DEVICE)
    poison()
    glue.topk_rows(logits, lengths, output)
    for row, length in enumerate(lengths.tolist()):
        order = logits[row, :length].sort(descending=True, stable=True).indices[:k].sort().values.tolist()
        assert output[row].tolist() == order + [-1] * (k - len(order)), length


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (60, 4), (128, 8), (512, 10)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("renormalise", [False, True])
def test_topk_softmax(experts: int, topk: int, dtype: torch.dtype, renormalise: bool) -> None:
    logits = torch.randn(33, experts, device=DEVICE).to(dtype)
    weights = torch.full((33, topk), float("nan"), device=DEVICE)
    ids = torch.full((33, topk), -1, dtype=torch.int32, device=DEVICE)
    source = torch.full_like(ids, -1)
    glue.topk_softmax(weights, ids, source, logits, renormalise)
    soft = logits.double().softmax(-1)
    order = sorted
    for row in range(33):
        want = order(range(experts), key=lambda e: (-float(logits[row, e]), e))[:topk]
        assert ids[row].tolist() == want
    want_w = soft.gather(1, ids.long())
    if renormalise:
        want_w = want_w / want_w.sum(-1, keepdim=True)
    assert error(weights, want_w) < 1e-5
    assert torch.equal(source, torch.arange(topk * 33, device=DEVICE, dtype=torch.int32).view(topk, 33).t())


@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (128, 8), (512, 10), (1024, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_topk_softmax_names_experts_that_exist(
    experts: int, topk: int, dtype: torch.dtype, value: float
) -> None:
    """Whatever a row holds: one that pads a CUDA graph may hold anything, and a number beyond E reads foreign memory."""
    logits = torch.randn(9, experts, device=DEVICE).to(dtype)
    logits[1] = value
    logits[3, ::2] = value
    logits[5, -1] = value
    weights = torch.full((9, topk), float("nan"), device=DEVICE)
    ids = torch.full((9, topk), -1, dtype=torch.int32, device=DEVICE)
    glue.topk_softmax(weights, ids, None, logits, True)
    assert bool(((ids >= 0) & (ids < experts)).all())
    assert all(len(set(row)) == topk for row in ids.tolist())
    assert bool(weights[[0, 2, 4, 6, 7, 8]].isfinite().all())


def test_moe_align_and_sum() -> None:
    ids = torch.randint(0, 16, (21, 4), dtype=torch.int32, device=DEVICE)
    out = torch.full((21 * 4 + 16 * 15,), -5, dtype=torch.int32, device=DEVICE)
    of = torch.full((out.numel() // 16 + 1,), -5, dtype=torch.int32, device=DEVICE)
    total = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    glue.moe_align_block_size(ids, 16, 16, out, of, total)
    want, want_of = [], []
    for e in range(16):
        pairs = [i for i, v in enumerate(ids.flatten().tolist()) if v == e]
        blocks = -(-len(pairs) // 16)
        want += pairs + [84] * (blocks * 16 - len(pairs))
        want_of += [e] * blocks
    assert total.item() == len(want)
    assert out[: len(want)].tolist() == want
    assert of[: len(want_of)].tolist() == want_of
    x = torch.randn(6, 4, 64, device=DEVICE).half()
    y = torch.full((6, 64), float("nan"), device=DEVICE, dtype=torch.half)
    glue.moe_sum(x, y)
    assert error(y, x.double().sum(1)) < 1e-3


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 4), (8, 2), (16, 2), (24, 2), (5, 1)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("window", [0, 100])
def test_paged_decode(size: int, heads: int, key_heads: int, fp8: bool, window: int) -> None:
    lengths_list = [1, 15, 700, 0, 2049]
    batch, block = len(lengths_list), 16
    blocks = 700
    cache = torch.randn(2, blocks, block, key_heads, size, device=DEVICE).half()
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    table = torch.randperm(blocks, device=DEVICE)[: batch * 130].view(batch, 130).int()
    lengths = torch.tensor(lengths_list, dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, heads, size, device=DEVICE).half()
    out = torch.full_like(q, float("nan"))
    poison()
    k_scale, v_scale = (0.5, 2.0) if fp8 else (1.0, 1.0)
    args = (q, cache[0], cache[1], table, lengths, 2080, size**-0.5, window, k_scale, v_scale)
    attention.paged_decode(out, *args)
    for b, length in enumerate(lengths_list):
        if length == 0:
            assert bool((out[b] == 0).all())
            continue
        first = max(0, length - window) if window else 0
        pages = table[b].long()
        k, v = (c.to(torch.float32)[pages].flatten(0, 1)[first:length].double() for c in cache)
        k = k.repeat_interleave(heads // key_heads, 1) * k_scale
        v = v.repeat_interleave(heads // key_heads, 1) * v_scale
        p = (torch.einsum("hd,thd->ht", q[b].double(), k) * size**-0.5).softmax(-1)
        assert error(out[b].flatten()[None], torch.einsum("ht,thd->hd", p, v).flatten()[None]) < 2e-3
    again = torch.empty_like(out)
    attention.paged_decode(again, *args)
    assert torch.equal(out, again)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (24, 1)])
def test_paged_decode_writes_the_new_keys(size: int, heads: int, key_heads: int) -> None:
    """The same as after writing them, and they are where they belong, and nothing else has changed."""
    lengths = torch.tensor([1, 17, 0, 700, 2048], dtype=torch.int32, device=DEVICE)
    cache = torch.randn(2, 700, key_heads, 32, size, device=DEVICE).half().transpose(2, 3)
    table = torch.randperm(700, device=DEVICE)[: 5 * 64].view(5, 64).int()
    wide = torch.randn(5, (heads + 2 * key_heads) * size, device=DEVICE).half()
    q, key, value = (
        t.view(5, -1, size) for t in wide.split([heads * size, key_heads * size, key_heads * size], dim=1)
    )
    want, slots = cache.clone(), torch.full((5,), -1, device=DEVICE)
    for b, length in enumerate(lengths.tolist()):
        if length > 1:  # the first, of one token, has no slot: a dummy run
            at = table[b, (length - 1) // 32].long(), (length - 1) % 32
            slots[b] = at[0] * 32 + at[1]
            cache[(slice(None), *at)] = float("nan")
            want[(0, *at)], want[(1, *at)] = key[b], value[b]
    ends = (table, lengths, 4096, size**-0.5, 0, 1.0, 1.0)
    out, before = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    attention.paged_decode(before, q, *want.clone(), *ends)
    attention.paged_decode(out, q, *cache, *ends, key, value, slots)
    assert torch.equal(out, before)
    assert torch.equal(cache, want)


@pytest.mark.parametrize(("size", "key_heads"), [(64, 8), (128, 1), (256, 2)])
def test_new_keys_into_a_cache_of_e4m3_bytes(size: int, key_heads: int) -> None:
    """As PyTorch rounds, captured in a graph too; a slot under 0 is written nowhere; nothing else changes."""
    block, pages, tokens = 16, 40, 300
    wide = (torch.randn(tokens + 5, 2 * key_heads * size, device=DEVICE) * 100).half()
    key, value = (t.view(tokens + 5, key_heads, size) for t in wide.chunk(2, dim=1))
    slots = torch.randperm(pages * block, device=DEVICE)[:tokens]
    slots[7] = -1
    cache = torch.randint(0, 0x7F, (pages, key_heads, block, 2 * size), dtype=torch.uint8, device=DEVICE)
    want = cache.clone()
    halves = want.transpose(1, 2).split(size, dim=-1)
    for found, new, scale in zip(halves, (key, value), (0.5, 2.0), strict=True):
        rounded = (new[:tokens].float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        at = slots[slots >= 0]
        found[at // block, at % block] = rounded[slots >= 0]
    before = cache.clone()
    arguments = (key, value, *cache.transpose(1, 2).split(size, dim=-1), slots, 0.5, 2.0)
    attention.write_cache(*arguments)
    assert torch.equal(cache, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.write_cache(*arguments)
    cache.copy_(before)
    graph.replay()
    assert torch.equal(cache, want)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("window", [0, 50])
def test_paged_prefill(size: int, heads: int, key_heads: int, fp8: bool, window: int) -> None:
    lengths_list, news_list, block = [1, 300, 129, 40, 700], [1, 300, 5, 0, 200], 16
    cache = torch.randn(2, 300, block, key_heads, size, device=DEVICE).half()
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    table = torch.randperm(300, device=DEVICE)[: 5 * 45].view(5, 45).int()
    lengths = torch.tensor(lengths_list, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *news_list], device=DEVICE).cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, size, device=DEVICE).half()
    out = torch.full_like(q, float("nan"))
    k_scale, v_scale = (0.5, 2.0) if fp8 else (1.0, 1.0)
    args = (q, cache[0], cache[1], table, lengths, starts, 300, size**-0.5, window, k_scale, v_scale)
    attention.paged_prefill(out, *args)
    for b, (length, new) in enumerate(zip(lengths_list, news_list, strict=True)):
        if new == 0:
            continue
        k, v = (c.float()[table[b].long()].flatten(0, 1)[:length].double() for c in cache)
        k = k.repeat_interleave(heads // key_heads, 1) * k_scale
        v = v.repeat_interleave(heads // key_heads, 1) * v_scale
        scores = torch.einsum("nhd,thd->hnt", q[starts[b] : starts[b + 1]].double(), k) * size**-0.5
        position = torch.arange(length - new, length, device=DEVICE)[:, None]
        key = torch.arange(length, device=DEVICE)[None]
        hidden = (key > position) | ((key <= position - window) if window else key < 0)
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        want = torch.einsum("hnt,thd->nhd", p, v)
        assert error(out[starts[b] : starts[b + 1]].flatten(1), want.flatten(1)) < 3e-3
    again = torch.empty_like(out)
    attention.paged_prefill(again, *args)
    assert torch.equal(out, again)


def test_clear_refusals() -> None:
    weight, scale = matrix(32, 64)
    packed = ops.prepare_linear(weight.clone(), scale, torch.tensor(1.0, device=DEVICE))
    with pytest.raises(ValueError, match=r"x: got torch.bfloat16 .* allowed is torch.float16"):
        ops.nvfp4_linear(torch.zeros(1, 64, device=DEVICE, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="x: got"):
        ops.nvfp4_linear(torch.zeros(1, 32, device=DEVICE).half(), packed)
    with pytest.raises(ValueError, match="bias: got"):
        ops.nvfp4_linear(
            torch.zeros(1, 64, device=DEVICE).half(), packed, torch.zeros(3, device=DEVICE).half()
        )
    bad = scale.view(torch.uint8).clone()
    bad[0, 0] = 0x7F
    with pytest.raises(ValueError, match="NaN"):
        ops.prepare_linear(weight, bad.view(torch.float8_e4m3fn), torch.tensor(1.0, device=DEVICE))
