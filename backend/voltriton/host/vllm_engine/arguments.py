"""Engine arguments and the environment that vLLM starts in."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from voltriton.errors import InvalidArgument, nearest
from voltriton.host.vllm_engine import builds
from voltriton.settings import check_type
from voltriton.triton import default_root


def prepare_environment(engine_args: dict[str, Any]) -> None:
    """Before vLLM is imported. What the caller has set stays."""
    # The ranks must not inherit a CUDA context, or threads, by fork.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # Nothing is sent anywhere.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # Beside our own files where that can be, not in the home folder; and not among the temporary files, which go.
    cache = default_root() / "cache"
    if os.access(cache.parent, os.W_OK):
        os.environ.setdefault("VLLM_CACHE_ROOT", str(cache / "vllm"))
        if not re.search(r"\s", str(cache)):  # the compiler's command line would be cut at a space
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "torchinductor"))
    name_openmp(installed("torch"))
    if engine_args.get("tensor_parallel_size", 1) > 1:
        # Read by the CPU platform only: ranks on one NUMA node refuse to be bound.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def installed(package: str) -> Path | None:
    """The folder of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def name_openmp(torch: Path | None) -> None:
    """LD_PRELOAD with PyTorch's OpenMP library, by a path relative to this folder, where vLLM's own would be cut.

    vLLM's CPU platform starts its ranks with that library preloaded, as threads that are bound share one core
    otherwise (vllm#27369). LD_PRELOAD has no way to write a space or a colon; what is named already is left to us.
    """
    found = sorted(torch.glob("lib/libgomp*.so*")) if torch is not None else []
    given = os.environ.get("LD_PRELOAD", "")
    if not found or "omp" in given or _preloadable(str(found[0])):
        return
    relative = os.path.relpath(found[0])
    if _preloadable(relative):
        os.environ["LD_PRELOAD"] = f"{given}:{relative}" if given else relative


def _preloadable(path: str) -> bool:
    # With no slash in it, it would be looked for among the system's libraries.
    return "/" in path and not re.search(r"[\s:]", path)


def engine_arguments(given: dict[str, Any]) -> Any:
    """AsyncEngineArgs; unknown names and wrong types are refused by name (a text is no boolean)."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(
                f"model.json: {name} is no engine argument of {builds.name()}{nearest(name, known)}"
            )
        default = known[name].default
        if name == "enable_lora" and isinstance(value, str):
            continue  # the official backend takes "true" here
        if isinstance(default, bool | int | float | str) and value is not None:
            check_type(value, type(default), f"model.json: {name}")
    values = dict(given)
    if isinstance(values.get("enable_lora"), str):
        values["enable_lora"] = values["enable_lora"].lower() == "true"
    return AsyncEngineArgs(**values)
