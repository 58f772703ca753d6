"""The operators of vLLM's CUDA extensions that serving reaches, where those extensions are not there.

The published extensions have no code for Volta. Without them, and with `custom_ops` "none", vLLM's Python reaches
only what is defined here; it is defined only where nobody else has. Kernels come from `sm70` (float16), the
rest is Python. An operator that is missing here fails by its name when it is called.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
# Kept for the life of the process: a library that is collected takes its operators along.
_libraries: dict[str, torch.library.Library] = {}


class Operator(NamedTuple):
    namespace: str
    schema: str
    run: Callable[..., Any]
    dispatch: str = "CUDA"

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def install() -> list[str]:
    """Define what is missing; returns the names. May be called again; vLLM's CUDA platform does when it is imported."""
    for name in EXTENSIONS:
        # First what there is of vLLM's own: a library that finds its names taken ends the process.
        with contextlib.suppress(ImportError):
            importlib.import_module(f"vllm.{name}")
    defined = []
    for operator in OPERATORS:
        if hasattr(getattr(torch.ops, operator.namespace), operator.name):
            continue
        namespace = library(operator.namespace)
        namespace.define(operator.schema)  # type: ignore[no-untyped-call]
        namespace.impl(operator.name, operator.run, operator.dispatch)  # type: ignore[no-untyped-call]
        if operator.schema.endswith("-> ()"):
            torch.library.register_fake(f"{operator.namespace}::{operator.name}", _nothing, lib=namespace)
        defined.append(f"{operator.namespace}.{operator.name}")
    return defined


def library(namespace: str) -> torch.library.Library:
    """The library of a namespace that we add to, kept for the life of the process."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    return _libraries[namespace]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Results of these operators are written into their arguments."""


def _rms_norm(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    from voltriton_vllm.sm70 import glue

    # Heads of a fused projection (q of qkv) are no rows of one stride: then a copy is made.
    width = input.shape[-1]
    glue.rms_norm(result.view(-1, width), input.reshape(-1, width), weight, epsilon)


def _fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    from voltriton_vllm.sm70 import glue

    glue.fused_add_rms_norm(input, residual, weight, epsilon)


def _silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    from voltriton_vllm.sm70 import glue

    glue.silu_and_mul(result, input)


def _rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    from voltriton_vllm.sm70 import glue

    if rope_dim_offset or inverse:
        raise NotImplementedError("rotary_embedding: rope_dim_offset and inverse have no kernel for Volta")
    glue.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)


def _topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    from voltriton_vllm.sm70 import glue

    if bias is not None:
        raise NotImplementedError("topk_softmax: a correction bias has no kernel for Volta")
    # Rows of padding get experts like any other row; nobody reads their results.
    glue.topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)


def _persistent_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    output: torch.Tensor,
    workspace: torch.Tensor,
    k: int,
    max_seq_len: int,
) -> None:
    """`workspace` and `max_seq_len` are of vLLM's own way to do it; ours needs neither."""
    from voltriton_vllm.sm70 import glue

    if output.shape[1] != k:
        raise ValueError(f"persistent_topk: got k {k} for output {tuple(output.shape)}")
    glue.topk_rows(logits, lengths, output)


def _moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None,
    scatter_idx: torch.Tensor | None,
) -> None:
    from voltriton_vllm.sm70 import glue

    if scatter_idx is not None:
        raise NotImplementedError("moe_align_block_size: scatter_idx has no kernel for Volta")
    glue.moe_align_block_size(
        topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad, expert_map
    )


def _moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> None:
    from voltriton_vllm.sm70 import glue

    if expert_map is not None and topk_ids is not None:
        raise NotImplementedError("moe_sum: expert_map has no kernel for Volta")
    glue.moe_sum(input, output)


def _vocab_parallel_embedding(
    out: torch.Tensor,
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> None:
    """Rows of this rank's part of the vocabulary, then of the added one; zeros for the tokens of other ranks."""
    ids = input_ids.long()
    own = (ids >= org_vocab_start_index) & (ids < org_vocab_end_index)
    added = (ids >= added_vocab_start_index) & (ids < added_vocab_end_index)
    first_added = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    rows = torch.where(added, ids - added_vocab_start_index + first_added, ids - org_vocab_start_index)
    here = own | added
    torch.index_select(weight, 0, rows.where(here, 0), out=out)
    out.masked_fill_(~here.unsqueeze(1), 0)


# numpy's names of types by size; the rest is a view of these bytes.
_TYPES = {1: ("|u1", torch.uint8), 2: ("<i2", torch.int16), 4: ("<i4", torch.int32), 8: ("<i8", torch.int64)}


class _Memory:
    """Memory that torch may look at without owning it (numba's CUDA array interface)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _TYPES[size][0],
            "version": 2,
        }


def _on_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same memory as a CUDA tensor that does not keep `tensor` alive."""
    return torch.as_tensor(_Memory(tensor), device=device).view(tensor.dtype)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """For CUDA graphs: an alias that lets the allocator reuse the memory."""
    return _on_gpu(tensor, tensor.device)


def get_cuda_view_from_cpu_tensor(cpu_tensor: torch.Tensor) -> torch.Tensor:
    """Pinned host memory as the GPU sees it (unified addresses); copies what is not pinned, as vLLM's does."""
    device = torch.device("cuda", torch.cuda.current_device())
    if cpu_tensor.numel() == 0:
        return torch.empty(cpu_tensor.shape, dtype=cpu_tensor.dtype, device=device)
    pinned = cpu_tensor if cpu_tensor.is_pinned() else cpu_tensor.pin_memory()
    view = _on_gpu(pinned, device)
    if pinned is not cpu_tensor:
        view._voltriton_owner = pinned  # type: ignore[attr-defined]
    return view


def _no(capability: int) -> bool:
    return False


_ALL = "CompositeExplicitAutograd"
OPERATORS = (
    Operator("_C", "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()", _rms_norm),
    Operator(
        "_C",
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        _fused_add_rms_norm,
    ),
    Operator("_C", "silu_and_mul(Tensor! result, Tensor input) -> ()", _silu_and_mul),
    Operator(
        "_C",
        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        _rotary_embedding,
    ),
    Operator(
        "_C",
        "vocab_parallel_embedding(Tensor! out, Tensor input_ids, Tensor weight, int org_vocab_start_index, "
        "int org_vocab_end_index, int num_org_vocab_padding, int added_vocab_start_index, "
        "int added_vocab_end_index) -> ()",
        _vocab_parallel_embedding,
    ),
    Operator(
        "_C",
        "persistent_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, "
        "int max_seq_len) -> ()",
        _persistent_topk,
    ),
    Operator("_C", "weak_ref_tensor(Tensor input) -> Tensor", weak_ref_tensor),
    Operator(
        "_C",
        "get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor",
        get_cuda_view_from_cpu_tensor,
        "CPU",
    ),
    Operator("_C", "cutlass_scaled_mm_supports_fp8(int capability) -> bool", _no, _ALL),
    Operator("_C", "cutlass_scaled_mm_supports_block_fp8(int capability) -> bool", _no, _ALL),
    Operator("_C", "cutlass_group_gemm_supported(int capability) -> bool", _no, _ALL),
    Operator(
        "_moe_C",
        "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
        "Tensor gating_output, bool renormalize, Tensor? bias, Tensor? is_padding) -> ()",
        _topk_softmax,
    ),
    Operator(
        "_moe_C",
        "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
        "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? expert_map, Tensor? scatter_idx) -> ()",
        _moe_align_block_size,
    ),
    Operator(
        "_moe_C",
        "moe_sum(Tensor input, Tensor! output, Tensor? topk_ids, Tensor? expert_map) -> ()",
        _moe_sum,
    ),
)
