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


E4M3 = ("fp8", "fp8_e4m3")  # names of vLLM's for one kind


class Sm70AttentionImpl(TritonAttentionImpl):  # type: ignore[misc]  # vLLM is untyped
    """Causal decoder attention over a cache of half precision or e4m3 bytes; the rest is the base class's.

    The base class takes e4m3 bytes from compute capability 8.9 on only, where Triton has that type. With them
    nothing is left to it: what the kernels do not take is refused, of a layer at its making (ValueError).
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._e4m3 = kv_cache_dtype in E4M3
        dtype = "auto" if self._e4m3 else kv_cache_dtype
        most = (num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window)
        super().__init__(*most, dtype, *args, **kwargs)
        reason = self._why_not()
        self._layer_taken = reason is None
        if self._e4m3:
            self.kv_cache_dtype = kv_cache_dtype
            self.supports_quant_query_input = False
            if reason:
                raise ValueError(f"kv_cache_dtype: got {kv_cache_dtype!r} with {reason}; allowed is auto")

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
            if self._e4m3 and attn_metadata is not None:
                raise ValueError(
                    f"{layer.layer_name}: got queries of {query.dtype} or a mask that the e4m3 cache's kernels "
                    "do not take; allowed with it are dtype float16 and causal attention (or kv_cache_dtype auto)"
                )
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
        self._attend(layer, query, (key, value) if writes else None, kv_cache, attn_metadata, output)
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
        if self._e4m3:
            attention.write_cache(key, value, *self._split(kv_cache), slot_mapping, *_cache_scales(layer))
        elif not self._writes(key, kv_cache, get_attention_context(layer.layer_name)[0]):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def _why_not(self) -> str | None:
        """What about this layer the kernels do not take.

        Asked in the rank: that makes a CUDA context, which the processes above must not have.
        """
        reasons = {
            "kernels that are not available here (see the log)": not attention.available(),
            f"{self.attn_type} attention": self.attn_type != AttentionType.DECODER,
            f"a head size of {self.head_size} (not in {attention.HEAD_SIZES})": self.head_size
            not in attention.HEAD_SIZES,
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "a soft cap of the logits": bool(self.logits_soft_cap),
            "chunked attention": self.chunk_lookback >= 0,
        }
        return next((reason for reason, found in reasons.items() if found), None)

    def _takes(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any) -> bool:
        return (
            self._layer_taken
            and query.dtype == torch.float16
            and (self._e4m3 or kv_cache.dtype == torch.float16)
            and metadata.causal is True
            and metadata.mm_prefix_range_tensor is None
            and metadata.rswa_prefix_lens is None
        )

    def _writes(self, key: torch.Tensor | None, kv_cache: torch.Tensor, metadata: Any) -> bool:
        """Whether `forward` writes the new keys and values: where there is one a sequence, in half precision."""
        if self._e4m3 or key is None or metadata is None or self.kv_sharing_target_layer_name is not None:
            return False
        return self._takes(key, kv_cache, metadata) and _decodes(metadata)

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks, heads, block size, 2 * head size) -> keys and values (blocks, block size, heads, head size)."""
        cache = kv_cache.transpose(1, 2)
        return cache[..., : self.head_size], cache[..., self.head_size :]

    def _attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """`new`: the keys and values of one new token a sequence, where they are to be written."""
        keys, values = self._split(kv_cache)
        tokens, lengths = metadata.num_actual_tokens, metadata.seq_lens
        window = self.sliding_window[0] + 1  # vLLM counts the tokens before; -1 is no window
        scales = _cache_scales(layer) if self._e4m3 else (1.0, 1.0)
        table, ends = metadata.block_table, (self.scale, window, *scales)
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


def _cache_scales(layer: torch.nn.Module) -> tuple[float, float]:
    """What the bytes of keys and of values count, of one scale a tensor."""
    if layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1:
        raise ValueError(
            f"{layer.layer_name}: got an e4m3 cache with a scale a head, allowed is one scale a tensor"
        )
    return layer._k_scale_float, layer._v_scale_float
