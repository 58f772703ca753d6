"""NVFP4 experts (fused MoE), weight-only. vLLM asks for the classes through the hook in `oracle/nvfp4.py`.

vLLM hands over, per rank, in the checkpoint's own layout: `w13_weight` uint8 [E, 2I, H/2] (gate rows, then
up), `w13_weight_scale` E4M3 [E, 2I, H/16], `w13_weight_scale_2` float32 [E], a multiplier; `w2_*` likewise
with [E, H, I/2]. Input scales may be unset and are not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from voltriton_vllm import gates
from voltriton_vllm.codec import dequantise
from voltriton_vllm.cpu import build as cpu_build
from voltriton_vllm.cpu import linear as cpu_linear

logger = init_logger("vllm.voltriton")

BACKEND = "voltriton"
# x [rows, H], expert -> [rows, H]: both products and the activation between them.
Expert = Callable[[torch.Tensor, int], torch.Tensor]


def accepts(weight_key: object, activation_key: object) -> bool:
    """NVFP4 weights, with or without 4-bit activations in the checkpoint."""
    return weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic)


def expert_factors(layer: Any, which: str) -> torch.Tensor:
    """Multipliers of `w13` or `w2`: [E], or [E, rows] where gate and up differ (`scales.after_load`)."""
    rows: torch.Tensor | None = getattr(layer, f"nvfp4_{which}_row_factors", None)
    if rows is not None:
        return rows
    factors: torch.Tensor = getattr(layer, f"{which}_weight_scale_2").data
    return factors


@functools.cache
def experts_classes() -> list[type]:
    """Candidates in the order vLLM should try them; each refuses what it cannot run."""
    if gates.mode() == "oracle":
        return [OracleExperts]
    if current_platform.is_cpu():
        return [CpuExperts] if cpu_build.load() is None else [*_expanding_classes(), OracleExperts]
    from voltriton_vllm.sm70 import ops

    reason = ops.why_unavailable()
    if reason is None:
        return [VoltaExperts]
    if gates.needs_our_kernels():
        logger.warning_once("NVFP4 experts are dequantised at every step, which is slow: %s", reason)
    return [OracleExperts]


class _Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc]  # vLLM is untyped
    """What our experts have in common: plain activations in, weighted and summed results out."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """On GPUs with NVFP4 kernels of vLLM's own, only when asked for by name."""
        if not gates.needs_our_kernels() and moe_config.moe_backend != BACKEND:
            return False, "vLLM has kernels for this device (moe_backend='voltriton' takes ours)"
        result: tuple[bool, str | None] = mk.FusedMoEExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        return result

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return accepts(weight_key, activation_key)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_routing_method(routing_method: Any, weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_router_logits_dtype(router_logits_dtype: Any, routing_method: Any) -> bool:
        return True

    def workspace_shapes(
        self, M: int, N: int, K: int, *_: Any, **__: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def run(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None
    ) -> torch.Tensor:
        raise NotImplementedError

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *_: Any,
        apply_router_weight_on_input: bool = False,
        **__: Any,
    ) -> None:
        # With apply_router_weight_on_input the weights are in hidden_states already.
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        output.copy_(self.run(hidden_states, weights, topk_ids, expert_map))


def by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    expert: Expert,
) -> torch.Tensor:
    """sum over t of weights[:, t] * expert(x, ids[:, t]), the rows of each expert together, sums in float32."""
    local = ids.long() if expert_map is None else expert_map[ids.long()].long()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in sorted(set(local[local >= 0].tolist())):
        rows, slots = (local == e).nonzero(as_tuple=True)
        result = expert(x[rows], e).float() * weights[rows, slots].float().unsqueeze(-1)
        out.index_add_(0, rows, result)
    return out


def gated(product: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, 2I]."""
    gate, up = product.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class OracleExperts(_Experts):
    """Dequantises the experts that are needed at each step: the reference, and slow."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.parts = [
            (getattr(layer, f"{w}_weight"), getattr(layer, f"{w}_weight_scale"), expert_factors(layer, w))
            for w in ("w13", "w2")
        ]

    def _matrix(self, which: int, e: int, dtype: torch.dtype) -> torch.Tensor:
        packed, scale, factor = self.parts[which]
        return dequantise(packed[e], scale[e], factor[e], dtype)

    def run(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None
    ) -> torch.Tensor:
        def expert(rows: torch.Tensor, e: int) -> torch.Tensor:
            inner = gated(rows @ self._matrix(0, e, rows.dtype).t())
            return inner @ self._matrix(1, e, rows.dtype).t()

        return by_expert(x, weights, ids, expert_map, expert)


class CpuExperts(_Experts):
    """Our CPU kernel, expert by expert; the weights stay packed."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.w13 = _pack_experts(layer, "w13")
        self.w2 = _pack_experts(layer, "w2")

    def run(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None
    ) -> torch.Tensor:
        def expert(rows: torch.Tensor, e: int) -> torch.Tensor:
            return cpu_linear.linear(gated(cpu_linear.linear(rows, self.w13[e])), self.w2[e])

        return by_expert(x, weights, ids, expert_map, expert)


def _pack_experts(layer: Any, which: str) -> list[cpu_linear.PackedLinear]:
    """One packed matrix an expert; the checkpoint's tensors are given up."""
    packed, scale = getattr(layer, f"{which}_weight").data, getattr(layer, f"{which}_weight_scale").data
    factors = expert_factors(layer, which)
    experts = [cpu_linear.pack(packed[e], scale[e], factors[e]) for e in range(packed.shape[0])]
    for name in (f"{which}_weight", f"{which}_weight_scale"):
        # vLLM reads the sizes of these in the step; their bytes are not needed any more.
        tensor = getattr(layer, name).data
        replace_parameter(layer, name, torch.empty(1, dtype=tensor.dtype).expand(tensor.shape))
    return experts


class VoltaExperts(_Experts):
    """The CUDA kernels for sm_70."""

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda())

    def process_weights_after_loading(self, layer: Any) -> None:
        from voltriton_vllm.sm70 import ops

        self.packed = ops.prepare_moe(
            layer.w13_weight.data,
            layer.w13_weight_scale.data,
            expert_factors(layer, "w13"),
            layer.w2_weight.data,
            layer.w2_weight_scale.data,
            expert_factors(layer, "w2"),
        )

    def run(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None
    ) -> torch.Tensor:
        from voltriton_vllm.sm70 import ops

        return ops.nvfp4_moe(x, self.packed, weights, ids, expert_map)


def _expanding_classes() -> list[type]:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    return [_expanding(cpu_moe.X86CPUUnquantizedExperts), _expanding(cpu_moe.CPUUnquantizedExperts)]


def _expanding(base: Any) -> type:
    """vLLM's own CPU experts, fed with weights that are expanded at load (without a compiler)."""

    class Expanding(base):  # type: ignore[misc]  # vLLM is untyped
        @staticmethod
        def _supports_quant_scheme(weight_key: object, activation_key: object) -> bool:
            return accepts(weight_key, activation_key)

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            for which in ("w13", "w2"):
                packed = getattr(layer, f"{which}_weight")
                if packed.dtype == torch.uint8:
                    scale = getattr(layer, f"{which}_weight_scale").data
                    weight = dequantise(
                        packed.data, scale, expert_factors(layer, which), self.moe_config.in_dtype
                    )
                    replace_parameter(layer, f"{which}_weight", weight)
            super().process_weights_after_loading(layer)

    Expanding.__name__ = Expanding.__qualname__ = "NvFp4" + base.__name__
    return Expanding
