"""Qwen3.8-Flash-Next (`qwen4_exp`) below compute capability 8.0: tile sizes.

Triton has no tensor cores and 96 KB of shared memory on Volta, and its software pipelining begins with 8.0. vLLM's
tiles, tuned for newer cards, take 160 KB in the prefill's indexer and spill kilobytes of registers in the sparse
attention; the ones here come from `tests/engine/test_aot_sm70.py`, which compiles them for sm_70.
"""

from __future__ import annotations

# Rows of queries a program of the prefill's indexer takes, stages, warps.
PREFILL_TILES = (8, 1, 8)


def attention_tiles(programs: int) -> tuple[int, int, int]:
    """(keys a step, parts of the selection, warps) of the sparse attention; programs: rows times key heads.

    Few rows are split into parts, so that all multiprocessors have work; many are not.
    """
    if programs <= 32:
        return 32, 64, 4
    if programs <= 256:
        return 32, 8, 4
    return 32, 1, 4
