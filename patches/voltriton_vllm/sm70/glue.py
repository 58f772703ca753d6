"""The small operations between matrix products, with the arguments of vLLM's own (`torch.ops._C`, `_moe_C`).

Half precision in and out, float32 inside. Each writes its output arguments; ValueError on what the kernels do not take.
"""

from __future__ import annotations

import torch

from voltriton_vllm.sm70.runtime import Runtime, runtime
from voltriton_vllm.sm70.variants import ceil_div


def _device(x: torch.Tensor) -> Runtime:
    return runtime(x.device.index)


def _rows(x: torch.Tensor, name: str) -> torch.Tensor:
    """x as rows that 16-byte loads can read."""
    if x.dtype != torch.float16 or x.shape[-1] % 8:
        raise ValueError(
            f"{name}: got {x.dtype} {tuple(x.shape)}, allowed is torch.float16, last size a multiple of 8"
        )
    rows = x.view(-1, x.shape[-1]) if x.dim() != 2 else x
    if rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        raise ValueError(f"{name}: got strides {rows.stride()}, allowed are rows aligned to 16 bytes")
    return rows


def _norm_threads(hidden: int) -> int:
    return min(1024, ceil_div(hidden // 8, 32) * 32)


def _norm(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> None:
    rows, outs = _rows(x, "input"), _rows(out, "out")
    if rows.shape[0] == 0:
        return
    hidden = rows.shape[1]
    ends = (eps, hidden, rows.stride(0), outs.stride(0))
    _device(x).kernel("rms_norm")(
        (rows.shape[0], 1, 1), _norm_threads(hidden), hidden * 2, outs, rows, residual, weight, *ends
    )


def rms_norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """out = input / sqrt(mean(input^2) + epsilon) * weight, by rows."""
    _norm(out, input, None, weight, epsilon)


def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """residual += input, then input = rms_norm(residual); both in place. residual is contiguous."""
    if not residual.is_contiguous() or residual.dtype != torch.float16 or residual.shape != input.shape:
        raise ValueError(
            f"residual: got {residual.dtype} {tuple(residual.shape)}, allowed is that of input, contiguous"
        )
    _norm(input, input, residual, weight, epsilon)


def silu_and_mul(out: torch.Tensor, input: torch.Tensor) -> None:
    """out[..., i] = silu(input[..., i]) * input[..., I + i]; both contiguous."""
    if not (input.is_contiguous() and out.is_contiguous()):
        raise ValueError("input, out: allowed are contiguous tensors")
    rows, width = _rows(input, "input").shape[0], _rows(out, "out").shape[1]
    grid = min(ceil_div(max(rows * width // 8, 1), 256), 4096)
    _device(input).kernel("silu_and_mul")((grid, 1, 1), 256, 0, out, input, rows, width)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate query and key in place. positions int64 [T]; query, key float16 [T, heads * head_size] (or with a
    dimension for the heads); cos_sin_cache float16 [positions, rotary size], cosines first.
    """
    tokens = positions.numel()
    if tokens == 0:
        return
    if positions.dtype != torch.int64 or cos_sin_cache.dtype != torch.float16:
        got = f"{positions.dtype}, {cos_sin_cache.dtype}"
        raise ValueError(f"positions, cos_sin_cache: got {got}, allowed are torch.int64, torch.float16")
    q = query.view(tokens, -1)
    k = None if key is None else key.view(tokens, -1)
    q_heads = q.shape[1] // head_size
    k_heads = 0 if k is None else k.shape[1] // head_size
    _device(query).kernel("rotary")(
        (tokens, 1, 1),
        256,
        0,
        positions,
        q,
        k,
        cos_sin_cache,
        q_heads,
        k_heads,
        head_size,
        cos_sin_cache.shape[1],
        q.stride(0),
        0 if k is None else k.stride(0),
        int(is_neox),
    )


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor | None,
    gating_output: torch.Tensor,
    renormalize: bool = False,
) -> None:
    """Softmax over the experts and the largest of it, ties to the lower number; at most 1024 experts, 32 of a token."""
    tokens, experts = gating_output.shape
    topk = topk_weights.shape[1]
    if experts > 1024 or topk > min(experts, 32) or topk_indices.dtype not in (torch.int32, torch.uint32):
        raise ValueError(
            f"topk_softmax: got {experts} experts, top {topk}, indices {topk_indices.dtype}; "
            "allowed are up to 1024 experts, up to 32 of them a token, 32-bit indices"
        )
    if gating_output.dtype not in (torch.float16, torch.float32) or not gating_output.is_contiguous():
        raise ValueError(f"gating_output: got {gating_output.dtype}, allowed are contiguous float16, float32")
    is_half = int(gating_output.dtype == torch.float16)
    ends = (tokens, experts, topk, int(renormalize), is_half)
    if tokens:
        _device(gating_output).kernel("topk_softmax")(
            (ceil_div(tokens, 4), 1, 1),
            128,
            0,
            topk_weights,
            topk_indices,
            token_expert_indices,
            gating_output,
            *ends,
        )


def topk_rows(logits: torch.Tensor, lengths: torch.Tensor, output: torch.Tensor) -> None:
    """output[r] = the places of the largest of logits[r, :lengths[r]], ascending, of equal ones the first; -1 behind
    them where there are fewer than output has columns. logits float32 [R, columns]; lengths int32 [R]; output int32
    [R, k]."""
    rows, columns = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits: got {logits.dtype}, strides {logits.stride()}, allowed are rows of torch.float32"
        )
    for name, tensor, shape in (("lengths", lengths, (rows,)), ("output", output, (rows, output.shape[-1]))):
        if tensor.dtype != torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, allowed is contiguous torch.int32 {shape}"
            )
    if rows:
        ends = (columns, logits.stride(0), output.shape[1])
        _device(logits).kernel("topk_rows")((rows, 1, 1), 1024, 0, logits, lengths, output, *ends)


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Pairs sorted by expert, each expert's padded to whole blocks; at most 1024 experts, int32 ids.

    Pairs keep their order within an expert, so the result is the same at every run.
    """
    if num_experts > 1024 or topk_ids.dtype != torch.int32:
        raise ValueError(
            f"topk_ids: got {num_experts} experts, {topk_ids.dtype}; allowed are up to 1024, torch.int32"
        )
    ids = topk_ids.reshape(-1)
    if expert_map is not None:
        ids = expert_map.to(torch.int32)[ids.long()]
    ends = (ids.numel(), num_experts, block_size, sorted_token_ids.numel(), experts_ids.numel())
    _device(topk_ids).kernel("moe_align")(
        (1, 1, 1), 1024, 0, ids, sorted_token_ids, experts_ids, num_tokens_post_pad, *ends
    )


def moe_sum(input: torch.Tensor, output: torch.Tensor) -> None:
    """output[m] = sum over t of input[m, t], t ascending; contiguous float16, last size a multiple of 8."""
    if not (input.is_contiguous() and output.is_contiguous()):
        raise ValueError("input, output: allowed are contiguous tensors")
    hidden = _rows(output, "output").shape[1]
    tokens, topk = input.shape[0], input.shape[1]
    grid = min(ceil_div(max(output.numel() // 8, 1), 256), 4096)
    _device(input).kernel("moe_sum")((grid, 1, 1), 256, 0, output, input, tokens, topk, hidden)
