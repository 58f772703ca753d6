"""Building and finding the CPU kernel. `python -m voltriton_vllm.cpu.build` does it ahead of the first load.

The library is kept in a cache folder (`cache_folder`), under a name made from its sources, torch's version
and the compiler: another of these gives another file, and no rank waits for a second build.
Without a compiler `load` says why once, and the caller expands the weights instead.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[1] / "csrc"
KERNELS, OPERATOR = "cpu_nvfp4_kernels.cpp", "cpu_nvfp4_ops.cpp"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
# One object file each; the operator chooses among them when it is first called.
AVX512_BF16 = (*AVX512, "-mavx512bf16")
INSTRUCTION_SETS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512bf16": AVX512_BF16,
    "amx": (*AVX512_BF16, "-mprfchw", "-mamx-tile", "-mamx-bf16"),
}
BUILD_LIMIT_S = 300


class BuildError(RuntimeError):
    """There is no kernel on this machine; the message says why and what to do."""


def cache_folder() -> Path:
    """`$VOLTRITON_CACHE`; else inside a checkout that scripts/setup has prepared; else in the user's cache."""
    given = os.environ.get("VOLTRITON_CACHE")
    if given:
        return Path(given)
    prepared = Path(__file__).parents[3] / ".voltriton"
    return prepared / "cache" if prepared.is_dir() else Path.home() / ".cache" / "voltriton"


@functools.cache
def load() -> str | None:
    """Make `torch.ops.voltriton_cpu` available, building it if need be. None, or why there is no kernel."""
    try:
        torch.ops.load_library(str(library()))  # type: ignore[no-untyped-call]
    except (BuildError, OSError) as error:
        return str(error)
    torch.library.register_fake("voltriton_cpu::nvfp4_linear", _shape_of_result)
    return None


def library() -> Path:
    """Path of the built library. Raises BuildError."""
    if platform.machine() not in ("x86_64", "AMD64") or "avx2" not in _cpu_flags():
        raise BuildError(f"the CPU kernel needs AVX2, this is {platform.machine()} without it")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler was found: install g++, or set CXX")
    target = cache_folder() / f"cpu-{_key(compiler)}" / "voltriton_cpu.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start at the same time: one builds, the others wait
        if not target.is_file():
            _build(compiler, target)
    return target


def _build(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [_compile_kernel(compiler, name, Path(folder)) for name in INSTRUCTION_SETS]
        found = [name for name, built in zip(INSTRUCTION_SETS, objects, strict=True) if built]
        if "avx2" not in found:
            raise BuildError(
                f"{compiler} cannot compile {KERNELS}: {_run(_kernel_command(compiler, 'avx2'))}"
            )
        include = Path(torch.__file__).parent / "include"
        operator = Path(folder) / "operator.o"
        command = [compiler, *FLAGS, f"-I{include}", *(f"-DWITH_{name.upper()}" for name in found)]
        fault = _run([*command, "-c", str(SOURCES / OPERATOR), "-o", str(operator)])
        libraries = Path(torch.__file__).parent / "lib"
        output = Path(folder) / target.name
        parts = [str(Path(folder) / f"{name}.o") for name in found] + [str(operator)]
        # torch's own libgomp is loaded already: the same soname means the same threads.
        link = [compiler, "-shared", *parts, f"-L{libraries}", "-ltorch_cpu", "-lgomp", "-o", str(output)]
        fault = fault or _run(link)
        if fault:
            raise BuildError(f"{compiler} cannot build {OPERATOR}: {fault}")
        output.replace(target)


def _compile_kernel(compiler: str, name: str, folder: Path) -> bool:
    """False where the compiler does not know the instruction set."""
    return not _run([*_kernel_command(compiler, name), "-o", str(folder / f"{name}.o")])


def _kernel_command(compiler: str, name: str) -> list[str]:
    return [compiler, *FLAGS, *INSTRUCTION_SETS[name], f"-DISA={name}", "-c", str(SOURCES / KERNELS)]


def _run(command: list[str]) -> str:
    """The last line of what the compiler said, or an empty string when it succeeded."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no result within {BUILD_LIMIT_S} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
    return lines[0].strip() if lines else f"exit status {done.returncode}"


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256(f"{torch.__version__}\n{version}\n{FLAGS}\n{INSTRUCTION_SETS}".encode())
    for source in sorted(SOURCES.glob("cpu_nvfp4*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.split())


def _shape_of_result(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], n))


def main() -> int:
    reason = load()
    if reason is not None:
        print(f"voltriton: no CPU kernel: {reason}; NVFP4 weights will be expanded at load", file=sys.stderr)
        return 1
    print(f"voltriton: CPU kernel in {library()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
