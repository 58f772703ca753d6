"""Which keys qwen4_exp attends to, on the path of a V100: vLLM's Triton kernels interpreted on the CPU, against torch.

usage: qsa_interpreted.py      prints one JSON object a check: {"check", "wrong"}, rows (expansion: entries) that differ

Contexts are longer than the selection: each query chooses 16 of up to 120 blocks of four keys. The attention over the
chosen keys is not here: Triton's interpreter does not take its masks.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_PLUGINS": ""}
sys.path.insert(0, str(Path(__file__).parent))

import volta_dryrun

volta_dryrun._use_driver()
for stub in volta_dryrun.STUBS:
    sys.modules[stub] = types.ModuleType(stub)
volta_dryrun._without_torchvision()
volta_dryrun._use_platform()
volta_dryrun._operators_without_extensions()
volta_dryrun._torch_says_volta()

import torch  # noqa: E402
from vllm.models.qwen4_exp.nvidia.ops import qsa_indexer  # noqa: E402


def largest(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    output: torch.Tensor,
    workspace: torch.Tensor,
    k: int,
    longest: int,
) -> None:
    """What `sm70.glue.topk_rows` does; its kernel has tests of its own."""
    for row, length in enumerate(lengths.tolist()):
        places = logits[row, :length].topk(min(k, length)).indices
        output[row] = -1
        output[row, : len(places)] = places.sort().values


torch.ops._C.__dict__["persistent_topk"] = largest

RATIO, BUDGET, HEADS, SIZE = 4, 64, 4, 128
CHOSEN = BUDGET // RATIO
STARTS = [0, 13, 21]  # of the queries of two requests
VISIBLE = torch.tensor(
    [*range(100, 113), *range(5, 13)], dtype=torch.int32
)  # blocks each query may choose from
TABLE = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:32].int().view(2, 16)


def owner(row: int) -> int:
    return int(row >= STARTS[1])


def best(query: torch.Tensor, cache: torch.Tensor, row: int, visible: int) -> set[int]:
    """Blocks with the largest sum over heads of max(0, query . key), in float32."""
    keys = cache[TABLE[owner(row)].long()].flatten(0, 1)[:visible, 0].float()
    scores = (query.float() @ keys.T).clamp_min(0).sum(0)
    return set(scores.topk(min(CHOSEN, visible)).indices.tolist())


def wrong(
    found: torch.Tensor, queries: torch.Tensor, cache: torch.Tensor, rows: list[int], visible: list[int]
) -> int:
    return sum(
        best(queries[i], cache, row, visible[i]) != set(found[i][found[i] >= 0].tolist())
        for i, row in enumerate(rows)
    )


def selections() -> Iterator[tuple[str, int]]:
    cache = torch.randn(40, 8, 1, SIZE).half()
    rows = list(range(STARTS[-1]))
    queries = torch.randn(len(rows), HEADS, SIZE).half()
    found = torch.full((len(rows), CHOSEN), 99, dtype=torch.int32)
    ends = torch.tensor(STARTS, dtype=torch.int32)
    arguments = (queries, cache, TABLE, ends, VISIBLE, BUDGET, RATIO, STARTS[1], found, 128 * RATIO)
    qsa_indexer.qsa_select_paged_prefill(*arguments)
    yield "selection, prefill", wrong(found, queries, cache, rows, VISIBLE.tolist())

    visible = torch.tensor([120, 9], dtype=torch.int32)
    found = torch.full((2, CHOSEN), 99, dtype=torch.int32)
    qsa_indexer.qsa_select_paged_decode(queries[:2], cache, TABLE, visible, BUDGET, RATIO, 1, found)
    yield "selection, decode", wrong(found, queries[:2], cache, [0, STARTS[1]], visible.tolist())

    expanded = torch.full((2, BUDGET + RATIO), 99, dtype=torch.int32)
    positions = visible.long() * RATIO + 2  # three tokens of an open group behind the complete ones
    qsa_indexer.expand_qsa_block_indices(found, positions, visible, RATIO, BUDGET, expanded)
    want = []
    for blocks, count, position in zip(found.tolist(), visible.tolist(), positions.tolist(), strict=True):
        tokens = [b * RATIO + i for b in blocks[: min(count, CHOSEN)] for i in range(RATIO)]
        tokens += range(count * RATIO, position + 1)
        want.append(tokens + [-1] * (BUDGET + RATIO - 1 - len(tokens)) + [len(tokens)])
    yield "expansion", int((expanded != torch.tensor(want)).sum())


def main() -> None:
    torch.manual_seed(0)
    for check, count in selections():
        print(json.dumps({"check": check, "wrong": count}))


if __name__ == "__main__":
    main()
