"""What the plugin calls: NVFP4 linear layers and experts on Volta (and, for verification, on newer GPUs).

All functions take CUDA tensors, launch on torch's current stream and can be captured in CUDA graphs. Every
sum has a fixed order: the same input gives the same bits. The ones that run in the step are torch custom
ops (`torch.ops.voltriton_sm70.*`) with fake implementations, so torch.compile sees through them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from voltriton_vllm.sm70 import layout
from voltriton_vllm.sm70.compile import CompileError

log = logging.getLogger("voltriton.sm70")


def why_unavailable(device: torch.device | int | None = None) -> str | None:
    """None when the kernels run on `device` (default: the current one), else one sentence.

    The first call for a device compiles and loads the kernels (seconds; later from the disk cache), so
    that nothing is compiled during a step or a graph capture.
    """
    raise NotImplementedError


def available(device: torch.device | int | None = None) -> bool:
    """Whether the kernels run on `device`; if not, the reason is logged once."""
    raise NotImplementedError


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
    raise NotImplementedError


def nvfp4_linear(x: torch.Tensor, packed: PackedLinear, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x @ W.T (+ bias): x float16 [..., K] -> float16 [..., N]; accumulation in float32.

    Any number of rows, none included. bias float16 [N]. Raises ValueError on another dtype, device or K.
    """
    raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError
