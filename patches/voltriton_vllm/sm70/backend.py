"""vLLM's Triton attention backend with our kernels behind it, for Volta.

Triton has no tensor cores on compute capability 7.0: it multiplies by scalar instructions. Everything around the
products (metadata, CUDA graphs, writing the cache but for one new token a sequence) stays vLLM's; what our kernels do
not take goes to vLLM's.

`switch` turns it on.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from voltriton_vllm.sm70 import attention


class Sm70AttentionBackend(TritonAttentionBackend):  # type: ignore[misc]  # vLLM is untyped
    """Named as vLLM's, so that what is said of TRITON_ATTN in configurations holds."""

    @staticmethod
    def get_impl_cls() -> type[Sm70AttentionImpl]:
        return Sm70AttentionImpl


class Sm70AttentionImpl(TritonAttentionImpl):  # type: ignore[misc]  # vLLM is untyped
    """Causal decoder attention over a half-precision cache; the rest is the base class's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Here, in the rank: asking makes a CUDA context, which the processes above must not have.
        self._ready = attention.available()

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plain = output_scale is None and output_block_scale is None
        writes = self._writes(key, kv_cache, attn_metadata)
        if attn_metadata is None or not plain or not self._takes(query, kv_cache, attn_metadata):
            if writes:
                super().do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            result: torch.Tensor = super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            return result
        self._attend(query, (key, value) if writes else None, kv_cache, attn_metadata, output)
        return output

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """vLLM calls this just before `forward`, which saves the launch where it writes the cache itself."""
        if not self._writes(key, kv_cache, get_attention_context(layer.layer_name)[0]):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def _takes(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> bool:
        return (
            self._ready
            and self.attn_type == AttentionType.DECODER
            and query.dtype == kv_cache.dtype == torch.float16
            and self.head_size in attention.HEAD_SIZES
            and self.alibi_slopes is None
            and self.sinks is None
            and not self.logits_soft_cap
            and self.chunk_lookback < 0
            and metadata.causal is True
            and metadata.mm_prefix_range_tensor is None
            and metadata.rswa_prefix_lens is None
        )

    def _writes(self, key: torch.Tensor | None, kv_cache: torch.Tensor, metadata: Any) -> bool:
        """Whether `forward` writes the new keys and values: where there is one a sequence."""
        if key is None or metadata is None or self.kv_sharing_target_layer_name is not None:
            return False
        return self._takes(key, kv_cache, metadata) and _decodes(metadata)

    def _attend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """`new`: the keys and values of one new token a sequence, where they are to be written."""
        # (blocks, heads, block size, 2 * head size) -> keys and values (blocks, block size, heads, head size)
        cache = kv_cache.transpose(1, 2)
        keys, values = cache[..., : self.head_size], cache[..., self.head_size :]
        tokens, lengths = metadata.num_actual_tokens, metadata.seq_lens
        window = self.sliding_window[0] + 1  # vLLM counts the tokens before; -1 is no window
        table, ends = metadata.block_table, (self.scale, window, 1.0, 1.0)
        if _decodes(metadata):
            longest = metadata.max_seq_len
            to_write: tuple[Any, ...] = (None, None, None)
            if new is not None:
                # Slots and not the table say where: those of a dummy run are negative, its table may be anything.
                to_write = (new[0][:tokens], new[1][:tokens], metadata.slot_mapping[:tokens])
            attention.paged_decode(
                output[:tokens], query[:tokens], keys, values, table, lengths, longest, *ends, *to_write
            )
        else:
            starts, most = metadata.query_start_loc, metadata.max_query_len
            attention.paged_prefill(
                output[:tokens], query[:tokens], keys, values, table, lengths, starts, most, *ends
            )


def _decodes(metadata: Any) -> bool:
    """Whether each sequence has one new token."""
    one_each: bool = metadata.seq_lens.shape[0] == metadata.num_actual_tokens
    return metadata.max_query_len == 1 and one_each
