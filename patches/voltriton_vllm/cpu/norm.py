"""RMS norm on CPUs by vLLM's own C++ operators, which vLLM 0.32.0 offers as implementations on GPUs only.

Without torch.compile vLLM's norm is a dozen torch operators a layer. The C++ operators keep float32 to the end and
round once, where the native implementation rounds a 16-bit result before the weight is multiplied.
Chosen by `ir_op_priority` (profile `cpu`); anything they do not take goes to the next in that list.
"""

# No postponed annotations: vLLM makes the operators' schema of them.
import torch
from torch import Tensor

PROVIDER = "voltriton"


def register() -> None:
    """Once in a process; vLLM refuses a second implementation of the same name."""
    from vllm import ir
    from vllm.platforms import current_platform

    if PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    operators = torch.ops._C

    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        rows = x.contiguous()  # heads of a part of qkv are not
        out = torch.empty_like(rows)
        operators.rms_norm(out, rows, weight, epsilon)
        return out

    def fused_add_rms_norm(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        operators.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes, supported=hasattr(operators, "rms_norm"))(
        rms_norm
    )
    ir.ops.fused_add_rms_norm.register_impl(
        PROVIDER, supports_args=_takes_sum, supported=hasattr(operators, "fused_add_rms_norm"), inplace=True
    )(fused_add_rms_norm)


def _takes(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def _takes_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return (
        _takes(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x.is_contiguous()
        and x_residual.is_contiguous()
    )
