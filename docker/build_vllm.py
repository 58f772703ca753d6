"""Builds vLLM's source package for V100, compute capability 7.0 and nothing else, with our patch series in it.

    python docker/build_vllm.py OUTPUT_FOLDER [--work FOLDER] [--device cuda|empty] [--jobs N]

For those who want vLLM's own kernels: without them the plugin supplies the operations. Needs in the Python that runs
it PyTorch 2.13.0 for CUDA 12 and docker/requirements-build.lock; nvcc 12.0 to 12.7 (vLLM leaves 7.0 out from 12.8 on,
CUDA 13 cannot make it); a C++20 compiler; a network for CUTLASS and FlashAttention, which vLLM's CMake fetches (or
VLLM_CUTLASS_SRC_DIR and VLLM_FLASH_ATTN_SRC_DIR). `--device empty` builds no extension and needs only PyTorch.

The source package is the one of docker/vllm-source.lock. Its files are patched before the build; the record of the
series is put into the wheel, so that `voltriton patch verify` and the engine's check at start pass on it as it is. At
the end every library in the wheel with GPU code must have sm_70 and no other.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATCHES = HERE.parent / "patches"
# `fatbin` by itself: the image's build stage has none of the rest of the doctor.
sys.path[:0] = [str(HERE.parent / "backend"), str(HERE.parent / "backend/voltriton/doctor")]

from fatbin import device_code  # noqa: E402
from voltriton.patching import series as patch_series  # noqa: E402
from voltriton.patching import tree as vllm_tree  # noqa: E402

LOCK = HERE / "vllm-source.lock"
NVCC = ((12, 0), (12, 8))
WANTED = {"sm_70", "compute_70"}


class BuildError(Exception):
    """One line that says what is wrong and what to do."""


def check_nvcc() -> str:
    """Version of the nvcc that will be used. BuildError where no code for 7.0 would come of it."""
    home = os.environ.get("CUDA_HOME")
    nvcc = str(Path(home) / "bin/nvcc") if home else shutil.which("nvcc")
    needed = "nvcc 12.0 to 12.7 is needed (12.6 is what the image uses)"
    if nvcc is None or not Path(nvcc).is_file():
        raise BuildError(f"no nvcc in {'CUDA_HOME=' + home if home else 'PATH'}: {needed}")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found is None or not NVCC[0] <= (int(found[1]), int(found[2])) < NVCC[1]:
        raise BuildError(f"{nvcc} is {found[0] if found else 'of an unknown version'}: {needed}")
    return found[0]


def download(work: Path) -> Path:
    """The unpacked source package; its hash is in the lock."""
    pip(
        "download",
        "--no-deps",
        "--no-build-isolation",
        "--require-hashes",
        "--no-binary=vllm",
        f"--dest={work}",
        f"--requirement={LOCK}",
    )
    (archive,) = work.glob("vllm-*.tar.gz")
    run("tar", "--directory", str(work), "--extract", "--file", str(archive))
    return work / archive.name.removesuffix(".tar.gz")


def build(source: Path, work: Path) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={work / 'built'}", str(source))
    (wheel,) = (work / "built").glob("vllm-*.whl")
    return wheel


def complete(wheel: Path, source: Path, series: patch_series.Series, work: Path, output: Path) -> Path:
    """The wheel with the record of the series, after a look at what is in it."""
    unpacked = work / "unpacked"
    run(sys.executable, "-m", "wheel", "unpack", "--dest", str(unpacked), str(wheel))
    (root,) = unpacked.iterdir()
    for name in (vllm_tree.RECORD, vllm_tree.ORIGINALS):
        shutil.copy(source / name, root / name)
    states = vllm_tree.states(vllm_tree.find_tree(root), series)
    if wrong := [path for path, state in states.items() if state != vllm_tree.PATCHED]:
        raise BuildError(f"the wheel lacks the patches in {', '.join(wrong)}")
    for name, codes in libraries(root):
        print(f"{name}: {' '.join(codes) or 'no GPU code'}")
    output.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", str(output), str(root))
    return output / wheel.name


def libraries(root: Path) -> list[tuple[str, list[str]]]:
    """Each library with the GPU architectures in it. BuildError for code of another than 7.0, or without it."""
    found = [(str(path.relative_to(root)), device_code(path)) for path in sorted(root.rglob("*.so"))]
    for name, codes in found:
        if codes and not ("sm_70" in codes and set(codes) <= WANTED):
            raise BuildError(
                f"{name} has code for {' '.join(codes)}, only {' '.join(sorted(WANTED))} is wanted"
            )
    return found


def pip(*arguments: str) -> None:
    run(sys.executable, "-m", "pip", *arguments)


def run(*command: str) -> None:
    print("+", " ".join(command), flush=True)
    if subprocess.run(command, check=False).returncode:
        raise BuildError(f"failed: {' '.join(command)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm-build"), help="made anew")
    parser.add_argument("--device", choices=("cuda", "empty"), default="cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    series = patch_series.load(PATCHES)
    # The override: without it the package calls itself 0.32.0+cu126, which is another version to pip.
    os.environ.update(
        TORCH_CUDA_ARCH_LIST="7.0",
        VLLM_TARGET_DEVICE=args.device,
        VLLM_VERSION_OVERRIDE=series.upstream.version,
        MAX_JOBS=str(args.jobs),
    )
    try:
        if args.device == "cuda":
            print(f"nvcc: {check_nvcc()}")
        shutil.rmtree(args.work, ignore_errors=True)
        args.work.mkdir(parents=True)
        source = download(args.work)
        vllm_tree.apply(vllm_tree.find_tree(source), series)
        print(f"series {series.hash} is in {source}")
        print(f"built {complete(build(source, args.work), source, series, args.work, args.output)}")
    except (BuildError, patch_series.PatchError, OSError) as error:
        print(f"build_vllm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
