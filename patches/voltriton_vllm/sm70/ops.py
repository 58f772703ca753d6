"""What the plugin calls: NVFP4 linear layers and experts on Volta (and, for verification, on newer GPUs).

All functions take CUDA tensors, launch on torch's current stream and can be captured in CUDA graphs. Every
sum has a fixed order: the same input gives the same bits. The ones that run in the step are torch custom
ops (`torch.ops.voltriton_sm70.*`) with fake implementations, so torch.compile sees through them.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from voltriton_vllm.sm70 import layout, linear, moe
from voltriton_vllm.sm70.compile import CompileError
from voltriton_vllm.sm70.runtime import runtime

log = logging.getLogger("voltriton.sm70")


def why_unavailable(device: torch.device | int | None = None) -> str | None:
    """None when the kernels run on `device` (default: the current one), else one sentence.

    The first call for a device compiles and loads the kernels (seconds; later from the disk cache), so
    that nothing is compiled during a step or a graph capture.
    """
    if not torch.cuda.is_available():
        return "no CUDA device"
    index = device if isinstance(device, int) else torch.device(device or "cuda").index
    try:
        runtime(torch.cuda.current_device() if index is None else index)
    except (CompileError, OSError) as e:
        return f"sm_70 kernels: {e}"
    return None


@functools.cache
def available(device: torch.device | int | None = None) -> bool:
    """Whether the kernels run on `device`; if not, the reason is logged once."""
    reason = why_unavailable(device)
    if reason:
        log.warning("%s; a slower path is used", reason)
    return reason is None


@dataclass(frozen=True)
class PackedLinear:
    """A packed NVFP4 matrix, y = x @ W.T; made by `prepare_linear`.

    words int32 [N, Kp/8] and scale uint8 [N, Kp/16] as in `layout`, row_scale float32 [N], Kp = K padded to 32.
    """

    words: torch.Tensor
    scale: torch.Tensor
    row_scale: torch.Tensor
    n: int
    k: int


@dataclass(frozen=True)
class PackedMoe:
    """Packed NVFP4 experts; made by `prepare_moe`. H hidden, I intermediate (per rank), E local experts.

    w13 [E, 2I, Hp/8] (gate rows, then up rows), w2 [E, H, Ip/8]; scales and row scales alike.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w13_row_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w2_row_scale: torch.Tensor
    hidden: int
    intermediate: int


def prepare_linear(
    weight: torch.Tensor, weight_scale: torch.Tensor, row_global_scale: torch.Tensor
) -> PackedLinear:
    """Pack one linear layer's checkpoint tensors, once at load.

    weight uint8 [N, K/2] (even element in the low nibble), weight_scale float8_e4m3fn [N, K/16] (row-major,
    not swizzled), row_global_scale float32: a scalar, or [N] with one multiplier per output row (merged
    layers whose shards have different global scales). K is a multiple of 16; N is free.
    The weight's own memory is reused where K is a multiple of 32: do not use `weight` afterwards.
    Raises ValueError naming the tensor, what was got and what is allowed.
    """
    n, k = layout.check_shapes(weight, weight_scale)
    row_scale = _row_scale(row_global_scale, n, "row_global_scale", weight.device)
    words, scale = layout.pack(weight, weight_scale)
    return PackedLinear(words, scale, row_scale, n, k)


def nvfp4_linear(x: torch.Tensor, packed: PackedLinear, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x @ W.T (+ bias): x float16 [..., K] -> float16 [..., N]; accumulation in float32.

    Any number of rows, none included. bias float16 [N]. Raises ValueError on another dtype, device or K.
    """
    if x.dtype != torch.float16 or x.device != packed.words.device or x.shape[-1] != packed.k:
        raise ValueError(
            f"x: got {x.dtype} {tuple(x.shape)} on {x.device}, "
            f"allowed is torch.float16 [..., {packed.k}] on {packed.words.device}"
        )
    if bias is not None and (bias.dtype != torch.float16 or bias.shape != (packed.n,)):
        raise ValueError(
            f"bias: got {bias.dtype} {tuple(bias.shape)}, allowed is torch.float16 ({packed.n},)"
        )
    rows = x.reshape(-1, packed.k)
    y: torch.Tensor = linear.nvfp4_matmul(rows, packed.words, packed.scale, packed.row_scale, bias)
    return y.view(*x.shape[:-1], packed.n)


def prepare_moe(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_global_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_global_scale: torch.Tensor,
) -> PackedMoe:
    """Pack the experts of one layer, once at load, expert by expert and in place where possible.

    w13 uint8 [E, 2I, H/2] (gate rows, then up rows), w13_scale e4m3 [E, 2I, H/16], w13_global_scale float32
    [E], [E, 2] (gate, up) or [E, 2I]; w2 uint8 [E, H, I/2], w2_scale e4m3 [E, H, I/16], w2_global_scale
    float32 [E] or [E, H]. H and I are multiples of 16. Raises ValueError.
    """
    _check_experts(w13, w13_scale, w2, w2_scale)
    experts, rows13, hidden = w13.shape[0], w13.shape[1], w13.shape[2] * 2
    row13 = _expert_scale(w13_global_scale, experts, rows13, "w13_global_scale", w13.device)
    row2 = _expert_scale(w2_global_scale, experts, hidden, "w2_global_scale", w2.device)
    words13, scale13 = _pack_experts(w13, w13_scale)
    words2, scale2 = _pack_experts(w2, w2_scale)
    return PackedMoe(words13, scale13, row13, words2, scale2, row2, hidden, rows13 // 2)


def nvfp4_moe(
    x: torch.Tensor,
    packed: PackedMoe,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """sum_t topk_weights[:, t] * w2[e_t] @ (silu(gate) * up), gate and up = w13[e_t] @ x.

    x float16 [M, H]; topk_weights float32 [M, T]; topk_ids int32 or int64 [M, T], global expert numbers;
    expert_map int32 [global experts] -> local number or -1 (then the expert contributes nothing).
    Returns float16 [M, H], the experts summed in the order of t. Raises ValueError.
    """
    _check_routing(x, packed, topk_weights, topk_ids)
    weights = topk_weights.to(torch.float32).contiguous()
    if apply_router_weight_on_input:
        if topk_ids.shape[1] != 1:
            raise ValueError(
                f"apply_router_weight_on_input: got {topk_ids.shape[1]} experts a token, allowed is 1"
            )
        x = (x.float() * weights).to(x.dtype)
        weights = torch.ones_like(weights)
    if expert_map is not None:
        expert_map = expert_map.to(torch.int32)
    y: torch.Tensor = moe.nvfp4_experts(
        x.contiguous(),
        packed.w13,
        packed.w13_scale,
        packed.w13_row_scale,
        packed.w2,
        packed.w2_scale,
        packed.w2_row_scale,
        weights,
        topk_ids.to(torch.int32).contiguous(),
        expert_map,
        packed.intermediate,
    )
    return y


def _row_scale(scale: torch.Tensor, n: int, name: str, device: torch.device) -> torch.Tensor:
    if scale.numel() not in (1, n):
        raise ValueError(f"{name}: got shape {tuple(scale.shape)}, allowed is a scalar or ({n},)")
    rows = scale.detach().to(device, torch.float32).reshape(-1)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"{name}: has a value that is not finite")
    return rows.expand(n).contiguous()


def _expert_scale(scale: torch.Tensor, experts: int, n: int, name: str, device: torch.device) -> torch.Tensor:
    """[E], [E, 1], [E, 2] (one a half of the rows) or [E, N] -> [E, N]."""
    if scale.dim() == 0 or scale.shape[0] != experts or n % max(1, scale[0].numel()):
        raise ValueError(
            f"{name}: got shape {tuple(scale.shape)}, allowed is ({experts},) or ({experts}, {n})"
        )
    parts = scale.detach().to(device, torch.float32).reshape(experts, -1)
    if not bool(torch.isfinite(parts).all()):
        raise ValueError(f"{name}: has a value that is not finite")
    return parts.repeat_interleave(n // parts.shape[1], dim=1).contiguous()


def _check_experts(
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> None:
    rows13, hidden = layout.check_shapes(w13, w13_scale)
    rows2, intermediate = layout.check_shapes(w2, w2_scale)
    if w13.dim() != 3 or w2.shape[:1] != w13.shape[:1] or rows2 != hidden or rows13 != 2 * intermediate:
        raise ValueError(
            f"w13, w2: got shapes {tuple(w13.shape)}, {tuple(w2.shape)}; "
            "allowed is [E, 2 * I, H / 2], [E, H, I / 2]"
        )


def _pack_experts(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert by expert, over the weight's own memory where K needs no padding."""
    k = weight.shape[2] * 2
    if layout.padded(k) == k and weight.is_contiguous() and weight.data_ptr() % 16 == 0:
        flat_scale = scale.reshape(-1, scale.shape[2])
        words, scales = layout.pack(weight.view(-1, weight.shape[2]), flat_scale)
        return words.view(*weight.shape[:2], -1), scales.view(*weight.shape[:2], -1)
    parts = [layout.pack(weight[e], scale[e]) for e in range(weight.shape[0])]
    return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])


def _check_routing(
    x: torch.Tensor, packed: PackedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> None:
    if x.dtype != torch.float16 or x.dim() != 2 or x.shape[1] != packed.hidden:
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"x: got {got}, allowed is torch.float16 [M, {packed.hidden}]")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights, topk_ids: got {tuple(topk_weights.shape)}, {tuple(topk_ids.shape)}, "
            f"allowed is [{x.shape[0]}, T] both"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids: got {topk_ids.dtype}, allowed is torch.int32 or torch.int64")
