"""With `--model` and `--profile`: does the model work here, does it fit, do the arguments suit the cards?"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from voltriton_vllm.formats import refusal

from voltriton.doctor.box import Box
from voltriton.doctor.checks_host import GIB, cgroup_limit
from voltriton.doctor.rows import FAIL, NOTE, OK, SKIP, WARN, Row, check
from voltriton.planner.cache import e4m3_on_volta
from voltriton.planner.cards import CARDS, Cards
from voltriton.planner.files import ModelFiles, PlanError, read_model
from voltriton.planner.memory import Plan, Request, make_plan
from voltriton.planner.quantization import is_nvfp4
from voltriton.settings import cpu_features, profile_value

PROFILES = Path(__file__).parents[1] / "profiles"
_DEFAULT_PROFILE = {"v100": "v100-tp4", "hopper": "hopper", "cpu": "cpu"}
# vLLM itself warns that their activations leave float16's range.
_OVERFLOWING = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")
_HOST_RESERVE = 16 * GIB
NO_MODEL = "not asked for (--model DIR)"


def engine_arguments(box: Box) -> dict[str, Any]:
    """Of the chosen profile. Raises ValueError for one that is not there."""
    name = box.options.profile or _DEFAULT_PROFILE[box.target]
    known = sorted(path.stem for path in PROFILES.glob("*.json"))
    if name not in known:
        raise ValueError(f"--profile: got {name!r}, there are {', '.join(known)}")
    data = json.loads((PROFILES / f"{name}.json").read_text(encoding="utf-8"))
    features = cpu_features(box.host.read("/proc/cpuinfo") or "")
    return {key: profile_value(entry, features) for key, entry in data["engine"].items()}


@lru_cache(maxsize=4)
def _read(folder: Path) -> ModelFiles:
    return read_model(folder)


def _plan(box: Box, files: ModelFiles) -> Plan:
    arguments = engine_arguments(box)
    card = {"v100": "V100-32", "hopper": "H200", "cpu": "CPU"}[box.target]
    if box.target == "v100" and box.gpus and box.gpus[0].total_mib < 20000:
        card = "V100-16"
    limit = files.config.number("max_position_embeddings", 32768)
    return make_plan(
        files,
        Request(
            Cards(box.options.gpus or arguments.get("tensor_parallel_size", 1), CARDS[card]),
            max_model_len=min(limit, arguments.get("max_model_len", limit)),
            max_num_seqs=arguments.get("max_num_seqs", 16),
            max_num_batched_tokens=arguments.get("max_num_batched_tokens", 2048),
            gpu_memory_utilization=arguments.get("gpu_memory_utilization", 0.9),
            enforce_eager=arguments.get("enforce_eager", False),
            expand=box.target == "cpu",
        ),
    )


@check("model.files", 44, 47, 62, 66)
def files(box: Box) -> Row:
    need = "config.json, and safetensors whose NVFP4 scales are all there"
    if box.options.model is None:
        return Row("model.files", SKIP, NO_MODEL, need)
    try:
        found = _read(box.options.model)
    except PlanError as error:
        return Row(
            "model.files",
            FAIL,
            str(error),
            need,
            "the engine would refuse it",
            "`voltriton fetch`, or copy it again",
        )
    if not is_nvfp4(found):
        return Row("model.files", OK, f"{found.config.model_type}, not NVFP4", need)
    lacking = [
        name
        for name in found.tensors
        if (
            name.endswith(".weight_packed")
            and name.replace("weight_packed", "weight_global_scale") not in found.tensors
        )
        or (
            name.endswith(".weight_scale")
            and found.tensors[name].dtype == "F8_E4M3"
            and len(found.tensors[name].shape) == 2
            and f"{name}_2" not in found.tensors
            and name.replace("weight_scale", "weight_global_scale") not in found.tensors
        )
    ]
    if lacking:
        return Row(
            "model.files",
            FAIL,
            f"{len(lacking)} matrices without a global scale, first {lacking[0]}",
            need,
            "the layer would use whatever is in memory (troubles 62 and 66)",
            "convert or download it again",
        )
    layout = (
        "compressed-tensors" if any(name.endswith("weight_packed") for name in found.tensors) else "ModelOpt"
    )
    return Row("model.files", OK, f"{found.config.model_type}, NVFP4 in the layout of {layout}", need)


@check("model.format", 11, 12, 61)
def quantisation(box: Box) -> Row:
    need = "16 bits or NVFP4"
    if box.options.model is None or box.target != "v100":
        return Row(
            "model.format", SKIP, NO_MODEL if box.options.model is None else "target is not v100", need
        )
    if box.software_part("vllm").get("distribution") == "revolta":
        return Row("model.format", SKIP, "ReVolta has kernels and a list of its own", need)
    try:
        files = _read(box.options.model)
    except PlanError:
        return Row("model.format", SKIP, "see model.files", need)
    given = files.config.quantization
    if not given or is_nvfp4(files):
        return Row("model.format", OK, "NVFP4" if given else "not quantised", need)
    name = str(given.get("quant_method") or given.get("quant_algo") or "unknown").lower()
    why = refusal(name, 70) or f"{name} other than NVFP4 has no kernel for compute capability 7.0"
    return Row(
        "model.format",
        FAIL,
        name,
        need,
        why.partition("; ")[0],
        "the 16-bit original, by `voltriton convert`",
    )


@check("model.range", 54, 55, 70)
def number_range(box: Box) -> Row:
    if box.options.model is None or box.target != "v100":
        return Row(
            "model.range",
            SKIP,
            NO_MODEL if box.options.model is None else "no float16 here",
            "within float16's range",
        )
    try:
        kind = _read(box.options.model).config.model_type
    except PlanError:
        return Row("model.range", SKIP, "see model.files", "within float16's range")
    if kind in _OVERFLOWING:
        return Row(
            "model.range",
            FAIL,
            kind,
            "within float16's range",
            "its activations overflow float16: '!!!!' or NaN",
            "another model, or dtype float32 (twice the memory)",
        )
    return Row("model.range", OK, kind, "within float16's range", "", "`voltriton verify` measures it")


@check("model.memory", 42, 43, 44, 46, 50, 51, 52, 53)
def memory(box: Box) -> Row:
    if box.options.model is None:
        return Row("model.memory", SKIP, NO_MODEL, "weights, activations and one sequence fit")
    need = "weights, activations and one sequence of max_model_len fit"
    try:
        plan = _plan(box, _read(box.options.model))
    except (PlanError, ValueError) as error:
        return Row("model.memory", FAIL, str(error), need, "", "`voltriton plan` says more")
    left = f"{plan.weights / GIB:.1f} GiB of weights a rank, {plan.left / GIB:.1f} GiB left for the KV cache"
    tokens = f" ({plan.kv_tokens} tokens)" if plan.kv_tokens is not None else ""
    if not plan.fits:
        return Row(
            "model.memory",
            FAIL,
            left + tokens,
            need,
            "the start ends out of memory or with 'no available memory for the cache blocks'",
            f"`voltriton plan {box.options.model}` lists the smallest changes",
        )
    return Row("model.memory", OK, left + tokens, need)


@check("model.host_table", 45, 46, 47, 48)
def host_table(box: Box) -> Row:
    need = "the n-gram table + 16 GiB of host memory"
    if box.options.model is None:
        return Row("model.host_table", SKIP, NO_MODEL, need)
    try:
        size = sum(_plan(box, _read(box.options.model)).host.values())
    except (PlanError, ValueError):
        return Row("model.host_table", SKIP, "see model.files", need)
    if not size:
        return Row("model.host_table", OK, "the model has none", need)
    text = box.host.read("/proc/meminfo") or ""
    total = next(
        (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemTotal")), 0
    )
    usable = min(total, cgroup_limit(box) or total)
    found = f"a table of {size / GIB:.1f} GiB, {usable / GIB:.1f} GiB of memory"
    if usable < size + _HOST_RESERVE:
        return Row(
            "model.host_table",
            FAIL,
            found,
            need,
            "the host runs out of memory at load or at the first prompt",
            "a checkpoint whose table is fp8 or NVFP4, or more memory",
        )
    return Row("model.host_table", OK, found, need)


@check("profile.arguments", 1, 24, 27, 38, 39, 43, 68, 69, 71, 76, 77, 78, 84)
def arguments(box: Box) -> list[Row] | Row:
    """What the profile says against what these cards can do."""
    name = box.options.profile or _DEFAULT_PROFILE[box.target]
    try:
        found = engine_arguments(box)
    except ValueError as error:
        return Row("profile.arguments", FAIL, str(error), "a profile of backend/voltriton/profiles")
    rows = [row for row in _argument_rows(box, found) if row]
    return rows or Row("profile.arguments", OK, f"{name} suits {box.target}", "arguments that work here")


def _cache_trouble(box: Box, wanted: str) -> tuple[str, str, str, str]:
    """What speaks against a KV cache of fp8 on Volta."""
    if wanted not in ("fp8", "fp8_e4m3"):
        return FAIL, "kv_cache_dtype", "auto or fp8", "our attention kernels read e4m3 bytes (trouble 69)"
    if not _reads_e4m3(box):
        return FAIL, "kv_cache_dtype", "auto", "this model's attention is Triton's, whose fp8 needs 8.9"
    return WARN, "kv_cache_dtype", "auto", "e4m3 keeps 4 of 11 significant bits: compare the answers first"


def _reads_e4m3(box: Box) -> bool:
    try:
        return box.options.model is None or e4m3_on_volta(_read(box.options.model).config)
    except PlanError:
        return True  # model.files says what is wrong with it


def _argument_rows(box: Box, found: dict[str, Any]) -> list[Row | None]:
    def row(status: str, name: str, need: str, why: str) -> Row:
        return Row(
            "profile.arguments",
            status,
            f"{name} {found.get(name)!r}",
            need,
            why,
            "model.json or another profile",
        )

    volta = box.target == "v100"
    graphs = (found.get("compilation_config") or {}).get("cudagraph_capture_sizes") or []
    ranks = found.get("tensor_parallel_size", 1)
    return [
        row(FAIL, "dtype", "float16", "Volta has no bfloat16")
        if volta and found.get("dtype") in ("auto", "bfloat16")
        else None,
        row(*_cache_trouble(box, found["kv_cache_dtype"]))
        if volta and str(found.get("kv_cache_dtype")).startswith("fp8")
        else None,
        row(
            WARN,
            "compilation_config",
            f"graphs up to max_num_seqs {found.get('max_num_seqs')}",
            "larger batches run eager (trouble 84)",
        )
        if volta and not found.get("enforce_eager") and graphs and max(graphs) < found.get("max_num_seqs", 0)
        else None,
        row(
            WARN,
            "speculative_config",
            "none",
            "batches of sampled and greedy requests, and the context's end, killed engines there (76 to 78)",
        )
        if volta and found.get("speculative_config")
        else None,
        row(FAIL, "tensor_parallel_size", f"at most {len(box.gpus)} cards", "each rank needs a card")
        if box.gpus and ranks > len(box.gpus)
        else None,
        row(
            NOTE,
            "disable_custom_all_reduce",
            "true",
            "hangs without NVLink, stops or gives wrong first outputs with graphs (27, 38, 39)",
        )
        if volta and not found.get("disable_custom_all_reduce")
        else None,
    ]
