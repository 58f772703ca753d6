"""Which weights of which architecture are quantised; the facts, with reasons, are in architectures.json."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

from voltriton.checkpoint.codec import BLOCK
from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.tensors import Spec


@dataclass(frozen=True)
class Architecture:
    """`keep`: (pattern over module names, reason); `fused`: leaf names that vLLM loads as one layer;
    `split_experts`: the source stacks all experts in `experts.gate_up_proj` and `experts.down_proj`."""

    name: str
    keep: tuple[tuple[str, str], ...]
    fused: tuple[tuple[str, ...], ...]
    split_experts: bool

    def reason_to_keep(self, module: str) -> str | None:
        return next((reason for pattern, reason in self.keep if fnmatchcase(module, pattern)), None)

    def group_of(self, module: str) -> str:
        """Modules with the same group share one global scale."""
        stem, _, leaf = module.rpartition(".")
        leaves = next((names for names in self.fused if leaf in names), (leaf,))
        return f"{stem}.{'|'.join(leaves)}"


@functools.cache
def _table() -> dict[str, Any]:
    text = files("voltriton.checkpoint").joinpath("architectures.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def architecture_of(config: dict[str, Any]) -> Architecture:
    """By `model_type` of config.json (of its text part, if it has one)."""
    text = config.get("text_config") or {}
    names = [str(text.get("model_type")), str(config.get("model_type"))]
    known = sorted(set(_table()) - {"every"})
    name = next((n for n in names if n in known), None)
    if name is None:
        asked = config.get("model_type")
        raise CheckpointError(f"architecture {asked!r} is not known here; known are {', '.join(known)}")
    rows = (_table()["every"], _table()[name])
    keep = tuple((k["pattern"], k["reason"]) for row in rows for k in row.get("keep", ()))
    fused = tuple(tuple(group) for row in rows for group in row.get("fused", ()))
    return Architecture(name, keep, fused, bool(_table()[name].get("split_experts")))


@dataclass(frozen=True)
class Choice:
    """Modules to quantise, by fused group, and those kept with the reason."""

    groups: dict[str, list[str]]
    kept: dict[str, str]


def choose(specs: dict[str, Spec], arch: Architecture, include: list[str], exclude: list[str]) -> Choice:
    """Sort the matrices. `include` and `exclude` are patterns over module names and win over the table."""
    groups: dict[str, list[str]] = {}
    kept: dict[str, str] = {}
    matrices = {
        name.removesuffix(".weight"): spec
        for name, spec in specs.items()
        if name.endswith(".weight") and len(spec.shape) >= 2
    }
    for option, patterns in (("--include", include), ("--exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(module, pattern) for module in matrices):
                raise CheckpointError(
                    f"{option}: {pattern!r} matches no matrix: it is a pattern of shell kind (* ? [...]) over whole "
                    f"names such as {next(iter(matrices), 'none, there are no matrices')}"
                )
    for module, spec in matrices.items():
        reason = _reason(module, arch, include, exclude)
        if reason is not None:
            kept[module] = reason
            continue
        if len(spec.shape) != 2 or spec.shape[1] % BLOCK:
            shape = "x".join(map(str, spec.shape))
            raise CheckpointError(
                f"{module}.weight is {shape}: only matrices whose input side is a multiple of {BLOCK} can be NVFP4; "
                f"keep it with --exclude '{module}'"
            )
        groups.setdefault(arch.group_of(module), []).append(module)
    if not groups:
        raise CheckpointError("nothing to quantise: every matrix is kept (look at --include and --exclude)")
    return Choice(groups, kept)


def _reason(module: str, arch: Architecture, include: list[str], exclude: list[str]) -> str | None:
    if any(fnmatchcase(module, p) for p in exclude):
        return "--exclude"
    if any(fnmatchcase(module, p) for p in include):
        return None
    return arch.reason_to_keep(module)
