"""Time the sm_70 kernels: every result is checked against float64 first, on fresh random data with outputs and
scratch poisoned by NaN; then graph replays over rotating buffers are timed, as a fraction of the copy bandwidth
of the same run, and of what a kernel takes that only reads as many bytes (`plain_read.py`).

    python tests/bench/kernels.py --out perf/results/kernels_h200 [--marlin _C_stable_libtorch.abi3.so] [--only half ...]

writes OUT.txt (what is printed) and OUT.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import marlin
import plain_read
from voltriton_vllm.sm70 import attention, glue, layout, linear, ops

DEVICE = "cuda"
NAN = float("nan")
ROTATE_BYTES = 400e6  # several times the largest L2
LINEAR = {  # name: (N, K)
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B o": (4096, 4096),
    "Qwen3-8B gate_up": (24576, 4096),
    "Qwen3-8B down": (4096, 12288),
    "Qwen3-32B/4 qkv": (2560, 5120),
    "Qwen3-32B/4 o": (5120, 2048),
    "Qwen3-32B/4 gate_up": (12800, 5120),
    "Qwen3-32B/4 down": (5120, 6400),
    "64 MB": (28672, 4096),
    "300 MB": (65536, 8192),
}
PREFILL = ("Qwen3-8B qkv", "Qwen3-8B gate_up", "Qwen3-8B down", "Qwen3-32B/4 qkv", "Qwen3-32B/4 gate_up")
MOE = {  # name: (experts, intermediate, hidden, top k)
    "Qwen3-30B-A3B": (128, 768, 2048, 8),
    "Qwen3-30B-A3B/4": (128, 192, 2048, 8),
    "Qwen3-Next/4": (512, 128, 2048, 10),
    "qwen4_exp/4": (512, 160, 2560, 10),
}
ATTENTION = (
    (128, 32, 8),
    (128, 16, 2),
    (64, 32, 8),
    (256, 24, 2),
    (256, 6, 1),
)  # head size, heads, key heads
CONTEXTS = ((1, 4096), (1, 8192), (1, 32768), (8, 4096), (8, 16384), (32, 8192))
HALF = {  # name: (N, K); qwen4_exp/4: a rank of four
    "qwen4_exp router": (512, 2560),
    "qwen4_exp shared expert's gate": (1, 2560),
    "qwen4_exp hyper-connection, down": (336, 10240),
    "qwen4_exp hyper-connection, up": (10240, 320),
    "qwen4_exp/4 GDN in": (4096, 2560),
    "qwen4_exp/4 GDN out": (2560, 1536),
    "qwen4_exp GDN out": (2560, 6144),
    "qwen4_exp/4 lm_head": (62080, 2560),
    "Qwen3-30B-A3B router": (128, 2048),
}
SELECTION = ((1, 2048), (1, 65536), (8, 2048), (32, 8192), (2048, 2048))  # rows, columns; 512 of them


class Report:
    """Lines to the screen and a file, records to JSON."""

    def __init__(self, out: Path, marlin_used: bool) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._text = out, out.with_suffix(".txt").open("w", encoding="utf-8")
        properties = torch.cuda.get_device_properties(0)
        self.head = {
            "command": shlex.join(["python", *sys.argv]),
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "marlin": marlin_used,
        }
        self.rows: list[dict[str, Any]] = []
        for key, value in self.head.items():
            self.line(f"{key}: {value}")

    def line(self, text: str) -> None:
        for stream in (sys.stdout, self._text):
            _write(stream, text)

    def row(self, text: str, **record: Any) -> None:
        self.rows.append(record)
        self.line(text)

    def save(self) -> None:
        self._path.with_suffix(".json").write_text(json.dumps({**self.head, "rows": self.rows}, indent=1))


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def timed_s(call: Callable[[], object], repeats: int) -> float:
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats * 1e-3


def replay_s(call: Callable[[int], object], buffers: int) -> float:
    """Seconds a call: calls 0..buffers-1 captured in one graph; the median of five replay averages."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(buffers):
            call(i)
    runs = sorted(timed_s(graph.replay, 4) for _ in range(5))
    return runs[2] / buffers


class Roofline:
    """What a time is as a fraction of the copy bandwidth, and of a plain read of as many bytes."""

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth, self._read = bandwidth, plain_read.PlainRead(replay_s, ROTATE_BYTES)

    def __call__(self, size: float, seconds: float) -> tuple[str, dict[str, float]]:
        """(text, fields of the record) of a kernel that must read `size` bytes."""
        fields = {
            "fraction": size / seconds / self._bandwidth,
            "of_read": self._read.seconds(int(size)) / seconds,
        }
        return f"({fields['fraction']:4.2f}, {fields['of_read']:4.2f} of a read)", fields


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    a = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / timed_s(lambda: b.copy_(a), 20)


def poison() -> None:
    """NaN into the memory that the next outputs and scratch will take."""
    blocks = [torch.full((1 << 24,), NAN, device=DEVICE) for _ in range(8)]
    del blocks


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    value = float((got.double() - want).norm() / want.norm())
    return value if value == value else float("inf")


def check(got: torch.Tensor, want: torch.Tensor, limit: float, what: str) -> float:
    error = relative_error(got, want)
    if not error < limit:
        raise SystemExit(f"{what}: relative error {error:.1e}, allowed is {limit:.0e}")
    return error


def random_matrix(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    scale = torch.randint(0x30, 0x7F, (n, k // 16), dtype=torch.uint8, device=DEVICE)
    return weight, scale.view(torch.float8_e4m3fn)


def multiply64(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, factor: float) -> torch.Tensor:
    """x @ W.T in float64, a few thousand rows of W at a time."""
    rows = torch.tensor(factor, device=DEVICE)
    parts = [
        x.double() @ layout.dequantise(weight[i : i + 4096], scale[i : i + 4096], rows).T
        for i in range(0, weight.shape[0], 4096)
    ]
    return torch.cat(parts, dim=1)


def packed_copies(
    weight: torch.Tensor, scale: torch.Tensor, factor: float, count: int
) -> list[ops.PackedLinear]:
    rows = torch.tensor(factor, device=DEVICE)
    return [ops.prepare_linear(weight.clone(), scale.clone(), rows) for _ in range(count)]


def bench_linear(report: Report, roofline: Roofline) -> None:
    with_marlin = bool(report.head["marlin"])
    report.line(
        "\nNVFP4 linear: microseconds (fraction of copy bandwidth, of a plain read); Marlin where loaded; error"
    )
    for name, (n, k) in LINEAR.items():
        weight, scale = random_matrix(n, k)
        payload = n * k * 9 / 16
        count = max(4, min(30, int(ROTATE_BYTES / payload)))
        packed = packed_copies(weight, scale, 1e-3, count)
        others = [marlin.Marlin(weight, scale, 1e-3) for _ in range(count)] if with_marlin else []
        for m in (1, 2, 4, 8, 16, 32, 64):
            x = torch.randn(m, k, device=DEVICE).half()
            want = multiply64(x, weight, scale, 1e-3)
            poison()
            error = check(ops.nvfp4_linear(x, packed[0]), want, 2e-3, f"{name} M={m}")
            ours = replay_s(lambda i, x=x, p=packed: ops.nvfp4_linear(x, p[i]), count)
            fractions, fields = roofline(payload, ours)
            text = f"{name:20s} {n:6d}x{k:<6d} M={m:<3d} {ours * 1e6:8.1f} {fractions}"
            record = {
                "what": "linear",
                "name": name,
                "n": n,
                "k": k,
                "m": m,
                "us": ours * 1e6,
                "error": error,
                **fields,
            }
            if others:
                record["marlin_error"] = check(others[0](x), want, 5e-3, f"Marlin, {name} M={m}")
                theirs = replay_s(lambda i, x=x, p=others: p[i](x), count)
                record["marlin_us"] = theirs * 1e6
                text += f"  Marlin {theirs * 1e6:8.1f}  ours/Marlin {ours / theirs:4.2f}"
            report.row(f"{text}  {error:.1e}", **record)
        del packed, others


def bench_prefill(report: Report, _: Roofline) -> None:
    report.line("\nNVFP4 linear, many rows: microseconds; cuBLAS on float16 weights of the same shape")
    for name in PREFILL:
        n, k = LINEAR[name]
        weight, scale = random_matrix(n, k)
        packed = packed_copies(weight, scale, 1e-3, 1)[0]
        half = layout.dequantise(weight, scale, torch.tensor(1e-3, device=DEVICE)).half()
        for m in (128, 512, 2048, 8192):
            x = torch.randn(m, k, device=DEVICE).half()
            poison()
            error = check(
                ops.nvfp4_linear(x, packed)[:64], multiply64(x[:64], weight, scale, 1e-3), 2e-3, name
            )
            ours = replay_s(lambda _, x=x, p=packed: ops.nvfp4_linear(x, p), 3)
            theirs = replay_s(lambda _, x=x, w=half: torch.mm(x, w.t()), 3)
            report.row(
                f"{name:20s} {n:6d}x{k:<6d} M={m:<5d} {ours * 1e6:8.1f}  cuBLAS {theirs * 1e6:8.1f}"
                f"  of cuBLAS {theirs / ours:4.2f}  {error:.1e}",
                what="prefill",
                name=name,
                m=m,
                us=ours * 1e6,
                cublas_us=theirs * 1e6,
                error=error,
            )


def moe64(
    x: torch.Tensor, layer: dict[str, torch.Tensor], ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    want = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    inter = layer["w13"].shape[1] // 2
    factor = torch.tensor(2e-4, device=DEVICE)
    for e in ids.unique().tolist():
        a = layout.dequantise(layer["w13"][e], layer["s13"][e], factor)
        b = layout.dequantise(layer["w2"][e], layer["s2"][e], factor)
        row, t = (ids == e).nonzero(as_tuple=True)
        h = x[row].double() @ a.T
        act = torch.nn.functional.silu(h[:, :inter]) * h[:, inter:]
        want.index_add_(0, row, weights[row, t].double()[:, None] * (act @ b.T))
    return want


def random_experts(experts: int, inter: int, hidden: int) -> dict[str, torch.Tensor]:
    w13, s13 = random_matrix(experts * 2 * inter, hidden)
    w2, s2 = random_matrix(experts * hidden, inter)
    return {
        "w13": w13.view(experts, 2 * inter, -1),
        "s13": s13.view(experts, 2 * inter, -1),
        "w2": w2.view(experts, hidden, -1),
        "s2": s2.view(experts, hidden, -1),
    }


def bench_moe(report: Report, roofline: Roofline) -> None:
    report.line(
        "\nNVFP4 experts, a whole layer: microseconds (fraction of copy bandwidth, of a plain read: bytes of the"
        " distinct experts)"
    )
    for name, (experts, inter, hidden, topk) in MOE.items():
        layer = random_experts(experts, inter, hidden)
        factor = torch.full((experts,), 2e-4, device=DEVICE)
        packed = ops.prepare_moe(
            layer["w13"].clone(), layer["s13"], factor, layer["w2"].clone(), layer["s2"], factor
        )
        for m in (1, 2, 4, 8, 16, 32, 64, 512, 4096):
            x = torch.randn(m, hidden, device=DEVICE).half()
            weights = torch.rand(m, topk, device=DEVICE)
            routes = [
                torch.rand(m, experts, device=DEVICE).topk(topk).indices.int()
                for _ in range(16 if m <= 64 else 1)
            ]
            poison()
            error = check(
                ops.nvfp4_moe(x, packed, weights, routes[0]),
                moe64(x, layer, routes[0], weights),
                3e-3,
                f"{name} M={m}",
            )
            seconds = replay_s(
                lambda i, x=x, p=packed, w=weights, r=routes: ops.nvfp4_moe(x, p, w, r[i]), len(routes)
            )
            distinct = sum(len(r.unique()) for r in routes) / len(routes)
            fractions, fields = roofline(distinct * 3 * inter * hidden * 9 / 16, seconds)
            tflops = m * topk * 6 * inter * hidden / seconds / 1e12
            report.row(
                f"{name:20s} M={m:<5d} {seconds * 1e6:8.1f} {fractions}  {distinct:5.1f} experts"
                f"  {tflops:6.1f} TFLOP/s  {error:.1e}",
                what="moe",
                name=name,
                m=m,
                us=seconds * 1e6,
                tflops=tflops,
                error=error,
                **fields,
            )


def caches(batch: int, length: int, key_heads: int, size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    blocks = batch * length // 16
    one = 2 * blocks * 16 * key_heads * size * dtype.itemsize
    for _ in range(max(1, min(8, int(ROTATE_BYTES / one)))):
        yield torch.randn(2, blocks, 16, key_heads, size, device=DEVICE, dtype=torch.float16).to(dtype)


def attention64(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, length: int, group: int
) -> torch.Tensor:
    """The last sequence of the batch, in float64."""
    k, v = (c.float()[table[-1].long()].flatten(0, 1)[:length].double() for c in cache)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    p = (torch.einsum("hd,thd->ht", q[-1].double(), k) * q.shape[2] ** -0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", p, v)


def bench_attention(report: Report, roofline: Roofline) -> None:
    report.line(
        "\nDecode attention, blocks of 16: microseconds (fraction of copy bandwidth, of a plain read: cache bytes)"
    )
    for size, heads, key_heads in ATTENTION:
        for batch, length in CONTEXTS:
            for dtype in (torch.float16, torch.float8_e4m3fn):
                stored = list(caches(batch, length, key_heads, size, dtype))
                seconds, error = time_attention(stored, batch, length, heads)
                fractions, fields = roofline(stored[0].numel() * dtype.itemsize, seconds)
                kind = "half" if dtype == torch.float16 else "e4m3"
                report.row(
                    f"D={size:<4d}{heads:3d}/{key_heads} heads  B={batch:<3d} L={length:<6d} {kind} "
                    f"{seconds * 1e6:8.1f} {fractions}  {error:.1e}",
                    what="attention",
                    size=size,
                    heads=heads,
                    key_heads=key_heads,
                    batch=batch,
                    length=length,
                    kind=kind,
                    us=seconds * 1e6,
                    error=error,
                    **fields,
                )
                del stored


def time_attention(stored: list[torch.Tensor], batch: int, length: int, heads: int) -> tuple[float, float]:
    """(seconds, relative error) of one decode step over the caches [2, blocks, 16, key heads, D]."""
    _, blocks, _, key_heads, size = stored[0].shape
    table = torch.randperm(blocks, device=DEVICE).int().view(batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, heads, size, device=DEVICE).half()
    out = torch.full_like(q, NAN)

    def run(i: int) -> None:
        k, v = stored[i % len(stored)]
        attention.paged_decode(out, q, k, v, table, lengths, length, size**-0.5, 0, 1.0, 1.0)

    poison()
    run(0)
    want = attention64(q, stored[0], table, length, heads // key_heads)
    error = check(out[-1], want, 3e-3, f"attention {size} {heads} {key_heads}")
    return replay_s(run, 2 * len(stored)), error


def bench_prefill_attention(report: Report, _: Roofline) -> None:
    report.line(
        "\nPrefill attention, causal, one sequence: microseconds; torch's scaled_dot_product_attention"
    )
    for size, heads, key_heads in ATTENTION:
        for length in (2048, 8192):
            cache = next(caches(1, length, key_heads, size, torch.float16))
            table = torch.randperm(length // 16, device=DEVICE).int().view(1, -1)
            lengths = torch.full((1,), length, dtype=torch.int32, device=DEVICE)
            starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
            q = torch.randn(length, heads, size, device=DEVICE).half()
            out = torch.full_like(q, NAN)
            args = (q, cache[0], cache[1], table, lengths, starts, length, size**-0.5, 0, 1.0, 1.0)
            poison()
            attention.paged_prefill(out, *args)
            error = check(
                out[-1], attention64(q[-1:], cache, table, length, heads // key_heads), 3e-3, "prefill"
            )
            ours = replay_s(lambda _, o=out, a=args: attention.paged_prefill(o, *a), 2)
            k, v = (c[table[0].long()].flatten(0, 1).transpose(0, 1)[None].contiguous() for c in cache)
            group = heads // key_heads
            dense = (
                q.transpose(0, 1)[None].contiguous(),
                k.repeat_interleave(group, 1),
                v.repeat_interleave(group, 1),
            )
            theirs = replay_s(
                lambda _, d=dense: torch.nn.functional.scaled_dot_product_attention(*d, is_causal=True), 2
            )
            tflops = 2 * length * length * heads * size / ours / 1e12
            report.row(
                f"D={size:<4d}{heads:3d}/{key_heads} heads  L={length:<6d} {ours * 1e6:8.1f}  {tflops:6.1f} TFLOP/s"
                f"  torch {theirs * 1e6:8.1f}  {error:.1e}",
                what="prefill attention",
                size=size,
                heads=heads,
                key_heads=key_heads,
                length=length,
                us=ours * 1e6,
                tflops=tflops,
                torch_us=theirs * 1e6,
                error=error,
            )


def bench_half(report: Report, roofline: Roofline) -> None:
    report.line(
        "\nFloat16 matrix, few rows: microseconds (fraction of copy bandwidth, of a plain read); cuBLAS"
    )
    for name, (n, k) in HALF.items():
        count = max(4, min(30, int(ROTATE_BYTES / (n * k * 2))))
        weights = [torch.randn(n, k, device=DEVICE).half() for _ in range(count)]
        for m in (1, 2, 4, 8):
            x = torch.randn(m, k, device=DEVICE).half()
            poison()
            error = check(
                linear.half_matmul(x, weights[0], None), x.double() @ weights[0].double().T, 2e-3, "half"
            )
            ours = replay_s(lambda i, x=x, w=weights: linear.half_matmul(x, w[i], None), count)
            theirs = replay_s(lambda i, x=x, w=weights: torch.mm(x, w[i].t()), count)
            fractions, fields = roofline(n * k * 2, ours)
            report.row(
                f"{name:33s} {n:6d}x{k:<6d} M={m:<3d} {ours * 1e6:8.1f} {fractions}"
                f"  cuBLAS {theirs * 1e6:8.1f}  {error:.1e}",
                what="half",
                name=name,
                n=n,
                k=k,
                m=m,
                us=ours * 1e6,
                cublas_us=theirs * 1e6,
                error=error,
                **fields,
            )


def bench_selection(report: Report, _: Roofline) -> None:
    report.line("\nPlaces of the 512 largest of rows in float32, unordered: microseconds; torch.topk alone")
    for rows, columns in SELECTION:
        x = torch.randn(rows, columns, device=DEVICE)
        lengths = torch.full((rows,), columns, dtype=torch.int32, device=DEVICE)
        places = torch.full((rows, 512), -7, dtype=torch.int32, device=DEVICE)
        poison()
        glue.topk_rows(x, lengths, places)
        if not torch.equal(places.long(), x.topk(512).indices.sort().values):
            raise SystemExit(f"topk_rows: wrong places of {rows} x {columns}")
        ours = replay_s(lambda i, x=x, n=lengths, p=places: glue.topk_rows(x, n, p), 4)
        theirs = replay_s(lambda i, x=x: x.topk(512, sorted=False), 4)
        report.row(
            f"{rows:6d} rows of {columns:6d} {ours * 1e6:8.1f}  torch.topk {theirs * 1e6:8.1f}",
            what="selection",
            rows=rows,
            columns=columns,
            us=ours * 1e6,
            torch_us=theirs * 1e6,
        )


BENCHES: dict[str, Callable[[Report, Roofline], None]] = {
    "linear": bench_linear,
    "prefill": bench_prefill,
    "moe": bench_moe,
    "attention": bench_attention,
    "prefill-attention": bench_prefill_attention,
    "half": bench_half,
    "selection": bench_selection,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="result files without their ending")
    parser.add_argument("--marlin", type=Path, help="vLLM's _C_stable_libtorch.abi3.so")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    args = parser.parse_args()
    reason = ops.why_unavailable() if torch.cuda.is_available() else "no CUDA device"
    if reason:
        print(f"kernels.py: {reason}", file=sys.stderr)
        return 1
    if args.marlin:
        marlin.load(args.marlin)
    report = Report(args.out, args.marlin is not None)
    bandwidth = copy_bandwidth()
    report.head["copy_bytes_a_second"] = bandwidth
    report.line(f"copy bandwidth: {bandwidth / 1e12:.2f} TB/s (read and written)")
    roofline = Roofline(bandwidth)
    for name in args.only:
        BENCHES[name](report, roofline)
        report.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
