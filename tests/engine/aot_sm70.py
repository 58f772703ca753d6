"""Every Triton kernel on the serving paths, compiled for sm_70 at the shapes of one rank of four.

usage: python tests/engine/aot_sm70.py [GROUP...]     prints one JSON object a line: model, case, and the Row
Groups: attention, gdn, runner, sampler, qwen4_exp (what of it compiles in float16). Shapes are those of Qwen3-32B (attention hs 128), Qwen3-Next and
Qwen3.5 (hs 256, Gated DeltaNet), SmolLM2 and Qwen2.5-0.5B (hs 64); vocabulary 151936.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import volta_dryrun

volta_dryrun.setup()

import torch  # noqa: E402

HALF, FLOAT, INT, LONG = torch.float16, torch.float32, torch.int32, torch.int64
VOCABULARY = 151936
Case = tuple[str, str, Callable[[], object]]


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def attention(head: int, q_heads: int, kv_heads: int, rows: int) -> None:
    """TRITON_ATTN: one row a sequence is decoding (split over the cache), 64 rows are a prefill."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    sequences = 2 if rows == 1 else 1
    q = zeros(sequences * rows, q_heads, head)
    cache = zeros(4, kv_heads, 16, 2 * head).transpose(1, 2)
    k, v = cache.split(head, dim=-1)
    scale = torch.ones(1).expand(sequences, kv_heads)
    unified_attention(
        q=q,
        k=k,
        v=v,
        out=torch.zeros_like(q),
        cu_seqlens_q=zeros(sequences + 1, dtype=INT),
        max_seqlen_q=rows,
        seqused_k=zeros(sequences, dtype=INT),
        max_seqlen_k=64,
        softmax_scale=0.1,
        causal=True,
        window_size=(-1, -1),
        block_table=zeros(sequences, 4, dtype=INT),
        softcap=0,
        q_descale=None,
        k_descale=scale,
        v_descale=scale,
        seq_threshold_3D=16,
        num_par_softmax_segments=16,
        softmax_segm_output=zeros(16, q_heads, 16, head, dtype=FLOAT),
        softmax_segm_max=zeros(16, q_heads, 16, dtype=FLOAT),
        softmax_segm_expsum=zeros(16, q_heads, 16, dtype=FLOAT),
    )


def write_cache(head: int, kv_heads: int) -> None:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    k, v = zeros(4, kv_heads, 16, 2 * head).transpose(1, 2).split(head, dim=-1)
    x = zeros(3, kv_heads, head)
    triton_reshape_and_cache_flash(x, x, k, v, zeros(3, dtype=LONG), "auto", torch.ones(1), torch.ones(1))


def attention_cases() -> Iterator[Case]:
    models = (("Qwen3-32B", 128, 16, 2), ("Qwen3-30B-A3B", 128, 8, 1))
    for model, head, q, kv in (*models, ("Qwen3-Next", 256, 4, 1), ("Qwen2.5-0.5B, one rank", 64, 14, 2)):
        yield model, "attention, decode", lambda h=head, a=q, b=kv: attention(h, a, b, 1)
        yield model, "attention, prefill", lambda h=head, a=q, b=kv: attention(h, a, b, 64)
        yield model, "cache write", lambda h=head, b=kv: write_cache(h, b)


def gdn_cases() -> Iterator[Case]:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5: 4 key and 8 value heads of 128 on a rank."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from vllm.third_party.flash_linear_attention import ops as fla
    from vllm.third_party.flash_linear_attention.ops import l2norm, layernorm_guard

    k, v, d, rows = 4, 8, 128, 128
    width = 2 * k * d + v * d
    decay, bias = zeros(v, dtype=FLOAT), zeros(v, dtype=FLOAT)
    state = zeros(8, v, d, d, dtype=FLOAT)
    heads = zeros(4, v)
    ends = torch.tensor([0, rows], dtype=INT)
    conv, conv_state = zeros(width, 4), zeros(8, 3, width).transpose(1, 2)
    model = "Qwen3-Next, Qwen3.5"

    def chunk() -> object:
        return fla.chunk_gated_delta_rule(
            q=zeros(1, rows, k, d),
            k=zeros(1, rows, k, d),
            v=zeros(1, rows, v, d),
            g=zeros(1, rows, v, dtype=FLOAT),
            beta=zeros(1, rows, v, dtype=FLOAT),
            initial_state=zeros(1, v, d, d, dtype=FLOAT),
            output_final_state=True,
            cu_seqlens=ends,
            use_qk_l2norm_in_kernel=False,
        )

    def packed_decode() -> object:
        return fla.fused_recurrent_gated_delta_rule_packed_decode(
            zeros(4, width),
            heads,
            heads,
            decay,
            bias,
            d**-0.5,
            state,
            zeros(4, 1, v, d),
            zeros(4, dtype=INT),
            use_qk_l2norm_in_kernel=True,
        )

    def prepare() -> object:
        a = zeros(rows, v)
        return fla.fused_post_conv_prep(zeros(rows, width), a, a, decay, bias, k, d, d)

    def conv_prefill() -> object:
        has_state = zeros(1, dtype=torch.bool)
        return causal_conv1d_fn(
            zeros(rows, width).t(), conv, None, conv_state, ends, zeros(1, dtype=INT), has_state
        )

    def conv_decode() -> object:
        indices = zeros(4, dtype=INT)
        return causal_conv1d_update(
            zeros(4, width), conv_state, conv, None, "silu", conv_state_indices=indices
        )

    def norm() -> object:
        return layernorm_guard.layernorm_fn(
            zeros(32, d), torch.ones(d), None, zeros(32, d), 1e-6, None, True, True
        )

    yield model, "GDN prepare", prepare
    yield model, "GDN decode", packed_decode
    yield model, "GDN prefill", chunk
    yield model, "convolution, prefill", conv_prefill
    yield model, "convolution, decode", conv_decode
    yield model, "l2 norm", lambda: l2norm.l2norm_fwd(zeros(32, d))
    yield model, "gated norm", norm


def runner_cases() -> Iterator[Case]:
    """Model runner V2: preparation of a step."""
    from vllm.v1.worker.gpu import input_batch
    from vllm.v1.worker.gpu.block_table import BlockTables

    def ints(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=INT)

    def prefill() -> object:
        return input_batch.prepare_prefill_inputs(
            ints(8), ints(8, 1), ints(4), ints(5), ints(8, 64), ints(8), ints(8)
        )

    def positions() -> object:
        return input_batch.prepare_pos_seq_lens(ints(4), ints(5), ints(8), zeros(8, dtype=LONG), ints(8))

    def tables() -> object:
        table = BlockTables([16], 8, 64, [8], torch.device("cpu"))
        table.gather_block_tables(ints(4), 4)
        return table.compute_slot_mappings(ints(4), ints(5), zeros(8, dtype=LONG), 8)

    yield "all", "prepare prefill", prefill
    yield "all", "positions", positions
    yield "all", "block tables", tables


def sampler_cases() -> Iterator[Case]:
    from vllm.v1.sample.ops import topk_topp_triton
    from vllm.v1.worker.gpu.sample import gumbel, logprob, min_p, penalties

    logits = zeros(4, VOCABULARY, dtype=FLOAT)
    ints, ones = zeros(4, dtype=INT), torch.ones(8)
    bits, counts = zeros(8, (VOCABULARY + 31) // 32, dtype=INT), zeros(8, VOCABULARY, dtype=INT)
    top_k, top_p = torch.full((4,), 20, dtype=INT), torch.full((4,), 0.9)

    def sample() -> object:
        seeds, positions = zeros(8, dtype=LONG), zeros(4, dtype=LONG)
        return gumbel.gumbel_sample(logits, ints, ones, seeds, positions, True, False)

    def penalise() -> object:
        return penalties.apply_penalties(logits, ints, ints, ints, ones, ones, ones, bits, counts)

    yield "all", "top-k, top-p", lambda: topk_topp_triton.apply_top_k_top_p_triton(logits, top_k, top_p)
    yield "all", "temperature", lambda: gumbel.apply_temperature(logits, ints, ones)
    yield "all", "sampling", sample
    yield "all", "penalties", penalise
    yield "all", "min-p", lambda: min_p.apply_min_p(logits, ints, ones)
    yield "all", "logprobs", lambda: logprob.compute_token_logprobs(logits, zeros(4, 6, dtype=LONG))


def qwen4_exp_cases() -> Iterator[Case]:
    """Hyper-connections (4 streams of 2560), per-layer embeddings and selection of Qwen3.8-Flash-Next."""
    from vllm.models.qwen4_exp.common.ops import ple
    from vllm.models.qwen4_exp.nvidia.ops import hc, qsa, qsa_indexer, qsa_prepare

    def ints(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=INT)

    hidden, streams = 2560, 4
    width = hidden * streams
    x, out, norm = zeros(4, width), zeros(4, hidden), zeros(width)
    gate = zeros(4, streams)
    model = "Qwen3.8-Flash-Next"

    def expand() -> object:
        selected, rows = zeros(4, 512, dtype=INT), zeros(4, dtype=LONG)
        return qsa_indexer.expand_qsa_block_indices(
            selected, rows, zeros(4, dtype=INT), 4, 2048, zeros(4, 2052, dtype=INT)
        )

    def decode_selection() -> object:
        keys = zeros(8, 16, 1, 128)
        table, visible = zeros(4, 4, dtype=INT), zeros(4, dtype=INT)
        return qsa_indexer.qsa_select_paged_decode(
            zeros(4, 4, 128), keys, table, visible, 2048, 4, 1, zeros(4, 512, dtype=INT)
        )

    heads, key_heads, size, page, ratio = 6, 1, 256, 64, 4
    cache = zeros(8, page, key_heads, 2 * size)
    keys, values = cache.split(size, -1)
    compressed = zeros(8, page // ratio, 1, 128)

    def sparse(rows: int) -> object:
        """2048 chosen keys, up to three of the open group, and the count behind them."""
        chosen = zeros(rows, 2052, dtype=INT)
        table, owner = zeros(4, 4, dtype=INT), zeros(rows, dtype=INT)
        q = zeros(rows, heads, size)
        return qsa.qsa_sparse_paged_attention(
            q, keys, values, chosen, table, owner, rows > 64, output_gate=zeros(rows, heads, size)
        )

    def prefill_selection() -> object:
        rows = 64
        ends, visible = torch.tensor([0, rows], dtype=INT), zeros(rows, dtype=INT)
        found = zeros(rows, 512, dtype=INT)
        return qsa_indexer.qsa_select_paged_prefill(
            zeros(rows, 4, 128),
            compressed,
            zeros(1, 4, dtype=INT),
            ends,
            visible,
            2048,
            ratio,
            rows,
            found,
            rows,
        )

    def prepare() -> object:
        rows = 4
        return qsa_prepare.qsa_prepare(
            zeros(rows, 4 * 128),
            zeros(rows, 128),
            zeros(rows, dtype=LONG),
            zeros(4096, 64),
            zeros(128),
            zeros(128),
            1e-6,
            zeros(rows, 4, 128),
            zeros(8, ratio, 128),
            ints(rows),
            ints(4, 4),
            ints(5),
            zeros(rows, dtype=LONG),
            compressed.view(8, page // ratio, 128),
            zeros(rows, dtype=LONG),
            ints(4, 2),
            compress_ratio=ratio,
            mrope_section=None,
            rope_pos_offset=None,
            main_qkv=zeros(rows, 2 * (heads + key_heads) * size),
            main_q_norm_weight=zeros(size),
            main_k_norm_weight=zeros(size),
            main_eps=1e-6,
            main_kv_cache=cache,
            main_slot_mapping=zeros(rows, dtype=LONG),
            main_k_scale=1.0,
            main_v_scale=1.0,
        )

    def convolution(mode: str) -> object:
        state, rows = zeros(8, width, 12), 4
        has_state = torch.zeros(rows, dtype=torch.bool)
        return ple.ple_conv(
            zeros(rows, width),
            zeros(rows, width),
            state,
            zeros(width, 4),
            ints(rows),
            None,
            mode=mode,
            dilation=3,
            query_start_loc=ints(rows + 1),
            has_initial_states=has_state,
        )

    def ngram_ids() -> object:
        longs = lambda *shape: zeros(*shape, dtype=LONG)  # noqa: E731
        return ple._ple_ngram_ids(
            ints(4), ints(5), ints(4, 2), longs(3), longs(2, 8), longs(16), longs(4, 16), 2, 8
        )

    yield model, "PLE convolution, prefill", lambda: convolution("prefill")
    yield model, "PLE convolution, decode", lambda: convolution("decode")
    yield model, "PLE n-grams", ngram_ids
    yield model, "QSA prepare", prepare
    yield model, "QSA selection, prefill", prefill_selection
    for rows in (1, 8, 64, 1024):
        yield model, f"QSA attention, {rows} rows", lambda r=rows: sparse(r)
    yield model, "HC norm", lambda: hc._grouped_gemma_rmsnorm(x, norm, 1e-6, streams)
    yield model, "HC activation", lambda: hc._hc_silu(zeros(4, 320), streams)
    yield model, "HC gate", lambda: hc._hc_gate_mix(x, x, streams)
    yield model, "HC combine", lambda: hc._hc_combine(x, out, gate, streams)
    yield model, "HC combine and norm", lambda: hc._hc_combine_norm(x, out, gate, norm, 1e-6, streams)
    yield model, "PLE gate", lambda: ple._ple_gate(x, out, x, norm, norm, norm, 1e-6)
    yield model, "QSA selection, decode", decode_selection
    yield model, "QSA expansion", expand


GROUPS = {
    "attention": attention_cases,
    "gdn": gdn_cases,
    "runner": runner_cases,
    "sampler": sampler_cases,
    "qwen4_exp": qwen4_exp_cases,
}


def main() -> None:
    for group in sys.argv[1:] or GROUPS:
        for model, case, call in GROUPS[group]():
            for row in volta_dryrun.compiled(call):
                print(json.dumps({"model": model, "case": case, **dataclasses.asdict(row)}), flush=True)


if __name__ == "__main__":
    main()
