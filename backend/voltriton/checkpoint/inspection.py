"""Is a folder a whole and sound NVFP4 checkpoint? Every check looks at all tensors and names the first fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from voltriton.checkpoint.codec import BLOCK
from voltriton.checkpoint.convert import row_ranges
from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.layers import FAMILIES, empty_model
from voltriton.checkpoint.source import SIXTEEN_BIT, Nvfp4, Source
from voltriton.checkpoint.texts import load_tokenizer

TENSOR_PARALLEL = (1, 2, 4, 8)
# Split by input columns over the ranks, all others by output rows (vLLM's RowParallelLinear).
ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "w2")


@dataclass(frozen=True)
class Check:
    """`fault` is empty when all is well; `note` says what was found."""

    name: str
    fault: str = ""
    note: str = ""


def inspect(folder: Path) -> tuple[Source | None, list[Check]]:
    """The checkpoint, if it can be read at all, and what was checked."""
    try:
        source = Source(folder)
        if source.rule is None:
            raise CheckpointError(f"{folder} is no NVFP4 checkpoint")
    except CheckpointError as error:
        return None, [Check("files and configuration", fault=str(error))]
    layout = f"{source.rule}, {len(source.nvfp4)} quantised matrices, {len(source.weights)} other tensors"
    checks = [Check("files and configuration", note=layout)]
    steps: list[tuple[str, Callable[[Source], str]]] = [
        ("shapes and dtypes", _shapes),
        ("scales", _scales),
        ("16-bit tensors", _finite),
        ("ignore list", _ignore_list),
        ("complete", complete),
        ("tokenizer and template", _tokenizer),
    ]
    for name, step in steps:
        try:
            checks.append(Check(name, note=step(source)))
        except CheckpointError as error:
            checks.append(Check(name, fault=str(error)))
    return source, checks


def _shapes(source: Source) -> str:
    for module, w in source.nvfp4.items():
        rows, half = w.packed.spec.shape
        if w.scale.spec.shape != (rows, half * 2 // BLOCK) or half * 2 % BLOCK:
            raise CheckpointError(
                f"{module}: scales {w.scale.spec.shape} do not fit weights {(rows, half * 2)}"
            )
        if w.scale.spec.dtype is not torch.float8_e4m3fn:
            raise CheckpointError(f"{module}: block scales are {w.scale.spec.dtype}, not float8_e4m3fn")
        for scalar in (w.global_scale, w.input_scale):
            if scalar is not None and (scalar.spec.nbytes != 4 or scalar.spec.dtype is not torch.float32):
                raise CheckpointError(
                    f"{scalar.spec.name}: {scalar.spec.shape} {scalar.spec.dtype}, not one float32"
                )
    with_input = sum(w.input_scale is not None for w in source.nvfp4.values())
    if with_input not in (0, len(source.nvfp4)):
        raise CheckpointError(
            f"{with_input} of {len(source.nvfp4)} matrices have an input scale: all or none must"
        )
    return "W4A4" if with_input else "W4A16"


def _scales(source: Source) -> str:
    count = 0
    for module, w in source.nvfp4.items():
        for scalar in (w.global_scale, w.input_scale):
            value = 1.0 if scalar is None else float(scalar.rows().reshape(()))
            if not 0 < value < float("inf"):
                raise CheckpointError(
                    f"{module}: a global or input scale is {value}, not finite and positive"
                )
        for begin, end in row_ranges(w):
            scale = w.scale.rows(begin, end).float()
            bad = ~(scale > 0)  # NaN too
            if bad.any():
                row, block = (int(i) for i in bad.nonzero()[0])
                value = scale[row, block].item()
                raise CheckpointError(f"{module}: the scale of row {begin + row}, block {block} is {value}")
            count += scale.numel()
    return f"{count} block scales, all finite and positive"


def _finite(source: Source) -> str:
    for name, weight in source.weights.items():
        if weight.spec.dtype not in SIXTEEN_BIT or not weight.spec.shape:
            continue
        rows = weight.spec.shape[0]
        size = max((1 << 22) // max(weight.spec.row_bytes, 1), 1)
        for begin in range(0, rows, size):
            if not torch.isfinite(weight.rows(begin, min(begin + size, rows))).all():
                raise CheckpointError(f"{name} has NaN or infinite values")
    return "all finite"


def _ignore_list(source: Source) -> str:
    ignore = [
        str(p) for p in source.quantisation.get("ignore", source.quantisation.get("exclude_modules", []))
    ]
    for module in source.nvfp4:
        if any(_matches(module, p) for p in ignore):
            raise CheckpointError(f"{module} is quantised but in the ignore list")
    for name, weight in source.weights.items():
        module = name.removesuffix(".weight")
        linear = len(weight.spec.shape) == 2 and name.endswith("_proj.weight")
        if linear and not any(_matches(module, p) for p in ignore):
            raise CheckpointError(
                f"{module} is not quantised and not in the ignore list: loaders would refuse it"
            )
    return f"{len(ignore)} entries, agree with the tensors"


def _matches(module: str, pattern: str) -> bool:
    import re

    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern) or module.startswith(pattern + ".")


def complete(source: Source) -> str:
    """Names and shapes against the parameters that transformers gives this configuration."""
    family = str(source.config.get("model_type"))
    if family not in FAMILIES:
        return f"not compared with the model's code (family {family})"
    want = {name: tuple(p.shape) for name, p in empty_model(source).named_parameters()}
    have = {name: w.spec.shape for name, w in source.weights.items()}
    have |= {f"{module}.weight": w.spec.shape for module, w in source.nvfp4.items()}
    for name, shape in want.items():
        if name not in have:
            raise CheckpointError(f"{name} is missing")
        if have[name] != shape:
            raise CheckpointError(f"{name} has shape {have[name]}, the configuration says {shape}")
    extra = sorted(set(have) - set(want) - {"lm_head.weight"})
    if extra:
        raise CheckpointError(f"{extra[0]} belongs to no part of the model")
    return f"all {len(want)} parameters of the configuration are there"


def _tokenizer(source: Source) -> str:
    tokenizer = load_tokenizer(source.path)
    rows = source.config.get("vocab_size") or (source.config.get("text_config") or {}).get("vocab_size", 0)
    if len(tokenizer) > rows:
        raise CheckpointError(f"the tokenizer has {len(tokenizer)} tokens, the embedding {rows} rows")
    template = "with chat template" if tokenizer.chat_template else "NO chat template: completions only"
    return f"{len(tokenizer)} tokens, {template}"


@dataclass(frozen=True)
class Parallel:
    """Whether the checkpoint can be split over `ranks`, and the first reason why not."""

    ranks: int
    fault: str


def tensor_parallel(source: Source) -> list[Parallel]:
    return [Parallel(n, next(_split_faults(source, n), "")) for n in TENSOR_PARALLEL]


def _split_faults(source: Source, ranks: int) -> Iterator[str]:
    config: dict[str, Any] = source.config.get("text_config") or source.config
    heads = int(config.get("num_attention_heads") or 0)
    if heads % ranks:
        yield f"{heads} attention heads are not divisible by {ranks}"
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if kv_heads % ranks and ranks % max(kv_heads, 1):
        yield f"{kv_heads} key-value heads neither divide nor are divided by {ranks}"
    for module, w in source.nvfp4.items():
        yield from _matrix_fault(module, w, ranks)


def _matrix_fault(module: str, weight: Nvfp4, ranks: int) -> Iterator[str]:
    rows, columns = weight.spec.shape
    leaf = module.rpartition(".")[2]
    if leaf in ROW_PARALLEL and columns % (ranks * BLOCK):
        yield f"{module}: {columns} columns cut over {ranks} ranks break a block of {BLOCK}"
    # k and v rows are copied, not cut, where there are fewer heads than ranks; heads are checked above.
    if leaf not in (*ROW_PARALLEL, "k_proj", "v_proj") and rows % ranks:
        yield f"{module}: {rows} rows are not divisible by {ranks}"
