"""NVFP4 and half-precision matrix products as torch custom ops: which kernel runs, and its launch."""

from __future__ import annotations

import torch

from voltriton_vllm.sm70 import variants
from voltriton_vllm.sm70.runtime import Runtime, runtime
from voltriton_vllm.sm70.variants import GEMV, Gemm, Gemv, ceil_div

_EXPAND_ROWS = 4 * 65280  # what one launch of `dequant` can cover, in whole tiles
_SCRATCH_BYTES = 128 * 1024 * 1024  # expanded weights that are alive at a time for cuBLAS
# Rows of x up to which the tensor-core kernel is used; above, weights are expanded once and cuBLAS multiplies.
_GEMM_ROWS = 64


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x with rows that 16-byte loads can read; copied where they cannot."""
    if x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _device(x: torch.Tensor) -> Runtime:
    return runtime(x.device.index)


@torch.library.custom_op("voltriton_sm70::nvfp4_matmul", mutates_args=(), device_types="cuda")
def nvfp4_matmul(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x float16 [M, K] times the packed matrix (`ops.PackedLinear`) -> float16 [M, N]."""
    m, n = x.shape[0], words.shape[0]
    y = torch.empty(m, n, dtype=torch.float16, device=x.device)
    if m == 0:
        return y
    x = aligned(x)
    device = _device(x)
    if m <= 2:
        _gemv(device, x, words, scale, row_scale, bias, y)
    elif m <= _GEMM_ROWS and device.tensor_cores:
        _gemm(device, x, words, scale, row_scale, bias, y)
    else:
        _expand_and_multiply(device, x, words, scale, row_scale, bias, y)
    return y


@nvfp4_matmul.register_fake
def _(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], words.shape[0])


def _gemv(
    device: Runtime,
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    variant = variants.by_rows(GEMV[x.shape[0]], words.shape[0])
    launch_gemv(device, variant, x, words, scale, row_scale, bias, y)


def launch_gemv(
    device: Runtime,
    variant: Gemv,
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    n, k = words.shape[0], x.shape[1]
    steps, shared = variant.staging(k)
    grid = (ceil_div(n, variant.rows), 1, 1)
    device.kernel(variant.name)(
        grid, variant.nw * 32, shared, words, scale, row_scale, x, bias, y, n, k, x.stride(0), steps
    )


def _gemm(
    device: Runtime,
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    (m, k), n = x.shape, words.shape[0]
    variant, splits = variants.gemm_for(m, n, k, device.multiprocessors)
    launch_gemm(device, variant, splits, x, words, scale, row_scale, bias, y)


def launch_gemm(
    device: Runtime,
    variant: Gemm,
    splits: int,
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """splits > 1: K is cut into that many parts, whose sums a second launch adds in order."""
    (m, k), n = x.shape, words.shape[0]
    blocks_a_split = ceil_div(ceil_div(k, 128), splits)
    splits = ceil_div(ceil_div(k, 128), blocks_a_split)
    blocks, shared = variant.staging(blocks_a_split * 128, device.fragment)
    grid = (ceil_div(n, variant.rows), ceil_div(m, 8 * variant.xb), splits)
    part = None if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    ends = (m, n, k, x.stride(0), part, blocks_a_split, blocks)
    device.kernel(variant.name)(grid, variant.threads, shared, words, scale, row_scale, x, bias, y, *ends)
    if part is not None:
        device.kernel("split_sum")((ceil_div(n, 256), m, 1), 256, 0, part, row_scale, bias, y, splits, m, n)


def expand(
    device: Runtime,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    first: int,
    rows: int,
    k: int,
    out: torch.Tensor,
) -> None:
    """out[:rows] = the weights of rows first..first+rows in float16."""
    grid = (ceil_div(k // 8, 64), ceil_div(rows, 4), 1)
    device.kernel("dequant")(grid, (64, 4, 1), 0, words, scale, row_scale, out, first, rows, k)


def _expand_and_multiply(
    device: Runtime,
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    n, k = words.shape[0], x.shape[1]
    parts = ceil_div(n * 2 * k, _SCRATCH_BYTES)
    step = min(n, ceil_div(ceil_div(n, parts), 256) * 256, _EXPAND_ROWS)  # whole tiles of the product
    half = torch.empty(step, k, dtype=torch.float16, device=x.device)
    for first in range(0, n, step):
        rows = min(step, n - first)
        expand(device, words, scale, row_scale, first, rows, k, half)
        torch.mm(x, half[:rows].t(), out=y[:, first : first + rows])
    if bias is not None:
        y.add_(bias)


@torch.library.custom_op("voltriton_sm70::half_matmul", mutates_args=(), device_types="cuda")
def half_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x float16 [M, K] @ weight.T (+ bias), weight float16 [N, K]; float32 sums. With many rows cuBLAS."""
    m, k = x.shape
    n = weight.shape[0]
    variant = variants.half_gemv(m, n, k)
    if variant is None or k % 8 or weight.data_ptr() % 16 or not weight.is_contiguous():
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.empty(m, n, dtype=torch.float16, device=x.device)
    x = aligned(x)
    grid = (ceil_div(n, variant.rows), 1, 1)
    _device(x).kernel(variant.name)(
        grid, variant.nw * 32, variant.shared_bytes(k), weight, x, bias, y, n, k, x.stride(0)
    )
    return y


@half_matmul.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
