"""Memory and bandwidth of cards, and the notation `4xV100-32`.

`usable_gib` is what PyTorch sees. H200: read on one (143771 MiB total, 143156 free). The others: vendors' data
sheets less what nvidia-smi reports as total on such cards (general knowledge, not re-read here).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from voltriton.planner.files import PlanError

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    name: str
    usable_gib: float
    bandwidth_gb_s: float
    profile: str
    dtype_bytes: int = 2
    block_tokens: int = 16
    context_gib: float = 0.6
    """CUDA context, cuBLAS and NCCL: what a rank uses beside PyTorch's own allocations."""


CARDS = {
    "V100-32": Card("V100-32", 31.74, 900, "v100-tp4"),
    "V100-16": Card("V100-16", 15.77, 900, "v100-tp4"),
    "H100-80": Card("H100-80", 79.1, 3350, "hopper"),
    "H200": Card("H200", 139.8, 4800, "hopper"),
    "A100-80": Card("A100-80", 79.2, 2039, "hopper"),
    # Two channels of DDR4: only an order of magnitude. The KV cache's size is set by VLLM_CPU_KVCACHE_SPACE.
    "CPU": Card("CPU", 0.0, 40, "cpu", 4, 128, 0.0),
}


@dataclass(frozen=True)
class Cards:
    count: int
    card: Card


def parse_cards(text: str) -> Cards:
    """`4xV100-32`, `H200`, `2xCPU`."""
    match = re.fullmatch(r"(?:(\d+)[xX*])?([A-Za-z0-9-]+)", text.strip())
    known = ", ".join(CARDS)
    if not match:
        raise PlanError(f"--gpus: got {text!r}, the form is COUNTxCARD, such as 4xV100-32; cards: {known}")
    count, name = int(match.group(1) or 1), match.group(2).upper()
    name = {"V100": "V100-32", "H100": "H100-80", "A100": "A100-80"}.get(name, name)
    if name not in CARDS:
        raise PlanError(f"--gpus: {match.group(2)!r} is not a card known here; there are {known}")
    if not 1 <= count <= 64:
        raise PlanError(f"--gpus: got {count} cards, 1 to 64 are allowed")
    return Cards(count, CARDS[name])
