"""Attention over a paged cache as torch custom ops: one new token a sequence, or several."""

from __future__ import annotations

import ctypes
import math

import torch

from voltriton_vllm.sm70 import ops
from voltriton_vllm.sm70.runtime import runtime
from voltriton_vllm.sm70.variants import (
    COMBINE_SHARED,
    COMBINE_THREADS,
    DECODE,
    PREFILL,
    ceil_div,
    split_count,
)

HEAD_SIZES = (64, 128, 256)
BLOCK_QUANTUM = 16  # what a block size of the cache is a multiple of


def available() -> bool:
    """Whether these kernels run on the current device; if not, the reason was logged once."""
    return ops.available() and runtime(torch.cuda.current_device()).tensor_cores


_DECODE_WRITES = ("out", "key_cache", "value_cache")


@torch.library.custom_op("voltriton_sm70::paged_decode", mutates_args=_DECODE_WRITES, device_types="cuda")
def paged_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    scale: float,
    window: int,
    k_scale: float,
    v_scale: float,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """out[b] = softmax(scale * query[b] . keys) . values, one new token a sequence; float32 inside.

    out, query float16 [B, heads, D], D in HEAD_SIZES, last dimension contiguous. key_cache, value_cache
    [blocks, block size, key heads, D] of any strides (last one 1), float16, or e4m3 bytes (uint8 or
    float8_e4m3fn) that count k_scale and v_scale times. block_table int32 [B, >= blocks of a sequence],
    lengths int32 [B]: tokens to attend to, the new one included; 0 gives zeros. max_length: a bound of
    the lengths (it sets the launch; in a captured graph the model's maximum). window: attend to the last
    `window` tokens only; 0 for all. key, value: float16 [B, key heads, D], the new tokens', which are not in
    the (float16) cache yet: they are written there, at slots int64 [B], block * block size + place in it; a
    negative one is written nowhere. Raises ValueError.
    """
    _check(out, query, key_cache, value_cache, block_table, lengths)
    if key is not None or value is not None:
        if key_cache.dtype != torch.float16:
            raise ValueError(f"key_cache: got {key_cache.dtype}, allowed with new keys is torch.float16")
        _check_new(key, value, slots, (query.shape[0], key_cache.shape[2], query.shape[2]))
    device = runtime(query.device.index)
    batch = query.shape[0]
    if batch == 0:
        return
    if not device.tensor_cores:
        raise ValueError("paged_decode: this device lays tensor-core fragments out in an unknown way")
    heads, size = query.shape[1:]
    key_heads = key_cache.shape[2]
    variant = DECODE[device.fragment][size, int(key_cache.element_size() == 1)]
    # Blocks that share a sequence: each takes up to 16 query heads of a key head.
    chunks = key_heads * ceil_div(heads // key_heads, 16)
    splits = split_count(variant, batch * chunks, max_length, device.multiprocessors)
    part = torch.empty(batch, heads, splits, size, dtype=torch.float32, device=query.device)
    stats = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=query.device)
    in_score, in_value = _factors(key_cache, scale * k_scale, v_scale)
    device.kernel(variant.name)(
        (splits, chunks, batch),
        variant.warps * 32,
        variant.shared_bytes,
        query,
        out,
        key_cache,
        value_cache,
        block_table,
        lengths,
        key,
        value,
        slots,
        part,
        stats,
        *_strides(key_cache, value_cache),
        *(n for new in (key, value) for n in ((0, 0) if new is None else (new.stride(0), new.stride(1)))),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        heads,
        heads // key_heads,
        key_cache.shape[1],
        ceil_div(1 << 32, key_cache.shape[1]),
        block_table.stride(0),
        window,
        in_score,
        in_value,
    )
    if splits > 1:
        ends = (splits, variant.keys, window, out.stride(0), out.stride(1), in_value)
        device.kernel(f"decode_combine_d{size}")(
            (heads, batch, 1), COMBINE_THREADS, COMBINE_SHARED, part, stats, lengths, out, *ends
        )


@torch.library.custom_op("voltriton_sm70::paged_prefill", mutates_args=("out",), device_types="cuda")
def paged_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    max_new: int,
    scale: float,
    window: int,
    k_scale: float,
    v_scale: float,
) -> None:
    """Causal attention of each sequence's new tokens, whose keys and values are in the cache already.

    As `paged_decode`, but out and query are [tokens, heads, D] for all sequences' new tokens one after
    another; starts int32 [B + 1]: where each sequence's begin; lengths: tokens in the cache, the new ones
    included; max_new: a bound of the new tokens of a sequence. A token attends to itself and what is before.
    """
    _check(out, query, key_cache, value_cache, block_table, lengths)
    if out.data_ptr() % 16 or out.stride(0) % 8 or out.stride(1) % 8:
        raise ValueError("out: must be aligned to 16 bytes")
    if starts.dtype != torch.int32 or starts.numel() != lengths.numel() + 1:
        raise ValueError(f"starts: got {starts.dtype} {tuple(starts.shape)}, allowed is int32 [B + 1]")
    if query.shape[0] == 0 or max_new == 0:
        return
    heads, size = query.shape[1:]
    variant = PREFILL[size, int(key_cache.element_size() == 1)]
    runtime(query.device.index).kernel(variant.name)(
        (ceil_div(max_new, variant.tokens), heads, lengths.numel()),
        variant.warps * 32,
        variant.shared_bytes,
        query,
        out,
        key_cache,
        value_cache,
        block_table,
        lengths,
        starts,
        *(ctypes.c_uint64(n) for n in _strides(key_cache, value_cache)),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        heads // key_cache.shape[2],
        key_cache.shape[1],
        block_table.stride(0),
        window,
        *_factors(key_cache, scale * k_scale, v_scale),
    )


@torch.library.custom_op(
    "voltriton_sm70::write_cache", mutates_args=("key_cache", "value_cache"), device_types="cuda"
)
def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Keys and values of new tokens, rounded to e4m3 after division by k_scale and v_scale, into the cache.

    key, value float16 [>= T, key heads, D], of more than T the first T are meant; key_cache, value_cache as
    `paged_decode` takes them, of e4m3 bytes; slots int64 [T] as there. What e4m3 cannot hold becomes +-448.
    Raises ValueError.
    """
    tokens = slots.numel()
    for cache in (key_cache, value_cache):
        if cache.element_size() != 1:
            raise ValueError(f"key_cache, value_cache: got {cache.dtype}, allowed are e4m3 bytes")
    if not (k_scale > 0 and v_scale > 0):
        raise ValueError(f"k_scale, v_scale: got {k_scale}, {v_scale}, allowed are numbers over 0")
    heads, size = key_cache.shape[2:]
    _check_caches(key_cache, value_cache)
    key, value = key[:tokens], value[:tokens]
    _check_new(key, value, slots, (tokens, heads, size))
    if tokens == 0:
        return
    runtime(key.device.index).kernel("write_cache")(
        (tokens, 2, 1),
        128,
        0,
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *_strides(key_cache, value_cache),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        heads,
        size,
        key_cache.shape[1],
        1 / k_scale,
        1 / v_scale,
    )


def _factors(cache: torch.Tensor, scale: float, v_scale: float) -> tuple[float, float]:
    """Of a product of query and key, for powers of two, and of a value; e4m3 bytes are expanded to value * 2^-8."""
    expansion = 256.0 if cache.element_size() == 1 else 1.0
    return scale * math.log2(math.e) * expansion, v_scale * expansion


def _strides(*caches: torch.Tensor) -> list[int]:
    """Bytes between blocks, tokens and heads of each cache."""
    return [c.stride(dim) * c.element_size() for c in caches for dim in range(3)]


def _check_new(
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    slots: torch.Tensor | None,
    allowed: tuple[int, int, int],
) -> None:
    if slots is None or slots.dtype != torch.int64 or slots.numel() != allowed[0]:
        got = None if slots is None else f"{slots.dtype} {tuple(slots.shape)}"
        raise ValueError(f"slots: got {got}, allowed is torch.int64 ({allowed[0]},)")
    for name, new in (("key", key), ("value", value)):
        if new is None or new.dtype != torch.float16 or new.shape != allowed:
            got = None if new is None else f"{new.dtype} {tuple(new.shape)}"
            raise ValueError(f"{name}: got {got}, allowed is torch.float16 {allowed}")
        if new.stride(-1) != 1 or new.data_ptr() % 16 or new.stride(0) % 8 or new.stride(1) % 8:
            raise ValueError(f"{name}: the last dimension must be contiguous, rows aligned to 16 bytes")


def _check(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    if query.dtype != torch.float16 or query.dim() != 3 or query.shape[2] not in HEAD_SIZES:
        got = f"{query.dtype} {tuple(query.shape)}"
        raise ValueError(f"query: got {got}, allowed is torch.float16 [B, heads, D], D in {HEAD_SIZES}")
    if out.shape != query.shape or out.dtype != torch.float16:
        raise ValueError(f"out: got {out.dtype} {tuple(out.shape)}, allowed is that of query")
    _check_caches(key_cache, value_cache)
    if key_cache.shape[3] != query.shape[2] or query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"key_cache: got shape {tuple(key_cache.shape)} for query {tuple(query.shape)}")
    if any(t.stride(-1) != 1 for t in (out, query)):
        raise ValueError("out, query: the last dimension must be contiguous")
    if query.data_ptr() % 16 or query.stride(0) % 8 or query.stride(1) % 8:
        raise ValueError("query: must be aligned to 16 bytes")
    if block_table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise ValueError(
            f"block_table, lengths: got {block_table.dtype}, {lengths.dtype}, allowed is torch.int32"
        )


def _check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if key_cache.dtype not in (torch.float16, torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"key_cache: got {key_cache.dtype}, allowed are float16 and e4m3 bytes")
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError("key_cache, value_cache: got different shapes or types, allowed are equal ones")
    if any(c.stride(-1) != 1 for c in (key_cache, value_cache)):
        raise ValueError("key_cache, value_cache: the last dimension must be contiguous")
    if key_cache.shape[1] % BLOCK_QUANTUM:
        raise ValueError(
            f"key_cache: got blocks of {key_cache.shape[1]}, allowed are multiples of {BLOCK_QUANTUM}"
        )
    if max(_strides(key_cache, value_cache)) >= 1 << 31:
        raise ValueError("key_cache, value_cache: got strides over 2 GiB")
    if any(c.data_ptr() % 16 or c.stride(1) % 16 or c.stride(2) % 16 for c in (key_cache, value_cache)):
        raise ValueError("key_cache, value_cache: must be aligned to 16 bytes")
