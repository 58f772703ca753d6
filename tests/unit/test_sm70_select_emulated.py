"""Selection kernels (csrc/sm70_select.cu), compiled for the CPU and run thread by thread (sm70_emulation/host.h)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch
from test_sm70_emulated import HOST, grid, pointer, without_ptx
from voltriton_vllm.sm70 import compile as compiling

if shutil.which("g++") is None:
    pytest.skip("no g++", allow_module_level=True)

CALLS = r"""
extern "C" void call_topk_rows(const int* grid, const float* x, const int* lengths, int* places, int columns, int stride, int k) {
    run_grid(grid[0], 1, 1, 1024, [=] { topk_rows(x, lengths, places, columns, stride, k); });
}
extern "C" void call_topk_softmax(const int* grid, float* weights, int* ids, int* source, const void* logits, int tokens,
    int E, int topk, int renormalise, int is_half) {
    run_grid(grid[0], 1, 1, 128, [=] {
        topk_softmax(weights, ids, source, logits, tokens, E, topk, renormalise, is_half);
    });
}
"""
INFINITE, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("select")
    # Arrays in shared memory belong to the block: one at a time runs here.
    head = f'#include "{HOST}"\n#undef __shared__\n#define __shared__ static\n'
    kernels = without_ptx(compiling.read_source("sm70_select.cu"))
    (folder / "select.cpp").write_text(head + kernels + CALLS)
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", "select.so", "select.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "select.so"))


def best_places(row: torch.Tensor, k: int) -> list[int]:
    """Of the k largest, of equal ones the first; ascending; -1 where there are fewer."""
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:k]
    return sorted(order) + [-1] * (k - len(order))


def rows_of(kind: str, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(1, columns, generator=generator)
    if kind == "ties":
        x = (x * 2).round()
    if kind == "one value":
        x = torch.full_like(x, -1.5)
    if kind == "both infinities":
        x[0, ::7], x[0, 1::5] = INFINITE, -INFINITE
    if kind == "many magnitudes":
        x = x * 10.0 ** torch.randint(-30, 30, x.shape, generator=generator)
    if kind == "zeros of the indexer":
        x = x.clamp_min(0)
    if kind == "both zeros":
        x = (x.abs() - 2).clamp_min(0) * x.sign()
    return x


@pytest.mark.parametrize(
    "kind",
    [
        "random",
        "ties",
        "one value",
        "both infinities",
        "many magnitudes",
        "zeros of the indexer",
        "both zeros",
    ],
)
@pytest.mark.parametrize(("columns", "k"), [(40, 16), (2500, 512), (1024, 1), (3000, 2999)])
def test_largest_of_a_row(library: ctypes.CDLL, kind: str, columns: int, k: int) -> None:
    """What lies behind a row's length must not be read."""
    values = rows_of(kind, columns)
    x = torch.cat([values, torch.full((1, 9), NAN)], dim=1)
    places = torch.full((1, k), 77, dtype=torch.int32)
    lengths = torch.tensor([columns], dtype=torch.int32)
    library.call_topk_rows(grid(1), *map(pointer, (x, lengths, places)), columns + 9, columns + 9, k)
    assert places[0].tolist() == best_places(values[0], k)


def test_rows_of_any_length(library: ctypes.CDLL) -> None:
    """None, fewer than wanted, as many, more, and more than there are columns; rows lie apart."""
    columns, stride, k = 70, 80, 8
    x = torch.randn(7, stride, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([0, 1, 7, 8, 9, 70, 2000], dtype=torch.int32)
    places = torch.full((7, k), 77, dtype=torch.int32)
    library.call_topk_rows(grid(7), *map(pointer, (x, lengths, places)), columns, stride, k)
    for row, length in enumerate(lengths.tolist()):
        assert places[row].tolist() == best_places(x[row, : min(length, columns)], k), length


@pytest.mark.parametrize("renormalise", [0, 1])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (60, 4), (128, 8), (512, 10), (1000, 32)])
def test_experts_of_a_token(
    library: ctypes.CDLL, experts: int, topk: int, half: int, renormalise: int
) -> None:
    tokens = 5
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(tokens, experts, generator=generator).half()
    logits[1] = logits[1].round()  # ties
    logits[2] = 0.5
    logits = logits if half else logits.float()
    weights = torch.full((tokens, topk), NAN)
    ids, source = (torch.full((tokens, topk), -7, dtype=torch.int32) for _ in range(2))
    tensors = map(pointer, (weights, ids, source, logits))
    library.call_topk_softmax(grid(2), *tensors, tokens, experts, topk, renormalise, half)
    share = logits.double().softmax(-1)
    for token in range(tokens):
        want = sorted(range(experts), key=lambda e, t=token: (-float(logits[t, e]), e))[:topk]
        assert ids[token].tolist() == want
        expected = share[token, want] / (share[token, want].sum() if renormalise else 1)
        assert torch.allclose(weights[token].double(), expected, rtol=1e-5)
        assert source[token].tolist() == [t * tokens + token for t in range(topk)]


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize(("experts", "topk"), [(8, 2), (512, 10), (1000, 16)])
def test_experts_of_a_row_without_numbers_exist(
    library: ctypes.CDLL, experts: int, topk: int, value: float
) -> None:
    logits = torch.full((1, experts), value)
    weights, ids = torch.zeros(1, topk), torch.full((1, topk), -7, dtype=torch.int32)
    library.call_topk_softmax(grid(1), *map(pointer, (weights, ids, None, logits)), 1, experts, topk, 1, 0)
    assert ids[0].tolist() == list(range(topk))
    assert torch.isnan(weights).all()
