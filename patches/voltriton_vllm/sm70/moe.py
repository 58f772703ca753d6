"""NVFP4 experts as a torch custom op: two launches for few tokens, grouped matrix products for many."""

from __future__ import annotations

import torch

from voltriton_vllm.sm70 import variants
from voltriton_vllm.sm70.runtime import Runtime, runtime
from voltriton_vllm.sm70.variants import MoeGemm, ceil_div


@torch.library.custom_op("voltriton_sm70::nvfp4_experts", mutates_args=(), device_types="cuda")
def nvfp4_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_row_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_row_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    intermediate: int,
) -> torch.Tensor:
    """x float16 [M, H] -> float16 [M, H]; the other tensors as in `ops.PackedMoe` and `ops.nvfp4_moe`."""
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    device = runtime(x.device.index)
    experts = Experts(device, (w13, w13_scale, w13_row_scale), (w2, w2_scale, w2_row_scale), intermediate)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    if experts.few(topk_ids) or not device.tensor_cores:
        return experts.by_pairs(x, topk_weights, topk_ids, expert_map)
    return experts.grouped(x, topk_weights, topk_ids, expert_map)


@nvfp4_experts.register_fake
def _(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_row_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_row_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    intermediate: int,
) -> torch.Tensor:
    return torch.empty_like(x)


_SORT_PAIRS, _SORT_EXPERTS = 8192, 1024  # that one block can sort
_SORT_WORK = 1 << 19  # pairs times experts from which on it is slower than torch's

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # words, scale, row scale


class Experts:
    """The launches for one layer's packed experts."""

    def __init__(self, device: Runtime, w13: Packed, w2: Packed, intermediate: int) -> None:
        self._device, self._w13, self._w2 = device, w13, w2
        self._experts, self._hidden = w2[0].shape[0], w2[0].shape[1]
        self._intermediate = intermediate

    def few(self, topk_ids: torch.Tensor) -> bool:
        """Whether most experts get at most one token, so that reading weights once a pair is right."""
        _, down_bytes = variants.moe_down(topk_ids.shape[0], self._intermediate).launch(
            self._intermediate, topk_ids.shape[1]
        )
        most = variants.moe_pairs_at_once(self._experts, self._intermediate, self._device.fragment)
        return topk_ids.numel() <= most and down_bytes > 0

    def by_pairs(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        act = torch.empty(topk_ids.numel(), self._intermediate, dtype=torch.float16, device=x.device)
        self.up(x, topk_ids, expert_map, act)
        y = torch.empty_like(x)
        self.down(act, topk_weights, topk_ids, expert_map, y)
        return y

    def up(
        self, x: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, act: torch.Tensor
    ) -> None:
        """act[pair] = silu(gate) * up of the pair's expert; not written where that is not of this rank."""
        variant = variants.moe_up(x.shape[0], self._intermediate)
        steps, shared = variant.staging(self._hidden)
        n, topk = self._intermediate, topk_ids.shape[1]
        grid = (ceil_div(n, variant.rows), topk_ids.numel(), 1)
        ends = (topk, n, self._hidden, x.stride(0), steps)
        self._device.kernel(variant.name)(
            grid, variant.nw * 32, shared, *self._w13, x, act, topk_ids, expert_map, *ends
        )

    def down(
        self,
        act: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        n, k, topk = self._hidden, self._intermediate, topk_ids.shape[1]
        variant = variants.moe_down(y.shape[0], k)
        warps, shared = variant.launch(k, topk)
        grid = (ceil_div(n, variant.rows), y.shape[0], 1)
        self._device.kernel(variant.name)(
            grid, warps * 32, shared, *self._w2, act, topk_ids, expert_map, topk_weights, y, topk, n, k
        )

    def grouped(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        pairs, topk = topk_ids.numel(), topk_ids.shape[1]
        up, down = variants.by_rows(variants.MOE_GEMM, pairs // self._experts)
        rows, offsets, tiles = self.sort(topk_ids, expert_map, 8 * up.xb)
        make = torch.empty if expert_map is None else torch.zeros  # pairs of other ranks count as zero
        act = torch.empty(pairs, self._intermediate, dtype=torch.float16, device=x.device)
        out = make(pairs, self._hidden, dtype=torch.float16, device=x.device)
        y = torch.empty_like(x)
        self.product(up, self._w13, x, topk, self._hidden, act, rows, None, offsets, tiles)
        k = self._intermediate
        self.product(down, self._w2, act, 1, k, out, rows, topk_weights, offsets, tiles)
        n = y.numel() // 8
        self._device.kernel("moe_sum")(
            (min(ceil_div(n, 256), 4096), 1, 1), 256, 0, y, out, y.shape[0], topk, self._hidden
        )
        return y

    def sort(
        self, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, tile_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pairs in the order of their experts (stable), where each expert's begin, and its first tile."""
        pairs = topk_ids.numel()
        short = pairs * self._experts <= _SORT_WORK
        if short and pairs <= _SORT_PAIRS and self._experts <= _SORT_EXPERTS:
            return self._sort_few(topk_ids, expert_map, tile_rows)
        ids = topk_ids.view(-1)
        if expert_map is not None:
            ids = expert_map[ids.long()]
        ids = torch.where(ids < 0, self._experts, ids)
        ordered, order = torch.sort(ids, stable=True)
        bounds = torch.arange(self._experts + 1, dtype=ids.dtype, device=ids.device)
        offsets = torch.searchsorted(ordered, bounds, out_int32=True)
        tiles = torch.zeros(self._experts + 1, dtype=torch.int32, device=ids.device)
        counts = offsets[1:] - offsets[:-1]
        torch.cumsum((counts + tile_rows - 1) // tile_rows, 0, dtype=torch.int32, out=tiles[1:])
        return order.to(torch.int32), offsets, tiles

    def _sort_few(
        self, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, tile_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `sort`, in one launch instead of a dozen."""
        pairs, device = topk_ids.numel(), topk_ids.device
        order = torch.empty(pairs, dtype=torch.int32, device=device)
        offsets, tiles = torch.empty(2, self._experts + 1, dtype=torch.int32, device=device)
        ends = (pairs, self._experts, tile_rows)
        self._device.kernel("moe_sort")(
            (1, 1, 1), 1024, 0, topk_ids, expert_map, order, offsets, tiles, *ends
        )
        return order, offsets, tiles

    def product(
        self,
        variant: MoeGemm,
        packed: Packed,
        x: torch.Tensor,
        pairs_a_row: int,
        k: int,
        y: torch.Tensor,
        rows: torch.Tensor,
        row_weight: torch.Tensor | None,
        offsets: torch.Tensor,
        tiles: torch.Tensor,
    ) -> None:
        """y[pair] = x[pair // pairs_a_row] @ W[expert].T (* row_weight[pair]), or silu(gate) * up of that."""
        n = y.shape[1]
        blocks, shared = variant.staging(k, self._device.fragment)
        # As many tiles as there can be; the kernel ends those that there are not.
        most = min(rows.numel(), rows.numel() // (8 * variant.xb) + self._experts)
        ends = (self._experts, n, k, x.stride(0), pairs_a_row, blocks)
        self._device.kernel(variant.name)(
            (ceil_div(n, variant.columns), most, 1),
            variant.threads,
            shared,
            *packed,
            x,
            y,
            rows,
            row_weight,
            offsets,
            tiles,
            *ends,
        )
