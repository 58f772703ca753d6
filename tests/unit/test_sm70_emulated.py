"""The kernels' own source, compiled for the CPU and run thread by thread (sm70_emulation/host.h): the only way to
run what is particular to Volta (the lay-out of its tensor-core fragments) where there is no V100."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from voltriton_vllm.sm70 import compile as compiling
from voltriton_vllm.sm70 import layout, variants
from voltriton_vllm.sm70.variants import Gemm, Gemv, MoeDown, MoeUp, ceil_div

if shutil.which("g++") is None:
    pytest.skip("no g++", allow_module_level=True)

HOST = Path(__file__).parent / "sm70_emulation" / "host.h"
GEMMS = [
    Gemm(1, 1, 4, 2, 1, 0, 3),
    Gemm(2, 1, 1, 8, 1, 0, 3),
    Gemm(4, 1, 4, 1, 1, 2, 3),
    Gemm(8, 2, 4, 1, 1, 1, 2),
]
GEMVS = [Gemv(1, 8, 2, 1, 8, 2, 4), Gemv(1, 16, 2, 2, 8, 2, 3), Gemv(2, 16, 2, 2, 8, 2, 3)]
MOES = [v for least, both in variants.MOE_GEMM if least < 128 for v in both]
UP, DOWN = MoeUp(8, 2, 4, 4, 2, 8), MoeDown(2, 2, 1, 2)


def without_ptx(source: str) -> str:
    """The source without the functions that are PTX: host.h has their like."""
    functions = re.compile(
        r'^(?:DEV|extern "C" __global__)[^\n;]*\([^;{]*\)\s*\{(?:[^\n]*\}\n|.*?^\}\n)', re.M | re.S
    )
    kept = functions.sub(lambda m: "" if "asm" in m[0] or "habs_add2(u32" in m[0] else m[0], source)
    assert "asm" not in kept, kept[kept.index("asm") - 200 :][:400]
    return kept


CALLS = r"""
extern "C" void call_gemm(int which, const int* grid, int threads, const uint4* qw, const u16* sc, const float* gs,
    const u16* x, const u16* bias, u16* y, int M, int N, int K, int x_stride, float* part, int split_blocks, int kb) {
    run_grid(grid[0], grid[1], grid[2], threads, [=] {
        GEMM_CASES
    });
}
extern "C" void call_split_sum(const int* grid, const float* part, const float* gs, const u16* bias, u16* y, int splits,
    int M, int N) {
    run_grid(grid[0], grid[1], 1, 256, [=] { split_sum(part, gs, bias, y, splits, M, N); });
}
extern "C" void call_gemv(int which, const int* grid, int threads, const uint4* qw, const u16* sc, const float* gs,
    const u16* x, const u16* bias, u16* y, int N, int K, int x_stride, int seg_steps) {
    run_grid(grid[0], 1, 1, threads, [=] {
        GEMV_CASES
    });
}
extern "C" void call_decode(int which, const int* grid, int threads, const u16* q, u16* out, const u8* k, const u8* v,
    const int* table, const int* lengths, const u16* new_k, const u16* new_v, const u64* slots, float* part, float* stats, const int* strides, int heads, int group,
    int block_size, int block_magic, int table_stride, int window, float scale, float v_scale) {
    const int* s = strides;
    run_grid(grid[0], grid[1], grid[2], threads, [=] {
        DECODE_CASES
    });
}
extern "C" void call_write_cache(const int* grid, const u16* key, const u16* value, u8* k, u8* v, const u64* slots,
    const int* s, int heads, int size, int block_size, float k_factor, float v_factor) {
    run_grid(grid[0], grid[1], 1, 128, [=] {
        write_cache(key, value, k, v, slots, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], heads, size,
            block_size, k_factor, v_factor);
    });
}
extern "C" void call_combine(const int* grid, int size, const float* part, const float* stats, const int* lengths, u16* out,
    int splits, int quantum, int window, int out_seq, int out_head, float v_scale) {
    run_grid(grid[0], grid[1], 1, 128, [=] {
        auto run = size == 64 ? decode_combine_d64 : size == 128 ? decode_combine_d128 : decode_combine_d256;
        run(part, stats, lengths, out, splits, quantum, window, out_seq, out_head, v_scale);
    });
}
extern "C" void call_moe_gemm(int which, const int* grid, int threads, const uint4* qw, const u16* sc, const float* gs,
    const u16* x, u16* y, const int* rows, const float* row_weight, const int* offsets, const int* tile_start, int E, int N,
    int K, int x_stride, int x_div, int kb) {
    run_grid(grid[0], grid[1], 1, threads, [=] {
        MOE_CASES
    });
}
extern "C" void call_up(const int* grid, int threads, const uint4* qw, const u16* sc, const float* gs, const u16* x,
    u16* act, const int* ids, const int* map, int topk, int N, int K, int x_stride, int seg_steps) {
    run_grid(grid[0], grid[1], 1, threads, [=] {
        UP_NAME(qw, sc, gs, x, act, ids, map, topk, N, K, x_stride, seg_steps);
    });
}
extern "C" void call_down(const int* grid, int threads, const uint4* qw, const u16* sc, const float* gs, const u16* act,
    const int* ids, const int* map, const float* weights, u16* y, int topk, int N, int K) {
    run_grid(grid[0], grid[1], 1, threads, [=] { DOWN_NAME(qw, sc, gs, act, ids, map, weights, y, topk, N, K); });
}
"""


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=[70, 80])
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp(f"frag{request.param}")
    cases = {
        "GEMM_CASES": "".join(
            f"if (which == {i}) {v.name}(qw, sc, gs, x, bias, y, M, N, K, x_stride, part, split_blocks, kb);"
            for i, v in enumerate(GEMMS)
        ),
        "GEMV_CASES": "".join(
            f"if (which == {i}) {v.name}(qw, sc, gs, x, bias, y, N, K, x_stride, seg_steps);"
            for i, v in enumerate(GEMVS)
        ),
        "DECODE_CASES": "".join(
            f"if (which == {i}) {v.name}(q, out, k, v, table, lengths, new_k, new_v, slots, part, stats, "
            f"{', '.join(f's[{j}]' for j in range(14))}, heads, group, block_size, block_magic, table_stride, window, scale, v_scale);"
            for i, v in enumerate(variants.DECODE[request.param].values())
        ),
        "MOE_CASES": "".join(
            f"if (which == {i}) {v.name}(qw, sc, gs, x, y, rows, row_weight, offsets, tile_start, E, N, K, x_stride, x_div, kb);"
            for i, v in enumerate(MOES)
        ),
        "UP_NAME": UP.name,
        "DOWN_NAME": DOWN.name,
    }
    calls = re.sub("|".join(cases), lambda m: cases[m[0]], CALLS)
    kernels = without_ptx(
        compiling.read_source("sm70_moe.cu", "sm70_gemm.cu", "sm70_decode.cu", "sm70_cache.cu")
    )
    lines = [v.line() for v in (*GEMMS, *GEMVS, *MOES, UP, DOWN, *variants.DECODE[request.param].values())]
    text = "\n".join([f"#define FRAG {request.param}", f'#include "{HOST}"', kernels, *lines, calls])
    (folder / "kernels.cpp").write_text(text)
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", "kernels.so", "kernels.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return request.param, ctypes.CDLL(str(folder / "kernels.so"))


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def grid(*sizes: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * 3)(*sizes, *([1] * (3 - len(sizes))))


def matrix(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(words, scales, row factors, float64 values)."""
    generator = torch.Generator().manual_seed(n * k)
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x20, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator).view(
        torch.float8_e4m3fn
    )
    rows = torch.rand(n, generator=generator) * 1e-3 + 1e-4
    values = layout.dequantise(weight, scale, rows)
    return (*layout.pack(weight, scale), rows, values)


def close(got: torch.Tensor, want: torch.Tensor, limit: float = 1.5e-3) -> bool:
    """Every element written and right."""
    return bool(((got.double() - want).norm() / want.norm()).nan_to_num(float("inf")) < limit)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("which", range(len(GEMMS)))
def test_tensor_core_product(library: tuple[int, ctypes.CDLL], which: int, splits: int) -> None:
    fragment, lib = library
    variant, n, k = GEMMS[which], 70, 528
    m = 8 * variant.xb - 3
    words, scales, rows, values = matrix(n, k)
    x, bias = torch.randn(m, k).half(), torch.randn(n).half()
    y = torch.full((m, n), float("nan")).half()
    split_blocks = ceil_div(ceil_div(k, 128), splits)
    parts = ceil_div(ceil_div(k, 128), split_blocks)
    part = torch.full((parts, m, n), float("nan")) if splits > 1 else None
    kb, shared = variant.staging(split_blocks * 128, fragment)
    assert shared <= variants.MAX_SHARED
    lib.call_gemm(
        which,
        grid(ceil_div(n, variant.rows), ceil_div(m, 8 * variant.xb), parts),
        variant.threads,
        *(pointer(t) for t in (words, scales, rows, x, bias, y)),
        *(m, n, k, k),
        pointer(part),
        split_blocks,
        kb,
    )
    if part is not None:
        tensors = [pointer(t) for t in (part, rows, bias, y)]
        lib.call_split_sum(grid(ceil_div(n, 256), m), *tensors, parts, m, n)
    assert close(y, x.double() @ values.T + bias.double())


@pytest.mark.parametrize("which", range(len(GEMVS)))
@pytest.mark.parametrize("size", [1.0, 6e4, 1e-5])
def test_vector_product(library: tuple[int, ctypes.CDLL], which: int, size: float) -> None:
    _, lib = library
    variant, n, k = GEMVS[which], 70, 1040
    words, scales, rows, values = matrix(n, k)
    x = (torch.rand(variant.m, k) * 2 - 1).mul(size).half()
    rows = rows / size
    values = values / size
    y = torch.full((variant.m, n), float("nan")).half()
    steps, _ = variant.staging(k)
    tensors = [pointer(t) for t in (words, scales, rows, x, None, y)]
    lib.call_gemv(which, grid(ceil_div(n, variant.rows)), variant.nw * 32, *tensors, n, k, k, steps)
    assert close(y, x.double() @ values.T)


def test_experts_of_few_tokens(library: tuple[int, ctypes.CDLL]) -> None:
    _, lib = library
    experts, inter, hidden, topk, tokens = 3, 48, 80, 2, 2
    w13, s13, g13, v13 = matrix(experts * 2 * inter, hidden)
    w2, s2, g2, v2 = matrix(experts * hidden, inter)
    x, weights = torch.randn(tokens, hidden).half(), torch.rand(tokens, topk)
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    expert_map = torch.tensor([0, -1, 2], dtype=torch.int32)
    act = torch.full((tokens * topk, inter), float("nan")).half()
    y = torch.full((tokens, hidden), float("nan")).half()
    steps, _ = UP.staging(hidden)
    tensors = [pointer(t) for t in (w13, s13, g13, x, act, ids, expert_map)]
    lib.call_up(grid(ceil_div(inter, UP.rows), 4), UP.nw * 32, *tensors, topk, inter, hidden, hidden, steps)
    warps, _ = DOWN.launch(inter, topk)
    tensors = [pointer(t) for t in (w2, s2, g2, act, ids, expert_map, weights, y)]
    lib.call_down(grid(ceil_div(hidden, DOWN.rows), tokens), warps * 32, *tensors, topk, hidden, inter)
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    v13, v2 = v13.view(experts, 2 * inter, hidden), v2.view(experts, hidden, inter)
    for m in range(tokens):
        for t in range(topk):
            e = int(ids[m, t])
            if expert_map[e] < 0:
                continue
            h = v13[e] @ x[m].double()
            want[m] += weights[m, t].double() * (v2[e] @ (torch.nn.functional.silu(h[:inter]) * h[inter:]))
    assert close(y, want, 3e-3)  # activations are rounded to half on the way


@pytest.mark.parametrize("which", range(len(MOES)))
def test_experts_of_many_tokens(library: tuple[int, ctypes.CDLL], which: int) -> None:
    """Products of sorted pairs: gate, up and SiLU at once, or down with the router's weights."""
    fragment, lib = library
    variant, experts, n, k, topk, tokens = MOES[which], 3, 72, 272, 2, 13
    words, scales, factors, values = matrix(experts * n * (1 + variant.pair), k)
    values = values.view(experts, -1, k)
    ids = torch.tensor([[0, 2], *[[2, 0]] * (tokens - 1)])  # none of expert 1
    order = ids.flatten().sort(stable=True).indices.int()
    offsets = torch.tensor([0, tokens, tokens, 2 * tokens], dtype=torch.int32)
    tiles = (offsets.diff() + 8 * variant.xb - 1) // (8 * variant.xb)
    starts = torch.cat((torch.zeros(1), tiles.cumsum(0))).int()
    x_div = topk if variant.pair else 1
    x = torch.randn(topk * tokens // x_div, k).half()
    weights = None if variant.pair else torch.rand(topk * tokens)
    y = torch.full((topk * tokens, n), float("nan")).half()
    blocks, shared = variant.staging(k, fragment)
    assert shared <= variants.MAX_SHARED
    tensors = [pointer(t) for t in (words, scales, factors, x, y, order, weights, offsets, starts)]
    most = grid(ceil_div(n, variant.columns), int(starts[-1]) + 1)
    lib.call_moe_gemm(which, most, variant.threads, *tensors, experts, n, k, k, x_div, blocks)
    want = torch.einsum("pk,pnk->pn", x.double().repeat_interleave(x_div, 0), values[ids.flatten()])
    if variant.pair:
        want = torch.nn.functional.silu(want[:, :n]) * want[:, n:]
    assert close(y, want if weights is None else want * weights[:, None])


@pytest.mark.parametrize(
    ("size", "e4m3", "splits"), [(64, 0, 1), (128, 1, 1), *((*kind, 3) for kind in variants.DECODE[70])]
)
def test_decode_attention(library: tuple[int, ctypes.CDLL], size: int, e4m3: int, splits: int) -> None:
    """Every key and column is where the lay-out of fragments puts it; what lies behind the context is never used."""
    fragment, lib = library
    table_of = variants.DECODE[fragment]
    variant, which = table_of[size, e4m3], list(table_of).index((size, e4m3))
    heads, key_heads, block, window = 6, 2, 32, 0 if splits == 1 else 200
    lengths = torch.tensor([5, 0, 2 * variant.keys + 21], dtype=torch.int32)
    pages = ceil_div(int(lengths.max()), block)
    cache = torch.randn(2, 3 * pages, block, key_heads, size).half()
    cache = cache.to(torch.float8_e4m3fn) if e4m3 else cache
    table = torch.randperm(3 * pages).int().view(3, pages)
    last = table[2, -1]
    cache[:, last, int(lengths[2]) % block :] = float("nan")
    q = torch.randn(3, heads, size).half()
    news = [torch.randn(3, key_heads, size).half() for _ in cache]
    at = torch.tensor(
        [[int(table[b, (max(n, 1) - 1) // block]), (max(n, 1) - 1) % block] for b, n in enumerate(lengths)]
    )
    slots = at[:, 0] * block + at[:, 1]
    slots[:2] = -1  # nothing of these is written
    new = [None, None, None] if e4m3 else [*news, slots]
    want = cache.clone()
    if not e4m3:
        cache[(slice(None), *at[2])] = float("nan")
        want[(0, *at[2])], want[(1, *at[2])] = news[0][2], news[1][2]
    out = torch.full_like(q, float("nan"))
    part, stats = (
        torch.full((3, heads, splits, size), float("nan")),
        torch.full((3, heads, splits, 2), float("nan")),
    )
    strides = [c.stride(d) * c.element_size() for c in cache for d in range(3)]
    strides += [n for t in (*news, q, out) for n in t.stride()[:2]]
    lib.call_decode(
        which,
        grid(splits, key_heads, 3),
        variant.warps * 32,
        *(pointer(t) for t in (q, out, cache[0], cache[1], table, lengths, *new, part, stats)),
        (ctypes.c_int * len(strides))(*strides),
        *(heads, heads // key_heads, block, ceil_div(1 << 32, block), pages, window),
        ctypes.c_float(size**-0.5 * 1.4426950408889634 * (256 if e4m3 else 1)),
        ctypes.c_float(256 if e4m3 else 1),
    )
    lib.call_combine(
        grid(heads, 3),
        size,
        *(pointer(t) for t in (part, stats, lengths, out)),
        *(splits, variant.keys, window, out.stride(0), out.stride(1)),
        ctypes.c_float(256 if e4m3 else 1),
    )
    assert not out[1].any()
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))
    for b in (0, 2):
        first = max(0, int(lengths[b]) - window) if window else 0
        k, v = (c.float()[table[b].long()].flatten(0, 1)[first : lengths[b]].double() for c in cache)
        k, v = (t.repeat_interleave(heads // key_heads, 1) for t in (k, v))
        p = (torch.einsum("hd,thd->ht", q[b].double(), k) * size**-0.5).softmax(-1)
        assert close(out[b], torch.einsum("ht,thd->hd", p, v))


def test_new_keys_into_a_cache_of_e4m3_bytes(library: tuple[int, ctypes.CDLL]) -> None:
    """Every half but NaN and what lies beyond +-448 becomes what PyTorch's conversion makes of it."""
    _, lib = library
    heads, size, block, k_scale = 2, 64, 16, 0.25
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    key = every.view(-1, heads, size)
    tokens = key.shape[0]
    pages = tokens // block + 1
    wide = torch.randn(tokens, 3, size).half() * 100
    value = wide[:, :heads]  # strided
    slots = torch.randperm(pages * block)[:tokens]
    slots[3] = -1
    cache = torch.randint(0, 256, (pages, heads, block, 2 * size), dtype=torch.uint8)
    keys, values = cache.transpose(1, 2).split(size, dim=-1)
    untouched = torch.ones(pages * block, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    before = keys.reshape(-1, heads, size)[untouched].clone()
    strides = [c.stride(d) for c in (keys, values) for d in range(3)]
    strides += [n for t in (key, value) for n in t.stride()[:2]]
    lib.call_write_cache(
        grid(tokens, 2),
        *(pointer(t) for t in (key, value, keys, values, slots)),
        (ctypes.c_int * len(strides))(*strides),
        *(heads, size, block),
        ctypes.c_float(1 / k_scale),
        ctypes.c_float(1.0),
    )
    written = slots >= 0
    for found, new, scale in ((keys, key, k_scale), (values, value, 1.0)):
        exact = (new.float() / scale).clamp(-448, 448)  # clamp keeps NaN
        want = exact.to(torch.float8_e4m3fn).float()[written]
        got = found.reshape(-1, heads, size)[slots[written]].view(torch.float8_e4m3fn).float()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(keys.reshape(-1, heads, size)[untouched], before)
