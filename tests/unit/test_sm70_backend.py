"""The attention backend around our kernels: what it hands to them and what it leaves to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from voltriton_vllm.sm70 import attention, backend, switch

BLOCKS, HEADS, KEY_HEADS, BLOCK, SIZE = 12, 4, 2, 16, 64
SCALES = 0.5, 2.0  # of an e4m3 cache


def metadata(lengths: list[int], news: list[int], **changes: object) -> SimpleNamespace:
    starts = torch.tensor([0, *news]).cumsum(0).int()
    fields: dict[str, object] = {
        "num_actual_tokens": sum(news),
        "max_query_len": max(news),
        "query_start_loc": starts,
        "max_seq_len": max(lengths),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_table": torch.arange(len(lengths) * 3, dtype=torch.int32).view(len(lengths), 3),
        "causal": True,
        "mm_prefix_range_tensor": None,
        "rswa_prefix_lens": None,
        "slot_mapping": torch.arange(sum(news)),
    }
    return SimpleNamespace(**{**fields, **changes})


def impl(**changes: Any) -> backend.Sm70AttentionImpl:
    arguments = {
        "num_heads": HEADS,
        "head_size": SIZE,
        "scale": 0.125,
        "num_kv_heads": KEY_HEADS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    return backend.Sm70AttentionImpl(**{**arguments, **changes})


class Calls:
    """What the kernels and vLLM's own code are called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, tuple[Any, ...]]] = []
        monkeypatch.setattr(attention, "available", lambda: True)
        for name in ("paged_decode", "paged_prefill", "write_cache"):
            monkeypatch.setattr(attention, name, lambda *a, n=name: self.seen.append((n, a)))
        monkeypatch.setattr(
            TritonAttentionImpl, "forward", lambda *a, **k: self.seen.append(("vllm", a)) or a[7]
        )
        monkeypatch.setattr(
            TritonAttentionImpl, "do_kv_cache_update", lambda *a: self.seen.append(("vllm writes", a))
        )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def tensors(
    tokens: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query, cache, output), the query and output padded as for a CUDA graph."""
    query = torch.randn(tokens + 3, HEADS, SIZE).to(dtype)
    cache = torch.randn(BLOCKS, KEY_HEADS, BLOCK, 2 * SIZE).to(dtype)
    return query, cache, torch.zeros_like(query)


def run(
    attend: backend.Sm70AttentionImpl, meta: SimpleNamespace | None, tokens: int, **changes: Any
) -> torch.Tensor:
    """As vLLM's attention layer does it: the cache is updated, then attended to."""
    query, cache, output = tensors(tokens, changes.pop("dtype", torch.float16))
    if attend.kv_cache_dtype.startswith("fp8"):
        cache = cache.to(torch.float8_e4m3fn).view(torch.uint8)  # vLLM's type of it
    key, value = (torch.randn(tokens + 3, KEY_HEADS, SIZE).to(query.dtype) for _ in range(2))
    layer = torch.nn.Module()
    layer.layer_name = "layer"
    layer._k_scale, layer._v_scale = (torch.tensor(s) for s in SCALES)
    layer._k_scale_float, layer._v_scale_float = SCALES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "get_attention_context", lambda name: (meta, layer, cache, None))
        if meta is not None and attend.kv_sharing_target_layer_name is None:
            attend.do_kv_cache_update(layer, key, value, cache, meta.slot_mapping)
        result: torch.Tensor = attend.forward(layer, query, key, value, cache, meta, output, **changes)
    assert result is output
    return cache


def test_one_token_a_sequence_decodes(calls: Calls) -> None:
    meta = metadata([5, 33], [1, 1])
    cache = run(impl(), meta, 2)
    [(name, (out, query, keys, values, table, lengths, longest, *ends, key, value, slots))] = calls.seen
    scale, window, k_scale, v_scale = ends
    assert name == "paged_decode"
    assert key.shape == value.shape == (2, KEY_HEADS, SIZE)
    assert torch.equal(slots, meta.slot_mapping)
    assert out.shape == query.shape == (2, HEADS, SIZE)
    assert keys.shape == values.shape == (BLOCKS, BLOCK, KEY_HEADS, SIZE)
    assert torch.equal(keys[3, 7, 1], cache[3, 1, 7, :SIZE])
    assert torch.equal(values[3, 7, 1], cache[3, 1, 7, SIZE:])
    assert (table is meta.block_table, lengths is meta.seq_lens) == (True, True)
    assert (longest, scale, window, k_scale, v_scale) == (33, 0.125, 0, 1.0, 1.0)


def test_several_tokens_prefill(calls: Calls) -> None:
    meta = metadata([5, 33], [5, 1])
    run(impl(sliding_window=20), meta, 6)
    (update, _), (name, (out, _, _, _, _, _, starts, most, _, window, _, _)) = calls.seen
    assert update == "vllm writes"
    assert (name, out.shape[0], most, window) == ("paged_prefill", 6, 5, 20)
    assert starts is meta.query_start_loc


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ({"logits_soft_cap": 30.0}, {}),
        ({"sinks": torch.zeros(HEADS)}, {}),
        ({"alibi_slopes": [0.1] * HEADS}, {}),
        ({}, {"causal": False}),
        ({}, {"mm_prefix_range_tensor": torch.zeros(1)}),
    ],
)
def test_what_the_kernels_do_not_take_is_vllm_s(
    calls: Calls, arguments: dict[str, Any], changes: dict[str, Any]
) -> None:
    run(impl(**arguments), metadata([5], [1], **changes), 1)
    assert [name for name, _ in calls.seen] == ["vllm writes", "vllm"]


def test_other_types_profiling_and_quantised_output_are_vllm_s(calls: Calls) -> None:
    run(impl(), metadata([5], [1]), 1, dtype=torch.float32)
    run(impl(), None, 1)
    run(impl(), metadata([5], [1]), 1, output_scale=torch.ones(1))
    assert [name for name, _ in calls.seen] == ["vllm writes", "vllm", "vllm", "vllm writes", "vllm"]


def test_a_layer_that_shares_another_s_cache_writes_nothing(calls: Calls) -> None:
    run(impl(kv_sharing_target_layer_name="other"), metadata([5], [1]), 1)
    [(name, arguments)] = calls.seen
    assert name == "paged_decode"
    assert arguments[-3:] == (None, None, None)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize(("lengths", "news"), [([5, 33], [1, 1]), ([5, 33], [5, 1])])
def test_a_cache_of_e4m3_bytes_is_ours_alone(
    calls: Calls, name: str, lengths: list[int], news: list[int]
) -> None:
    """Written by a launch of its own, with the checkpoint's scales, in decoding and prefill alike."""
    meta = metadata(lengths, news)
    attend = impl(kv_cache_dtype=name)
    assert attend.kv_cache_dtype == name
    assert not attend.supports_quant_query_input, "vLLM would round the queries too"
    cache = run(attend, meta, sum(news))
    (write, arguments), (kind, attended) = calls.seen
    key, value, keys, values, slots, *scales = arguments
    assert (write, kind) == ("write_cache", "paged_decode" if max(news) == 1 else "paged_prefill")
    assert key.shape[1:] == value.shape[1:] == (KEY_HEADS, SIZE)
    assert slots is meta.slot_mapping
    assert tuple(scales) == SCALES
    assert torch.equal(keys[3, 7, 1], cache[3, 1, 7, :SIZE])
    assert torch.equal(values[3, 7, 1], cache[3, 1, 7, SIZE:])
    assert attended[9:11] == (*SCALES,) if kind == "paged_decode" else attended[10:12] == SCALES
    assert kind == "paged_prefill" or attended[-3:] == (None, None, None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"logits_soft_cap": 30.0}, "soft cap"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"alibi_slopes": [0.1] * HEADS}, "ALiBi"),
        ({"head_size": 80}, r"head size of 80 \(not in \(64, 128, 256\)\)"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"chunk_lookback": 1}, "chunked"),
    ],
)
def test_an_e4m3_cache_is_refused_where_nobody_reads_it(
    calls: Calls, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_dtype: got 'fp8' with .*{named}.*; allowed is auto"):
        impl(kv_cache_dtype="fp8", **arguments)


def test_an_e4m3_cache_without_kernels_is_refused(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "available", lambda: False)
    with pytest.raises(ValueError, match="kernels that are not available here"):
        impl(kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("changes", "meta", "message"),
    [
        ({"dtype": torch.float32}, {}, "got queries of torch.float32"),
        ({}, {"causal": False}, "or a mask"),
    ],
)
def test_what_an_e4m3_cache_s_kernels_do_not_take_is_an_error(
    calls: Calls, changes: dict[str, Any], meta: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(impl(kv_cache_dtype="fp8"), metadata([5], [1], **meta), 1, **changes)


def test_without_kernels_all_is_vllm_s(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "available", lambda: False)
    run(impl(), metadata([5], [1]), 1)
    assert [name for name, _ in calls.seen] == ["vllm writes", "vllm"]


@pytest.mark.parametrize(
    ("wanted", "capability", "ours"),
    [
        (None, None, False),
        (None, 90, False),
        (None, 75, False),
        (None, 70, True),
        ("auto", 70, True),
        ("triton", 70, False),
        ("sm70", 90, True),
    ],
)
def test_whose_kernels_take_triton_s_place(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, capability: int | None, ours: bool
) -> None:
    monkeypatch.setattr(switch.gates, "capability", lambda: capability)
    monkeypatch.delenv(switch.NAME, raising=False)
    if wanted is not None:
        monkeypatch.setenv(switch.NAME, wanted)
    try:
        switch.register()
        found = AttentionBackendEnum.TRITON_ATTN.get_class()
        assert (found is backend.Sm70AttentionBackend) == ours
        assert found.get_name() == "TRITON_ATTN"
        assert (found.get_impl_cls() is backend.Sm70AttentionImpl) == ours
    finally:
        AttentionBackendEnum.TRITON_ATTN.clear_override()


def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.NAME, "fast")
    with pytest.raises(ValueError, match="VOLTRITON_ATTENTION: got 'fast', allowed: auto, triton, sm70"):
        switch.register()
