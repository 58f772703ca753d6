"""The command line of `voltriton plan`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from voltriton.planner.advice import Advice, advise, profile, takes_fp8_cache
from voltriton.planner.cards import GIB, parse_cards
from voltriton.planner.files import ModelFiles, PlanError, read_model
from voltriton.planner.memory import Plan, Request, make_plan
from voltriton.planner.roofline import PRACTICAL, Roofline, roofline

BATCHES = (1, 8)
# A host keeps this much beside a table for loading, Triton and the page cache (trouble 45).
HOST_RESERVE_GIB = 16


def main(argv: list[str]) -> int:
    """0: it fits; 1: it does not, or cannot be planned; 2: wrong usage."""
    args = _parser().parse_args(argv)
    try:
        files = read_model(args.model)
        plan = make_plan(files, _request(args, files))
        rooflines = [found for batch in BATCHES if (found := roofline(files, plan, batch, args.lengths[0]))]
        advice = advise(files, plan)
        if args.write:
            _write(args.write, advice[0].plan if advice else plan)
    except PlanError as error:
        print(f"voltriton plan: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(as_dict(files, plan, rooflines, advice), indent=2))
    else:
        _print(files, plan, rooflines, advice)
    if not plan.fits:
        print(f"voltriton plan: does not fit: {_shortage(plan)}", file=sys.stderr)
    return 0 if plan.fits else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="voltriton plan", description="does a model fit on given cards?")
    parser.add_argument(
        "model", type=Path, help="a local folder with config.json (and safetensors files or their index)"
    )
    parser.add_argument(
        "--gpus", default="4xV100-32", help="such as 4xV100-32, H200, 2xCPU (default: 4xV100-32)"
    )
    parser.add_argument("--max-model-len", type=int, help="default: the model's own limit, at most 32768")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.90)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="fp8: e4m3 bytes (default: auto)"
    )
    parser.add_argument("--cpu-kv-gib", type=float, default=1.0, help="VLLM_CPU_KVCACHE_SPACE, for CPU only")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=(2048, 8192, 32768),
        help="context lengths to count sequences for",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a profile with the planned numbers")
    return parser


def _request(args: argparse.Namespace, files: ModelFiles) -> Request:
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise PlanError(f"--{name.replace('_', '-')}: got {value}, at least 1 is allowed")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise PlanError(
            f"--gpu-memory-utilization: got {args.gpu_memory_utilization}, more than 0 and at most 1 is allowed"
        )
    if min(args.lengths) < 1:
        raise PlanError(f"--lengths: got {min(args.lengths)}, at least 1 is allowed")
    own_limit = files.config.number("max_position_embeddings", 32768)
    cards = parse_cards(args.gpus)
    if args.kv_cache_dtype == "fp8" and not takes_fp8_cache(files, cards):
        raise PlanError(
            f"--kv-cache-dtype: got fp8 for {files.config.model_type} on {cards.card.name}, whose attention is "
            "Triton's there, which has no fp8 below compute capability 8.9; auto is allowed"
        )
    return Request(
        cards=cards,
        max_model_len=args.max_model_len or min(own_limit, 32768 if cards.card.usable_gib else 2048),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        kv_bytes=1 if args.kv_cache_dtype == "fp8" else None,
        cpu_kv_gib=args.cpu_kv_gib,
        lengths=tuple(args.lengths),
        # Without a GPU our plugin expands NVFP4 at load.
        expand=not cards.card.usable_gib,
    )


def as_dict(files: ModelFiles, plan: Plan, rooflines: list[Roofline], advice: list[Advice]) -> dict[str, Any]:
    cache = plan.cache
    return {
        "model": str(files.folder),
        "model_type": files.config.model_type,
        "cards": {"count": plan.ranks, "name": plan.request.cards.card.name},
        "known_architecture": plan.known,
        "bytes_per_rank": {
            **plan.parts,
            "weights": plan.weights,
            "graphs": plan.graphs,
            "kv_cache": max(0, plan.left),
        },
        "host_bytes": plan.host,
        "budget_bytes": plan.budget,
        "kv_cache": None
        if cache is None
        else {
            "blocks": cache.blocks(plan.left),
            "block_tokens": cache.block_tokens,
            "tokens": plan.kv_tokens,
            "bytes_per_token": cache.block_bytes / cache.block_tokens,
            "state_bytes_per_sequence": cache.state_bytes,
        },
        "sequences": {}
        if cache is None
        else {str(n): cache.sequences(plan.left, n) for n in plan.request.lengths},
        "roofline": [
            {
                "batch": r.batch,
                "context": r.context,
                "bytes_per_step": r.bytes_per_step,
                "tokens_per_s": round(r.tokens_per_s, 1),
                "practical_tokens_per_s": round(r.practical_tokens_per_s, 1),
            }
            for r in rooflines
        ],
        "fits": plan.fits,
        "advice": [{"change": item.text, "kv_tokens": item.plan.kv_tokens} for item in advice],
        "notes": list(plan.notes),
    }


def _print(files: ModelFiles, plan: Plan, rooflines: list[Roofline], advice: list[Advice]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    card = plan.request.cards.card
    console.print(
        f"{files.folder.name or files.folder} ({files.config.model_type}) on {plan.ranks} x {card.name}"
    )
    for name, size in plan.parts.items():
        console.print(f"  {name:14} {size / GIB:8.2f} GiB a rank")
    console.print(
        f"  {'budget':14} {plan.budget / GIB:8.2f} GiB a rank; left for the KV cache {plan.left / GIB:.2f}"
    )
    if plan.graphs:
        console.print(
            f"  {'graphs':14} {plan.graphs / GIB:8.2f} GiB beside the budget "
            f"({(plan.outside + plan.graphs) / GIB:.2f} there)"
        )
    for name, size in plan.host.items():
        console.print(
            f"  {name}: {size / GIB:.1f} GiB in the host's memory, {size / GIB + HOST_RESERVE_GIB:.0f} GiB at least"
        )
    if plan.cache is not None:
        console.print(f"  KV cache: {plan.kv_tokens} tokens in blocks of {plan.cache.block_tokens}")
        if plan.cache.state_bytes:
            state_mib = plan.cache.state_bytes / (1 << 20)
            console.print(
                f"  recurrent state: {state_mib:.1f} MiB a sequence and rank, out of the same memory"
            )
        counts = ", ".join(f"{plan.cache.sequences(plan.left, n)} of {n}" for n in plan.request.lengths)
        console.print(f"  sequences at once, if each is that long: {counts}")
    for item in rooflines:
        console.print(
            f"  roofline, batch {item.batch}, {item.context} tokens of context: {item.tokens_per_s:.0f} "
            f"tokens/s at the "
            f"data sheet's bandwidth, {item.practical_tokens_per_s:.0f} at {PRACTICAL:.0%} of it"
        )
    for note in plan.notes:
        console.print(f"  note: {note}")
    console.print("[green]fits[/]" if plan.fits else "[red]does not fit[/]")
    for number, change in enumerate(advice, 1):
        tokens = f": then {change.plan.kv_tokens} tokens" if change.plan.kv_tokens is not None else ""
        console.print(f"  {number}. {change.text}{tokens}")


def _shortage(plan: Plan) -> str:
    if plan.left <= 0:
        return f"weights and activations need {-plan.left / GIB:.1f} GiB a rank more than there is"
    if plan.outside < 0:
        return f"the graphs need {-plan.outside / GIB:.1f} GiB a rank more beside gpu_memory_utilization"
    return f"the KV cache holds {plan.kv_tokens} tokens, max_model_len is {plan.request.max_model_len}"


def _write(path: Path, plan: Plan) -> None:
    try:
        path.write_text(json.dumps(profile(plan), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--write {path}: {error.strerror or error}") from None
