"""The kernel variants that are compiled, and which one runs a shape.

The choices were measured on an H200 (docs/performance.md); on a V100 they are a prediction.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass
from typing import ClassVar, TypeVar

MAX_SHARED = 96 * 1024
_X_BYTES_GEMV = 48 * 1024  # shared memory that x may take, so that several blocks fit a multiprocessor
_X_BYTES_GEMM = {70: 31 * 1024, 80: 33 * 1024}  # three blocks fit Volta's 96 KiB


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class _Variant:
    macro: ClassVar[str]

    @property
    def name(self) -> str:
        raise NotImplementedError

    def line(self) -> str:
        """The line of source that instantiates the kernel."""
        return f"{self.macro}({', '.join(str(v) for v in astuple(self))})"


@dataclass(frozen=True)
class Gemv(_Variant):
    """`GEMV` of csrc/sm70_gemv.cu: m vectors; see `gemv_body` there for the other numbers."""

    macro: ClassVar[str] = "GEMV"
    m: int
    kl: int
    r: int
    wk: int
    nw: int
    d: int
    occupancy: int

    @property
    def name(self) -> str:
        return f"gemv_m{self.m}_kl{self.kl}_r{self.r}_wk{self.wk}_nw{self.nw}_d{self.d}_o{self.occupancy}"

    @property
    def rows(self) -> int:
        """Rows of the matrix that a block takes."""
        return 32 // self.kl * self.r * (self.nw // self.wk)

    def staging(self, k: int) -> tuple[int, int]:
        """(steps of K a staging, bytes of shared memory)."""
        return _gemv_staging(self.m, self.kl, self.wk * self.d, k, self.wk * self.m * self.rows * 4)


def _gemv_staging(m: int, kl: int, quantum: int, k: int, extra_bytes: int) -> tuple[int, int]:
    step_bytes = m * kl * 72  # 32 activations and two factors a unit
    whole = ceil_div(ceil_div(ceil_div(k, 32), kl), quantum) * quantum
    steps = min(whole, max(quantum, _X_BYTES_GEMV // step_bytes // quantum * quantum))
    return steps, steps * step_bytes + extra_bytes


@dataclass(frozen=True)
class MoeUp(_Variant):
    """`MOE_UP` of csrc/sm70_moe.cu."""

    macro: ClassVar[str] = "MOE_UP"
    kl: int
    r: int
    wk: int
    nw: int
    d: int
    occupancy: int

    @property
    def name(self) -> str:
        return f"moe_up_kl{self.kl}_r{self.r}_wk{self.wk}_nw{self.nw}_d{self.d}_o{self.occupancy}"

    @property
    def rows(self) -> int:
        """Rows of the output (a gate and an up row each) that a block takes."""
        return 32 // self.kl * self.r * (self.nw // self.wk) // 2

    def staging(self, k: int) -> tuple[int, int]:
        return _gemv_staging(1, self.kl, self.wk * self.d, k, self.wk * self.rows * 2 * 4)


@dataclass(frozen=True)
class MoeDown(_Variant):
    """`MOE_DOWN` of csrc/sm70_moe.cu."""

    macro: ClassVar[str] = "MOE_DOWN"
    kl: int
    r: int
    d: int
    occupancy: int

    @property
    def name(self) -> str:
        return f"moe_down_kl{self.kl}_r{self.r}_d{self.d}_o{self.occupancy}"

    @property
    def rows(self) -> int:
        return 32 // self.kl * self.r

    def launch(self, k: int, topk: int) -> tuple[int, int]:
        """(warps, bytes of shared memory); (0, 0) where even one warp's activations do not fit."""
        warp_bytes = ceil_div(ceil_div(k, 32), self.kl) * self.kl * 72
        warps = min(topk, 16, (MAX_SHARED - topk * self.rows * 4) // warp_bytes)
        return (warps, warps * warp_bytes + topk * self.rows * 4) if warps > 0 else (0, 0)


@dataclass(frozen=True)
class Gemm(_Variant):
    """`GEMM` of csrc/sm70_gemm.cu: up to 8 * xb rows of x a block."""

    macro: ClassVar[str] = "GEMM"
    xb: int
    nt: int
    wr: int
    wk: int
    d: int
    kb: int
    occupancy: int

    @property
    def name(self) -> str:
        return f"gemm_xb{self.xb}_nt{self.nt}_wr{self.wr}_wk{self.wk}_d{self.d}_kb{self.kb}_o{self.occupancy}"

    @property
    def rows(self) -> int:
        return 16 * self.nt * self.wr

    @property
    def threads(self) -> int:
        return self.wr * self.wk * 32

    def staging(self, k: int, fragment: int) -> tuple[int, int]:
        """(blocks of 128 of K a staging, bytes of shared memory); fragment: FRAG of csrc/sm70_common.cuh."""
        return _gemm_staging(self.xb, self.wk * self.d, self.kb, self.wk * (self.rows + 4), k, fragment)


def _gemm_staging(xb: int, quantum: int, kb: int, sums: int, k: int, fragment: int) -> tuple[int, int]:
    whole_rows = 16 * ceil_div(xb, 2)
    x_rows = whole_rows if fragment == 70 else 8 * xb
    whole = ceil_div(ceil_div(k, 128), quantum) * quantum
    count = kb or min(whole, max(quantum, _X_BYTES_GEMM[fragment] // (x_rows * 256) // quantum * quantum))
    x_bytes = x_rows * (count * 16 + 2) * 16 * (2 if kb else 1)
    return count, max(x_bytes, whole_rows * sums * 4)


@dataclass(frozen=True)
class MoeGemm(_Variant):
    """`MOE_GEMM` of csrc/sm70_gemm.cu. pair 1: gate and up at once, and silu(gate) * up is written."""

    macro: ClassVar[str] = "MOE_GEMM"
    xb: int
    nt: int
    wr: int
    d: int
    kb: int
    occupancy: int
    pair: int

    @property
    def name(self) -> str:
        start = f"moe_gemm_xb{self.xb}_nt{self.nt}_wr{self.wr}_d{self.d}_kb{self.kb}"
        return f"{start}_o{self.occupancy}_p{self.pair}"

    @property
    def columns(self) -> int:
        """Columns of the output that a block makes."""
        return 16 * self.nt * self.wr // (2 if self.pair else 1)

    @property
    def threads(self) -> int:
        return self.wr * 32

    def staging(self, k: int, fragment: int) -> tuple[int, int]:
        sums = 16 * self.nt * self.wr + 4
        return _gemm_staging(self.xb, self.d, self.kb, sums, k, fragment)


@dataclass(frozen=True)
class HalfGemv(_Variant):
    """`HGEMV` of csrc/sm70_glue.cu."""

    macro: ClassVar[str] = "HGEMV"
    m: int
    kl: int
    r: int
    wk: int
    nw: int
    d: int
    occupancy: int

    @property
    def name(self) -> str:
        return f"hgemv_m{self.m}_kl{self.kl}_r{self.r}_wk{self.wk}_nw{self.nw}_d{self.d}_o{self.occupancy}"

    @property
    def rows(self) -> int:
        return 32 // self.kl * self.r * (self.nw // self.wk)

    def shared_bytes(self, k: int) -> int:
        return self.m * k * 2 + self.wk * self.m * self.rows * 4


@dataclass(frozen=True)
class Decode(_Variant):
    """`DECODE` of csrc/sm70_decode.cu: head size, 1 for e4m3 bytes; for the rest see `decode_body`."""

    macro: ClassVar[str] = "DECODE"
    size: int
    fp8: int
    tiles: int
    ring: int
    warps: int
    occupancy: int

    @property
    def name(self) -> str:
        start = f"decode_d{self.size}_f{self.fp8}_t{self.tiles}_r{self.ring}"
        return f"{start}_nw{self.warps}_o{self.occupancy}"

    @property
    def keys(self) -> int:
        """Keys that the warps of a block take in a turn."""
        return 16 * self.tiles * self.warps

    @property
    def shared_bytes(self) -> int:
        warp = 16 * (16 * self.tiles + 4) * 4 + 16 * (16 * self.tiles + 8) * 2 + 16 * 4
        over_warps = self.warps * 16 * (min(self.size, 128) + 2) * 4
        return max(16 * (self.size + 8) * 2 + self.warps * warp, over_warps)


@dataclass(frozen=True)
class Prefill(_Variant):
    """`PREFILL` of csrc/sm70_prefill.cu: head size, 1 for e4m3 bytes, warps (of 16 tokens) a block."""

    macro: ClassVar[str] = "PREFILL"
    size: int
    fp8: int
    warps: int
    occupancy: int

    @property
    def name(self) -> str:
        return f"prefill_d{self.size}_f{self.fp8}_nw{self.warps}_o{self.occupancy}"

    @property
    def tokens(self) -> int:
        return 16 * self.warps

    @property
    def shared_bytes(self) -> int:
        row = (self.size + 8) * 2
        return (self.tokens + 64) * row + self.warps * (16 * 36 + 16 * 20 + 16) * 4


# (least N, variant), the first that fits; N small: K is split over more warps so that all multiprocessors have work.
GEMV: dict[int, list[tuple[int, Gemv]]] = {
    1: [
        (26000, Gemv(1, 16, 2, 1, 8, 2, 4)),
        (20000, Gemv(1, 8, 2, 1, 8, 2, 4)),
        (8000, Gemv(1, 16, 2, 1, 4, 2, 8)),
        (3500, Gemv(1, 16, 2, 2, 8, 2, 3)),
        (0, Gemv(1, 8, 1, 4, 8, 3, 4)),
    ],
    2: [(16000, Gemv(2, 8, 2, 1, 8, 2, 3)), (0, Gemv(2, 16, 2, 2, 8, 2, 3))],
}
# By the rows of x that a block takes, 8 * xb.
GEMM: dict[int, list[Gemm]] = {
    8: [Gemm(1, 1, 4, 2, 1, 0, 3), Gemm(1, 1, 4, 2, 1, 0, 4)],
    16: [Gemm(2, 1, 4, 2, 1, 0, 3), Gemm(2, 1, 4, 1, 1, 2, 4)],
    32: [Gemm(4, 1, 4, 1, 1, 2, 3), Gemm(4, 1, 8, 1, 1, 2, 2)],
    64: [Gemm(8, 2, 4, 1, 1, 1, 2)],
}
# K short and N small: all of K in one block, whose warps split it.
GEMM_SHORT: dict[int, Gemm] = {8: Gemm(1, 1, 1, 8, 1, 0, 3), 16: Gemm(2, 1, 1, 8, 1, 0, 3)}
_SHORT_K = {8: 6000, 16: 3000}
_MOST_PARTS = 8


def gemm_for(m: int, n: int, k: int, multiprocessors: int) -> tuple[Gemm, int]:
    """(variant, parts of K) for m rows of x.

    All blocks that a multiprocessor holds run at once, so what counts is how many such waves there are and
    how much a wave does. Parts of K make more, smaller blocks; each costs a little.
    """
    rows = next((r for r in GEMM if m <= r), max(GEMM))
    if n < 8000 and k < _SHORT_K.get(rows, 0):
        return GEMM_SHORT[rows], 1
    longest = ceil_div(k, 128) // (8 if rows <= 16 else 4)  # blocks of K that a part needs to be worth it
    most = 1 if n >= 16000 else max(1, min(longest, _MOST_PARTS))

    def cost(choice: tuple[Gemm, int]) -> float:
        variant, parts = choice
        blocks = ceil_div(n, variant.rows) * ceil_div(m, rows) * parts
        waves = ceil_div(blocks, variant.occupancy * multiprocessors)
        few_warps = (
            1.15 if variant.occupancy * variant.threads < 640 else 1.0
        )  # less hides the loads' latency
        return waves * variant.occupancy * variant.rows / parts * (1 + 0.02 * parts) * few_warps

    return min(((v, parts) for v in GEMM[rows] for parts in range(1, most + 1)), key=cost)


# Intermediate size (of a rank) up to which experts count as narrow.
MOE_NARROW = 256
MOE_UP = MoeUp(8, 2, 2, 4, 2, 8)
MOE_UP_NARROW_ONE = MoeUp(8, 2, 4, 4, 3, 6)  # one token
MOE_UP_MANY = MoeUp(8, 2, 1, 4, 2, 8)  # from two tokens on, of narrow experts from eight
MOE_DOWN_ONE = MoeDown(8, 2, 1, 2)
MOE_DOWN = MoeDown(4, 2, 2, 2)  # from two tokens on
MOE_DOWN_NARROW_FEW = MoeDown(2, 1, 3, 2)  # up to two tokens
MOE_DOWN_NARROW = MoeDown(2, 2, 2, 2)
# (least pairs an expert on average, (gate and up, down)); both with the same rows of x a block.
MOE_GEMM: list[tuple[int, tuple[MoeGemm, MoeGemm]]] = [
    (128, (MoeGemm(8, 2, 4, 1, 1, 2, 1), MoeGemm(8, 2, 4, 1, 1, 2, 0))),
    (24, (MoeGemm(4, 2, 4, 1, 1, 3, 1), MoeGemm(4, 1, 8, 1, 1, 2, 0))),
    (8, (MoeGemm(2, 2, 4, 1, 1, 4, 1), MoeGemm(2, 1, 4, 2, 0, 4, 0))),
    (0, (MoeGemm(1, 2, 4, 2, 0, 3, 1), MoeGemm(1, 1, 4, 2, 0, 4, 0))),
]


def moe_up(tokens: int, intermediate: int) -> MoeUp:
    if tokens == 1 and intermediate <= MOE_NARROW:
        return MOE_UP_NARROW_ONE
    return MOE_UP if tokens < (8 if intermediate <= MOE_NARROW else 2) else MOE_UP_MANY


def moe_down(tokens: int, intermediate: int) -> MoeDown:
    if intermediate <= MOE_NARROW:
        return MOE_DOWN_NARROW_FEW if tokens <= 2 else MOE_DOWN_NARROW
    return MOE_DOWN_ONE if tokens == 1 else MOE_DOWN


def moe_pairs_at_once(experts: int, intermediate: int, fragment: int) -> int:
    """Up to how many pairs weights are read once a pair, not once an expert (a large L2 holds what is shared)."""
    return max(experts * (2 if fragment == 80 and intermediate <= MOE_NARROW else 1), 16)


# A half matrix: with few rows (routers, gates) all warps of a block share a row, with few columns each has its own.
HALF_FEW_ROWS, HALF_FEW_COLUMNS = 512, 512
HALF_SHARED = 48 * 1024  # two blocks a multiprocessor; vectors that need more are better off with cuBLAS
HALF_NARROW: dict[int, HalfGemv] = (
    {1: HalfGemv(1, 16, 1, 16, 16, 4, 2)}
    | {m: HalfGemv(m, 32, 1, 4, 8, 4, 4) for m in (2, 3, 4)}
    | {m: HalfGemv(m, 32, 1, 4, 8, 3, 2) for m in (5, 6, 7, 8)}
)
HALF_SHORT = {1: HalfGemv(1, 16, 1, 1, 8, 3, 4), 2: HalfGemv(2, 8, 2, 1, 8, 3, 3)}
HALF_GEMV = {1: HalfGemv(1, 16, 2, 4, 8, 2, 4), 2: HalfGemv(2, 16, 2, 4, 8, 2, 3)}


def half_gemv(m: int, n: int, k: int) -> HalfGemv | None:
    """For a half matrix [n, k] and m vectors; None where cuBLAS is better."""
    wide = HALF_SHORT if k <= HALF_FEW_COLUMNS else HALF_GEMV
    variant = (HALF_NARROW if n <= HALF_FEW_ROWS else wide).get(m)
    return variant if variant and variant.shared_bytes(k) <= HALF_SHARED else None


# By FRAG and (head size, 1 for e4m3 bytes). On Volta two lanes hold each element, so a chunk takes twice the registers.
DECODE: dict[int, dict[tuple[int, int], Decode]] = {
    70: {
        (64, 0): Decode(64, 0, 2, 2, 4, 3),
        (64, 1): Decode(64, 1, 2, 4, 4, 3),
        (128, 0): Decode(128, 0, 1, 2, 4, 2),
        (128, 1): Decode(128, 1, 1, 2, 4, 2),
        (256, 0): Decode(256, 0, 1, 2, 4, 2),
        (256, 1): Decode(256, 1, 1, 2, 4, 2),
    },
    80: {
        (64, 0): Decode(64, 0, 2, 2, 4, 4),
        (64, 1): Decode(64, 1, 2, 4, 4, 4),
        (128, 0): Decode(128, 0, 2, 4, 4, 2),
        (128, 1): Decode(128, 1, 4, 4, 4, 2),
        (256, 0): Decode(256, 0, 1, 4, 8, 1),
        (256, 1): Decode(256, 1, 2, 4, 4, 2),
    },
}
# `combine` of csrc/sm70_decode.cu.
MOST_SPLITS, COMBINE_THREADS = 128, 128
COMBINE_SHARED = (4 * COMBINE_THREADS + MOST_SPLITS + 1) * 4


@functools.lru_cache(4096)
def split_count(variant: Decode, blocks: int, max_length: int, multiprocessors: int) -> int:
    """Parts that the context of up to max_length keys is cut into, where there are `blocks` blocks a part.

    The blocks that multiprocessors hold run at once: what counts is how many such waves there are, and how many
    keys a wave takes; starting and ending one takes as long as a turn.
    """
    most = max(1, min(ceil_div(max_length, variant.keys), MOST_SPLITS))
    slots = variant.occupancy * multiprocessors
    return min(
        range(1, most + 1),
        key=lambda n: ceil_div(blocks * n, slots) * (ceil_div(max_length, n * variant.keys) + 1),
    )


PREFILL: dict[tuple[int, int], Prefill] = {
    (size, fp8): Prefill(size, fp8, 8 if size == 128 else 4, {64: 4, 128: 2, 256: 1}[size])
    for size in (64, 128, 256)
    for fp8 in (0, 1)
}

T = TypeVar("T")


def by_rows(table: list[tuple[int, T]], n: int) -> T:
    """The first entry of a table whose least N is reached."""
    return next(variant for least, variant in table if n >= least)


def all_variants(fragment: int) -> list[_Variant]:
    """Every variant in use where fragments lie as `fragment` says (FRAG of csrc/sm70_common.cuh), each once."""
    found: list[_Variant] = [v for table in GEMV.values() for _, v in table]
    found += [v for choices in GEMM.values() for v in choices]
    found += GEMM_SHORT.values()
    found += [
        MOE_UP,
        MOE_UP_NARROW_ONE,
        MOE_UP_MANY,
        MOE_DOWN_ONE,
        MOE_DOWN,
        MOE_DOWN_NARROW_FEW,
        MOE_DOWN_NARROW,
    ]
    found += [v for _, both in MOE_GEMM for v in both]
    found += [*HALF_NARROW.values(), *HALF_SHORT.values(), *HALF_GEMV.values()]
    found += DECODE[fragment].values()
    found += PREFILL.values()
    return list(dict.fromkeys(found))
