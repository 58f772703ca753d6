"""Pack what `four_gpus.py` needs on a GPU host that cannot reach a package index, in parts that a link of 64 MiB carries.

    .venv/bin/python tests/gpu/build_four_gpus_kit.py [--out .kit/four] [--only NAME ...]

The host has Python 3.12, PyTorch 2.11 with CUDA 13, Triton, transformers and numpy. Each part unpacks into one folder:

    1/site.tar.xz      site/      vLLM's Python files with our patches, and our plugin's entry point
    1/deps.tar.xz      site/      what vLLM imports and the host lacks (kit_packages.txt)
    1/ptx.tar.xz       ptx/       our kernels as PTX for compute_70: that host's CUDA does not compile for Volta
    1/clients.tar.xz   clients/   grpcio, tritonclient and what they import
    1/analyzer.tar.xz  root/      perf_analyzer with the libraries that it needs
    2/nccl.tar.xz      nccl/      NCCL as pinned for Volta; its code for the lent cards alone (sm_90)
    2/c90.tar.xz       c90/       vLLM's extension that has the custom all-reduce, likewise
    3/triton.tar.xz    root/      tritonserver, Python backend and the stub for Python 3.12
    3/python.tar.xz    root/      a Python 3.12 of its own with numpy 1.26, for the stub and for the program itself
    4/stock.tar.xz     c90/       what else a published vLLM needs (test_stock_vllm.py): its extension for experts, likewise

What depends on this checkout (site, ptx) is made anew each time; the rest is kept where it is there already.
The Python is one built with --enable-shared (pyenv's 3.12): --python names its folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("perf", "backend", "patches", "tests/bench")]
from voltriton.triton import PYTRITON, STUB_NUMPY, default_root  # noqa: E402
from voltriton_perf.perf_analyzer import PerfAnalyzer  # noqa: E402

MOST_BYTES = 60 << 20
VLLM = "vllm==0.32.0"
NCCL = "nvidia-nccl-cu12==2.30.7"
CLIENTS = ("grpcio==1.85.3", "tritonclient==2.73.0", "protobuf==6.33.6", "python-rapidjson==1.25")
CLIENTS += ("typing-extensions==4.16.0", "ml-dtypes==0.5.4", "packaging==26.4")
CUSTOM_ALL_REDUCE = "vllm/_C_stable_libtorch.abi3.so"
EXPERTS = "vllm/_moe_C_stable_libtorch.abi3.so"
# Not used by the stub or the program: tests, tools, and what only a build needs.
NOT_IN_PYTHON = (
    "test",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "tkinter",
    "pydoc_data",
    "site-packages",
)
# What its modules ctypes and lzma link, and an image with another Python may lack.
OF_PYTHON, SYSTEM_LIBRARIES = ("libffi.so.8", "liblzma.so.5"), Path("/lib/x86_64-linux-gnu")
NOT_IN_PACKAGES = ("/tests/", "/locales/", "mistral_common/data/")
# Not run on Volta: a front end in Rust, kernels for Blackwell.
NOT_IN_VLLM = ("vllm/vllm-rs", "vllm/third_party/fmha_sm100", "vllm/third_party/tml_fa4")
FATBIN, ENTRY_ARCH, PTX = 0xBA55ED50, 28, 1


def download(wheels: Path, requirement: str) -> Path:
    """The wheel for Python 3.12, from `wheels` where it is there. CalledProcessError where there is none."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not (found := sorted(wheels.glob(pattern))):
        words = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
        for abi in ("cp312", "abi3", "none"):
            words += ["--abi", abi]
        for platform in [f"manylinux_2_{n}_x86_64" for n in (17, 18, 24, 26, 27, 28, 31, 34, 35, 36, 39)]:
            words += ["--platform", platform]
        words += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        subprocess.run([*pip, "-d", str(wheels), *words, requirement], check=True)
        found = sorted(wheels.glob(pattern))
    return found[0]


def unpack(wheel: Path, target: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [n for n in archive.namelist() if wanted(n) and not n.endswith("/")])


def strip_fatbin(path: Path, keep: int) -> None:
    """Zeroes the GPU code for all architectures but one, machine code and PTX: zeros take no room once compressed.

    Where a fat binary has nothing for that one, its newest PTX stays, which the driver compiles.
    A fat binary is `u32 magic, u16 version, u16 header size, u64 size` and entries `u16 kind, u16, u32 header size,
    u64 payload size, ..., at byte 28 the architecture` (undocumented; see voltriton_vllm/nccl.py).
    """
    magic = struct.pack("<I", FATBIN)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        start = data.find(magic)
        while start >= 0:
            _, header, size = struct.unpack_from("<HHQ", data, start + 4)
            end = start + header + size
            if end > len(data):
                end = start + 4  # four bytes that look like one
            found = list(_entries(data, start + header, end))
            newest = max((e.arch for e in found if e.kind == PTX and e.arch <= keep), default=0)
            kept = [e for e in found if e.arch == keep] or [
                e for e in found if (e.kind, e.arch) == (PTX, newest)
            ]
            for entry in found:
                if entry not in kept:
                    data[entry.begin : entry.end] = bytes(entry.end - entry.begin)
            start = data.find(magic, end)


class Entry(NamedTuple):
    """Of a fat binary; `begin` and `end` of its code."""

    kind: int
    arch: int
    begin: int
    end: int


def _entries(data: mmap.mmap, at: int, end: int) -> Iterator[Entry]:
    while at + 32 <= end:
        kind, _, head, payload = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + ENTRY_ARCH)
        if head < 32 or not 10 <= arch < 1000 or at + head + payload > end:
            return
        yield Entry(kind, arch, at + head, at + head + payload)
        at += head + payload


class Kit:
    """Each method lays a part's files out in `root`; paths there are those on the host."""

    def __init__(self, wheels: Path, python: Path) -> None:
        self._wheels, self._python = wheels, python

    def site(self, root: Path) -> None:
        site = root / "site"
        unpack(
            download(self._wheels, VLLM),
            site,
            lambda n: not n.endswith(".so") and not n.startswith(NOT_IN_VLLM),
        )
        patch = [sys.executable, "-m", "voltriton.cli", "patch", "apply", "--tree", str(site)]
        subprocess.run(
            patch,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT / "backend")},
        )
        about = site / "voltriton-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: voltriton\nVersion: 0\n")
        (about / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nvoltriton = voltriton_vllm:register\n"
        )

    def deps(self, root: Path) -> None:
        for line in Path(__file__).with_name("kit_packages.txt").read_text().split():
            unpack(
                download(self._wheels, line),
                root / "site",
                lambda n: not any(part in n for part in NOT_IN_PACKAGES),
            )

    def ptx(self, root: Path) -> None:
        import plain_read
        from voltriton_vllm.sm70 import compile as compiling
        from voltriton_vllm.sm70 import runtime

        os.environ["VOLTRITON_KERNEL_CACHE"] = str(root / "ptx")
        for text in [*runtime.sources(runtime.fragment_of((9, 0))), plain_read.SOURCE]:
            compiling.build(text, "compute_70")

    def nccl(self, root: Path) -> None:
        unpack(download(self._wheels, NCCL), root, lambda n: n.endswith("libnccl.so.2"))
        (root / "nccl").mkdir()
        (found,) = root.glob("nvidia/nccl/lib/libnccl.so.2")
        strip_fatbin(found.rename(root / "nccl" / "libnccl.so.2"), 90)
        shutil.rmtree(root / "nvidia")

    def c90(self, root: Path) -> None:
        small = [f"vllm/{name}.abi3.so" for name in ("cumem_allocator", "fs_io_C", "spinloop")]
        unpack(download(self._wheels, VLLM), root / "c90", lambda n: n in [CUSTOM_ALL_REDUCE, *small])
        strip_fatbin(root / "c90" / CUSTOM_ALL_REDUCE, 90)

    def stock(self, root: Path) -> None:
        unpack(download(self._wheels, VLLM), root / "c90", lambda n: n == EXPERTS)
        strip_fatbin(root / "c90" / EXPERTS, 90)
        # A published vLLM refuses to start without FlashAttention. Its library is large; TRITON_ATTN is what runs there.
        attention = root / "c90" / "vllm" / "vllm_flash_attn"
        attention.mkdir()
        (attention / "_vllm_fa3_C.py").touch()

    def triton(self, root: Path) -> None:
        home = "pytriton/tritonserver/"
        folders = ("bin/", "backends/python/", "python_backend_stubs/3.12/")
        unpack(
            download(self._wheels, PYTRITON),
            root / "root" / "triton",
            lambda n: (
                (n.startswith("nvidia_pytriton.libs/") and "libpython3" not in n)
                or n.startswith(tuple(home + folder for folder in folders))
            ),
        )

    def python(self, root: Path) -> None:
        target, env = root / "root" / "python", root / "root" / "stub-env"
        (target / "bin").mkdir(parents=True)
        (target / "lib").mkdir()
        shutil.copy(self._python / "bin" / "python3.12", target / "bin")
        shutil.copy(self._python / "lib" / "libpython3.12.so.1.0", target / "lib")
        for library in OF_PYTHON:
            shutil.copy(SYSTEM_LIBRARIES / library, target / "lib")
        ignore = shutil.ignore_patterns(
            *NOT_IN_PYTHON, "config-3.12*", "__pycache__", "*_test*.so", "_codecs_*.so"
        )
        shutil.copytree(self._python / "lib" / "python3.12", target / "lib" / "python3.12", ignore=ignore)
        (root / "root" / "libpython").symlink_to("python/lib")
        unpack(
            download(self._wheels, STUB_NUMPY),
            env / "lib" / "python3.12" / "site-packages",
            lambda n: "/tests/" not in n,
        )
        (env / "bin").mkdir()
        (env / "bin" / "python3").symlink_to("../../python/bin/python3.12")
        (env / "done").touch()

    def clients(self, root: Path) -> None:
        for requirement in CLIENTS:
            unpack(download(self._wheels, requirement), root / "clients")

    def analyzer(self, root: Path) -> None:
        tool = PerfAnalyzer(default_root() / "perf_analyzer")
        if not tool.there:
            tool.fetch()
        target = PerfAnalyzer(root / "root" / "perf_analyzer")
        target.binary.parent.mkdir(parents=True)
        shutil.copy(tool.binary, target.binary)
        target.libraries.mkdir(parents=True)
        for library in tool.libraries.iterdir():
            if ".so" in library.name and library.exists():
                shutil.copy(library, target.libraries)


PARTS = {
    "site": 1,
    "deps": 1,
    "ptx": 1,
    "clients": 1,
    "analyzer": 1,
    "nccl": 2,
    "c90": 2,
    "triton": 3,
    "python": 3,
    "stock": 4,
}
ANEW = ("site", "ptx")


def pack(root: Path, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    fresh = archive.with_suffix(".new")
    names = sorted(path.name for path in root.iterdir())
    subprocess.run(
        ["tar", "-C", str(root), "-cf", str(fresh), "-I", "nice -n 10 xz -T1 -6", *names], check=True
    )
    fresh.rename(archive)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".kit" / "four")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".voltriton" / "cache" / "kit-wheels")
    parser.add_argument("--python", type=Path, default=Path.home() / ".pyenv" / "versions" / "3.12.1")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    args = parser.parse_args()
    if importlib.util.find_spec("pip") is None:
        print("build_four_gpus_kit.py: needs pip: run it with .venv/bin/python", file=sys.stderr)
        return 1
    args.wheels.mkdir(parents=True, exist_ok=True)
    kit = Kit(args.wheels, args.python)
    for name in args.only:
        archive = args.out / str(PARTS[name]) / f"{name}.tar.xz"
        if archive.exists() and name not in ANEW:
            continue
        with tempfile.TemporaryDirectory(dir=args.wheels) as folder:
            getattr(kit, name)(Path(folder))
            pack(Path(folder), archive)
    return report(args.out)


def report(out: Path) -> int:
    """1 where a part is too large to be carried."""
    too_large = False
    for part in sorted(out.iterdir()):
        sizes = {file.name: file.stat().st_size for file in sorted(part.glob("*.tar.xz"))}
        too_large |= sum(sizes.values()) > MOST_BYTES
        print(
            f"part {part.name}: {sum(sizes.values()) / 2**20:.1f} MiB  "
            + ", ".join(f"{n} {s / 2**20:.1f}" for n, s in sizes.items())
        )
    return int(too_large)


if __name__ == "__main__":
    sys.exit(main())
