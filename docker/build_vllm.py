"""Builds vLLM's source package for V100, compute capability 7.0 and nothing else, with our patch series in it.

    python docker/build_vllm.py OUTPUT_FOLDER [--work FOLDER] [--device cuda|empty] [--jobs N]

For those who want vLLM's own kernels: without them the plugin supplies the operations. Needs in the Python that runs
it PyTorch 2.13.0 (its headers; any build has those of the stable ABI) and docker/requirements-build.lock, nvcc 12.0 to
12.7 (CUDA 13 cannot make code for 7.0; 12.6 is what the image uses) and a host compiler that it takes (CXX names one).
`--device empty` compiles nothing and needs PyTorch only.

vLLM's own CMake is not used: at 0.32 it asks for GCC 13, fetches seven projects of which none has code for 7.0, and
compiles FlashAttention 2 and 3 for nvcc's default architecture when no wanted one is theirs. Here the files of its two
extensions that 7.0 can use are compiled, with CMake's definitions. What is left out: Marlin, CUTLASS and Machete
products, FlashAttention, DeepGEMM, FlashMLA and other code for 7.5 or newer.

The source package is the one of docker/vllm-source.lock. Its files are patched before the build; the record of the
series is put into the wheel, so that `voltriton patch verify` and the engine's check at start pass on it as it is. At
the end every library with GPU code must have sm_70 and no other, every symbol must have an owner, and with PyTorch the
libraries must load and register operators. Objects in the work folder are used again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
# Those of vLLM's CMakeLists.txt (VLLM_STABLE_EXT_SRC, VLLM_MOE_EXT_SRC) that it compiles for every architecture.
EXTENSIONS = {
    "_C_stable_libtorch": (
        "torch_bindings.cpp", "cuda_view.cu", "cuda_utils_kernels.cu", "activation_kernels.cu",
        "ngram_embedding_kernels.cu", "vocab_parallel_embedding_kernels.cu", "quantization/activation_kernels.cu",
        "quantization/w8a8/int8/scaled_quant.cu", "quantization/w8a8/fp8/common.cu",
        "quantization/w8a8/fp8/per_token_group_quant.cu", "quantization/gptq/q_gemm.cu", "pos_encoding_kernels.cu",
        "fused_qknorm_rope_kernel.cu", "fused_minimax_m3_qknorm_rope_kv_insert_kernel.cu", "layernorm_kernels.cu",
        "layernorm_quant_kernels.cu",
        "quantization/fused_kernels/fused_layernorm_dynamic_per_token_quant.cu",
        "quantization/fused_kernels/fused_silu_mul_block_quant.cu", "attention/merge_attn_states.cu", "sampler.cu",
        "topk.cu", "mamba/selective_scan_fwd.cu", "cache_kernels.cu", "cache_kernels_fused.cu",
        "custom_all_gather_reduce_scatter.cu", "custom_all_gather_reduce_scatter_ops.cpp", "custom_all_reduce.cu",
        "fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu", "fused_kimi_k3_mla_key_concat_kv_cache_kernel.cu",
        "hisparse_kernels.cu", "attention/dcp_utils/dcp_direct_a2a_lse_reduce.cu",
        "attention/dcp_utils/dcp_direct_kv_gather.cu", "attention/dcp_utils/dcp_direct_q_gather.cu",
        "quantization/w8a8/cutlass/scaled_mm_entry.cu", "quantization/fp4/nvfp4_quant_entry.cu",
        "quantization/fp4/nvfp4_scaled_mm_entry.cu", "quantization/awq/gemm_kernels.cu",
        "minimax_reduce_rms_kernel.cu",
    ),
    "_moe_C_stable_libtorch": (
        "moe/torch_bindings.cpp", "moe/moe_align_sum_kernels.cu", "moe/topk_softmax_kernels.cu",
        "moe/topk_softplus_sqrt_kernels.cu", "moe/moe_wna16.cu", "moe/grouped_topk_kernels.cu",
        "moe/permute_unpermute_kernels/moe_permute_unpermute_kernel.cu", "moe/moe_permute_unpermute_op.cu",
    ),
}  # fmt: skip
DEFINITIONS = (
    "USE_CUDA",
    "ENABLE_FP8",
    "TORCH_TARGET_VERSION=0x020B000000000000ULL",
    "Py_LIMITED_API=3",
    "NDEBUG",
)
TORCH_LIBRARIES = ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")
# Unversioned symbols of a library that others own: PyTorch's C shim, Python, the driver.
OWNED = re.compile(r"(aoti_torch_|torch_|Py|_Py|cu[A-Z])")


class BuildError(Exception):
    """One line that says what is wrong and what to do."""


def check_nvcc() -> str:
    """Version of the nvcc that will be used. BuildError where no code for 7.0 would come of it."""
    nvcc = find_nvcc()
    needed = "nvcc 12.0 to 12.7 is needed (12.6 is what the image uses)"
    if nvcc is None or not Path(nvcc).is_file():
        home = os.environ.get("CUDA_HOME")
        raise BuildError(f"no nvcc in {'CUDA_HOME=' + home if home else 'PATH'}: {needed}")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found is None or not NVCC[0] <= (int(found[1]), int(found[2])) < NVCC[1]:
        raise BuildError(f"{nvcc} is {found[0] if found else 'of an unknown version'}: {needed}")
    return found[0]


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return str(Path(home) / "bin/nvcc") if home else shutil.which("nvcc")


def download(work: Path) -> Path:
    """The unpacked source package; its hash is in the lock."""
    archives = list(work.glob("vllm-*.tar.gz"))
    if not archives:
        fetch = ("download", "--no-deps", "--no-build-isolation", "--no-binary=vllm")
        pip(*fetch, "--require-hashes", f"--dest={work}", f"--requirement={LOCK}")
        archives = list(work.glob("vllm-*.tar.gz"))
    source = work / archives[0].name.removesuffix(".tar.gz")
    shutil.rmtree(source, ignore_errors=True)
    run("tar", "--directory", str(work), "--extract", "--file", str(archives[0]))
    return source


def python_part(source: Path, work: Path) -> Path:
    """The unpacked wheel without extensions."""
    for name in ("built", "unpacked"):
        shutil.rmtree(work / name, ignore_errors=True)
    pip("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={work / 'built'}", str(source))
    (wheel,) = (work / "built").glob("vllm-*.whl")
    run(sys.executable, "-m", "wheel", "unpack", "--dest", str(work / "unpacked"), str(wheel))
    (root,) = (work / "unpacked").iterdir()
    return root


def includes(source: Path, work: Path) -> list[str]:
    torch = Path(package("torch")) / "include"
    cutlass = Path(package("cutlass_library")) / "source"
    shadow = mended_headers(source, torch, work / "headers")
    folders = (shadow, source / "csrc", torch, cutlass / "include", cutlass / "tools/util/include")
    python = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    return [f"-I{folder}" for folder in (*folders, python)]


def mended_headers(source: Path, torch: Path, folder: Path) -> Path:
    """PyTorch 2.13's header with vLLM's own patch, as its CMake does it."""
    name = "torch/csrc/stable/stableivalue_conversions.h"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / name).parent.mkdir(parents=True)
    shutil.copy(torch / name, folder / name)
    patch_file = source / "cmake/patches/pytorch_stable_string.patch"
    run("patch", "--batch", "--forward", "-p1", f"--directory={folder}", f"--input={patch_file}")
    return folder


def package(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"{name} is not installed in {sys.executable}: see docker/requirements-build.lock")
    return str(Path(spec.origin).parent)


def compile_extension(name: str, source: Path, work: Path, jobs: int, flags: list[str]) -> Path:
    """Objects of one extension, those that are not there yet, and the library made of them."""
    objects = {file: work / "objects" / name / f"{file.replace('/', '_')}.o" for file in EXTENSIONS[name]}
    (work / "objects" / name).mkdir(parents=True, exist_ok=True)
    compiler, nvcc = os.environ.get("CXX", "g++"), str(find_nvcc())

    def compile_one(file: str) -> None:
        command = [compiler, "-fPIC"]
        if file.endswith(".cu"):
            command = [
                nvcc,
                "-ccbin",
                compiler,
                "--expt-relaxed-constexpr",
                "--expt-extended-lambda",
                "-Xcompiler",
                "-fPIC",
            ]
            command += ["-gencode", "arch=compute_70,code=sm_70"]
        definitions = [f"-D{item}" for item in (*DEFINITIONS, f"TORCH_EXTENSION_NAME={name}")]
        half_made = objects[file].with_suffix(".half")
        command += ["-w", "-O2", "-std=c++20", "-c", *flags, *definitions, "-o", str(half_made)]
        run(*command, str(source / "csrc" / file))
        half_made.replace(objects[file])

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, [file for file, made in objects.items() if not made.exists()]))
    library = work / f"{name}.abi3.so"
    torch = Path(package("torch")) / "lib"
    folders = [f"-L{folder}" for folder in (torch, *toolkit_libraries(nvcc))]
    # PyTorch's libraries are not visible to others in the process unless they are asked for; a CPU build has fewer.
    # The C++ library before them: they carry parts of one, under the same names.
    owners = [f"-l{name}" for name in TORCH_LIBRARIES if (torch / f"lib{name}.so").is_file()]
    needed = ["-Wl,--no-as-needed", *folders, "-lstdc++", *owners, "-lcudart", "-lcublas", "-lcuda"]
    run(compiler, "-shared", "-o", str(library), *map(str, objects.values()), *needed)
    return library


def toolkit_libraries(nvcc: str) -> list[Path]:
    """The toolkit's folders, that of the driver's stand-in (`stubs`) among them."""
    home = Path(nvcc).resolve().parents[1]
    folders = [home / name for name in ("lib64", "lib", "lib/x86_64-linux-gnu")]
    return [place for folder in folders for place in (folder, folder / "stubs") if place.is_dir()]


def complete(root: Path, source: Path, series: patch_series.Series, output: Path) -> Path:
    """The wheel with the record of the series, after a look at what is in it."""
    for name in (vllm_tree.RECORD, vllm_tree.ORIGINALS):
        shutil.copy(source / name, root / name)
    states = vllm_tree.states(vllm_tree.find_tree(root), series)
    if wrong := [path for path, state in states.items() if state != vllm_tree.PATCHED]:
        raise BuildError(f"the wheel lacks the patches in {', '.join(wrong)}")
    for name, codes in libraries(root):
        print(f"{name}: {' '.join(codes) or 'no GPU code'}")
    output.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", str(output), str(root))
    (wheel,) = output.glob("vllm-*.whl")
    # The libraries keep to Python's stable interface, so that 3.12 takes the wheel that 3.11 made.
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--abi-tag=abi3", str(wheel))
    (wheel,) = output.glob("vllm-*.whl")
    return wheel


def libraries(root: Path) -> list[tuple[str, list[str]]]:
    """Each library with the GPU architectures in it. BuildError for code of another than 7.0, or without it."""
    found = [(str(path.relative_to(root)), device_code(path)) for path in sorted(root.rglob("*.so"))]
    for name, codes in found:
        if codes and not ("sm_70" in codes and set(codes) <= WANTED):
            raise BuildError(
                f"{name} has code for {' '.join(codes)}, only {' '.join(sorted(WANTED))} is wanted"
            )
    return found


def check_symbols(library: Path) -> None:
    """BuildError for a symbol that no library brings: a source file is missing from EXTENSIONS."""
    listed = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    names = [line.split()[1] for line in listed if line.split()[:1] == ["U"]]
    # A version (name@GLIBCXX_3.4) says which library has it.
    if foreign := [name for name in names if "@" not in name and not OWNED.match(name)]:
        raise BuildError(f"{library.name}: nobody has {', '.join(foreign[:5])} ({len(foreign)} symbols)")


def registered(library: Path) -> list[str]:
    """Names of the operators that PyTorch has after loading the library (functions are bound when they are called)."""
    program = (
        "import sys, os, importlib.util, torch; before = set(torch._C._dispatch_get_all_op_names()); "
        "sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL); name, path = sys.argv[1:]; "
        "spec = importlib.util.spec_from_file_location(name, path); importlib.util.module_from_spec(spec); "
        "print(*sorted(set(torch._C._dispatch_get_all_op_names()) - before))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, library.name.split(".")[0], str(library)]
    # Where there is no driver, its stand-in under the name of the real one.
    folders = [library.parent / "driver", *toolkit_libraries(str(find_nvcc()))]
    folders[0].mkdir(exist_ok=True)
    for stub in [path for folder in folders if (path := folder / "libcuda.so").is_file()][:1]:
        (folders[0] / "libcuda.so.1").unlink(missing_ok=True)
        (folders[0] / "libcuda.so.1").symlink_to(stub)
    variables = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, folders))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise BuildError(f"{library.name} cannot be loaded: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.split()


def pip(*arguments: str) -> None:
    run(sys.executable, "-m", "pip", *arguments)


def run(*command: str) -> None:
    print("+", " ".join(command), flush=True)
    if subprocess.run(command, check=False).returncode:
        raise BuildError(f"failed: {' '.join(command)}")


def build(args: argparse.Namespace, series: patch_series.Series) -> Path:
    args.work.mkdir(parents=True, exist_ok=True)
    source = download(args.work)
    vllm_tree.apply(vllm_tree.find_tree(source), series)
    print(f"series {series.hash} is in {source}")
    root = python_part(source, args.work)
    if args.device == "cuda":
        flags = includes(source, args.work)
        for name in EXTENSIONS:
            library = compile_extension(name, source, args.work, args.jobs, flags)
            check_symbols(library)
            names = registered(library)
            print(f"{library.name}: {len(names)} operators, such as {', '.join(names[:3])}")
            shutil.copy(library, root / "vllm" / library.name)
    return complete(root, source, series, args.output)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm-build"))
    parser.add_argument("--device", choices=("cuda", "empty"), default="cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    series = patch_series.load(PATCHES)
    # `empty`: setup.py's part is Python alone. The override: the package would else call itself another version.
    os.environ.update(VLLM_TARGET_DEVICE="empty", VLLM_VERSION_OVERRIDE=series.upstream.version)
    try:
        if args.device == "cuda":
            print(f"nvcc: {check_nvcc()}")
        print(f"built {build(args, series)}")
    except (BuildError, patch_series.PatchError, OSError) as error:
        print(f"build_vllm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
