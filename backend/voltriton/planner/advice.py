"""The smallest changes that make a model fit, tried one by one and then together; and the profile that follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from voltriton.planner.cache import e4m3_on_volta
from voltriton.planner.cards import Cards
from voltriton.planner.files import ModelFiles, PlanError
from voltriton.planner.layout import weights
from voltriton.planner.memory import Plan, Request, changed, make_plan
from voltriton.planner.quantization import is_nvfp4

PROFILES = Path(__file__).parents[1] / "profiles"


@dataclass(frozen=True)
class Advice:
    text: str
    plan: Plan


Change = Callable[[ModelFiles, Plan], "tuple[str, Request] | None"]


def advise(files: ModelFiles, plan: Plan, limit: int = 3) -> list[Advice]:
    """Each of the result fits, with as few changes as possible; the cheapest first. Empty when nothing here helps."""
    if plan.fits:
        return []
    for size in range(1, len(CHANGES) + 1):
        found = [item for chosen in combinations(CHANGES, size) if (item := _apply(files, plan, chosen))]
        if found:
            return found[:limit]
    return []


def _apply(files: ModelFiles, plan: Plan, changes: tuple[Change, ...]) -> Advice | None:
    """The shorter context comes last: how much is left depends on the other changes."""
    texts = []
    for change in sorted(changes, key=lambda change: change is _shorter):
        proposal = change(files, plan)
        if proposal is None:
            return None
        texts.append(proposal[0])
        try:
            plan = make_plan(files, proposal[1])
        except PlanError:
            return None
    return Advice(", and ".join(texts), plan) if plan.fits else None


def _shorter(files: ModelFiles, plan: Plan) -> tuple[str, Request] | None:
    """The longest context that fits, if it is of any use."""
    if plan.cache is None or plan.left <= 0:
        return None
    blocks = plan.cache.blocks(plan.left) - 1 - plan.cache.state_blocks
    length = min(blocks * plan.cache.block_tokens // 1024 * 1024, plan.request.max_model_len)
    if not 1024 <= length < plan.request.max_model_len:
        return None
    return f"max_model_len {length} instead of {plan.request.max_model_len}", changed(
        plan.request, max_model_len=length
    )


def _fuller(files: ModelFiles, plan: Plan) -> tuple[str, Request] | None:
    if not plan.request.cards.card.usable_gib or plan.request.gpu_memory_utilization >= 0.95:
        return None
    return "gpu_memory_utilization 0.95", changed(plan.request, gpu_memory_utilization=0.95)


def takes_fp8_cache(files: ModelFiles, cards: Cards) -> bool:
    return cards.card.profile != "v100-tp4" or e4m3_on_volta(files.config)


def _narrower_cache(files: ModelFiles, plan: Plan) -> tuple[str, Request] | None:
    cards = plan.request.cards
    if plan.request.kv_bytes or not cards.card.usable_gib or not takes_fp8_cache(files, cards):
        return None
    return "kv_cache_dtype fp8 (compare the answers first)", changed(plan.request, kv_bytes=1)


def _smaller_steps(files: ModelFiles, plan: Plan) -> tuple[str, Request] | None:
    if plan.request.max_num_batched_tokens <= 1024:
        return None
    return "max_num_batched_tokens 1024", changed(plan.request, max_num_batched_tokens=1024)


def _eager(files: ModelFiles, plan: Plan) -> tuple[str, Request] | None:
    if plan.request.enforce_eager or plan.outside >= 0:
        return None
    return "enforce_eager true (slower decode)", changed(plan.request, enforce_eager=True)


def _quantized(files: ModelFiles, plan: Plan) -> tuple[str, Request] | None:
    if not plan.known or is_nvfp4(files) or plan.request.expand or weights(files.config) is None:
        return None
    return "convert the weights to NVFP4 (`voltriton convert`)", changed(plan.request, quantize=True)


def _more_cards(files: ModelFiles, plan: Plan) -> tuple[str, Request] | None:
    count = 2 * plan.request.cards.count
    if count > 16:
        return None
    return f"{count} cards instead of {count // 2}", changed(
        plan.request, cards=Cards(count, plan.request.cards.card)
    )


CHANGES: tuple[Change, ...] = (
    _shorter,
    _smaller_steps,
    _fuller,
    _eager,
    _narrower_cache,
    _quantized,
    _more_cards,
)


def profile(plan: Plan) -> dict[str, Any]:
    """The card's profile with this plan's numbers, in the form of `profiles/*.json`."""
    base: dict[str, Any] = json.loads(
        (PROFILES / f"{plan.request.cards.card.profile}.json").read_text(encoding="utf-8")
    )
    request = plan.request
    values: dict[str, tuple[Any, str]] = {
        "tensor_parallel_size": (
            request.cards.count,
            f"planned for {request.cards.count} x {request.cards.card.name}",
        ),
        "max_model_len": (request.max_model_len, _length_reason(plan)),
        "max_num_seqs": (request.max_num_seqs, "as asked of `voltriton plan`"),
        "max_num_batched_tokens": (
            request.max_num_batched_tokens,
            "as asked of `voltriton plan`: bounds a step's activations",
        ),
    }
    if request.cards.card.usable_gib:
        values["gpu_memory_utilization"] = (
            request.gpu_memory_utilization,
            f"planned: {plan.left / 2**30:.1f} GiB a rank for the KV cache",
        )
    else:
        base["env"]["VLLM_CPU_KVCACHE_SPACE"] = {
            "value": f"{request.cpu_kv_gib:g}",
            "reason": "GiB of KV cache, as planned",
        }
    if request.kv_bytes:
        values["kv_cache_dtype"] = ("fp8", "as asked of `voltriton plan`: e4m3 bytes, half of the memory")
    if request.enforce_eager:
        values["enforce_eager"] = (True, "as asked of `voltriton plan`")
    base["engine"].update(
        {name: {"value": value, "reason": reason} for name, (value, reason) in values.items()}
    )
    return base


def _length_reason(plan: Plan) -> str:
    if plan.kv_tokens is None:
        return "as asked of `voltriton plan`; the KV cache of this architecture is not planned"
    return f"planned: the KV cache holds {plan.kv_tokens} tokens"
