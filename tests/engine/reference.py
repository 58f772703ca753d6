"""An engine's logits beside those of Hugging Face in float32 over the same tokens, also for a converted checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Router logits closer than this may swap two experts in float16 (values of a few units have steps of 1e-3 there).
NEAR = 0.01


@dataclass(frozen=True)
class Comparison:
    """Positions of all prompts and answers; `decided` are those before a sequence's first near-tie of a router."""

    positions: int
    decided: int
    deviation: float  # of the reference's logits
    largest: float
    largest_decided: float
    margin: float  # of the routers, at the position of `largest_decided`
    mean: float
    same_choice: float
    same_choice_decided: float
    finite: bool

    def __str__(self) -> str:
        return (
            f"{self.positions} positions, {self.decided} before a near-tie; largest difference {self.largest:.2e}, "
            f"before a near-tie {self.largest_decided:.2e} (its routers' margin {self.margin:.3f}), mean {self.mean:.2e} (logits' standard deviation "
            f"{self.deviation:.2f}); same choice {self.same_choice:.3f}, before a near-tie "
            f"{self.same_choice_decided:.3f}"
        )


@contextmanager
def _e4m3_cache() -> Iterator[None]:
    """Keys and values are rounded as in a cache of e4m3 bytes."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def rounded(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kw: Any,
    ) -> Any:
        key, value = (t.half().to(torch.float8_e4m3fn).to(t.dtype) for t in (key, value))
        return attend(module, query, key, value, *args, **kw)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = rounded
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attend


def compare(
    model: Path, prompts: list[str], found: dict[str, Any], e4m3_cache: bool = False, near: float = NEAR
) -> Comparison:
    """found: as `logits.py` writes it. A choice counts as another if its logit is behind by more than the difference.

    near: what is a near-tie of a router. e4m3_cache: the reference's keys and values are rounded like the engine's.
    """
    with _e4m3_cache() if e4m3_cache else nullcontext():
        return _compare(model, prompts, found, near)


def _compare(model: Path, prompts: list[str], found: dict[str, Any], near: float) -> Comparison:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    margins = _watch_routers(network)
    wants, gots, decided, nearest, first = [], [], [], [], 0
    for prompt, tokens, steps in zip(prompts, found["tokens"], found["steps"], strict=True):
        ids = tokenizer(prompt)["input_ids"]
        margins.clear()
        with torch.inference_mode():
            wants.append(network(torch.tensor([ids + tokens[:-1]])).logits[0].float())
        gots.append(torch.cat([found["logits"][first : first + len(ids) - 1], steps]))
        first += len(ids) - 1
        nearest.append(torch.full((len(wants[-1]),), torch.inf))
        for margin in margins:
            nearest[-1] = nearest[-1].minimum(margin)
        decided.append((nearest[-1] < near).cumsum(0) == 0)
    return _summary(*(torch.cat(parts) for parts in (wants, gots, decided, nearest)))


def _watch_routers(network: torch.nn.Module) -> list[torch.Tensor]:
    """Distance of the last chosen router logit from the first one left out, [tokens] a layer, at each forward pass."""
    margins: list[torch.Tensor] = []
    chosen = getattr(network.config, "num_experts_per_tok", 0)

    def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        best = torch.nn.functional.linear(hidden, module.weight).topk(chosen + 1, dim=-1).values
        margins.append(best[:, -2] - best[:, -1])

    for name, module in network.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(hook)
    return margins


def _summary(
    want: torch.Tensor, got: torch.Tensor, decided: torch.Tensor, nearest: torch.Tensor
) -> Comparison:
    difference = (got - want).abs().amax(-1)
    # The reference's value of what was chosen, against its best: the same choice but for rounding of both.
    behind = want.amax(-1) - want.gather(-1, got.argmax(-1, keepdim=True))[:, 0]
    same = behind <= 2 * difference.clamp_max(0.1)
    return Comparison(
        positions=len(want),
        decided=int(decided.sum()),
        deviation=float(want.std()),
        largest=float(difference.max()),
        largest_decided=float(difference[decided].max()) if bool(decided.any()) else 0.0,
        margin=float(nearest[(difference * decided).argmax()]),
        mean=float((got - want).abs().mean()),
        same_choice=float((got.argmax(-1) == want.argmax(-1)).float().mean()),
        same_choice_decided=float(same[decided].float().mean()),
        finite=bool(got.isfinite().all()),
    )


def with_the_same_numbers(checkpoint: Path, base: Path, out: Path) -> Path:
    """A float32 folder of what an NVFP4 checkpoint of `base` says."""
    from safetensors.torch import load_file, save_file
    from voltriton.checkpoint.source import Source

    made = Source(checkpoint)
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors"))
    matrices = {name: made.matrix(name) for name in load_file(base / "model.safetensors")}
    tensors = {name: m.rows(0, m.spec.shape[0]) for name, m in matrices.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
