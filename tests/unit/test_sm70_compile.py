"""The kernels compile for Volta without a GPU: resources, instructions, the disk cache."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from voltriton_vllm.sm70 import compile as compiling
from voltriton_vllm.sm70 import runtime, variants

try:
    compiling.nvrtc()
except compiling.CompileError as e:
    pytest.skip(str(e), allow_module_level=True)


@functools.cache
def cubins() -> tuple[bytes, ...]:
    """The modules for sm_70, kept between runs: compiling them takes some ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOLTRITON_KERNEL_CACHE", str(Path(__file__).parents[2] / ".voltriton/kernels"))
        with ThreadPoolExecutor() as pool:
            return tuple(pool.map(lambda text: compiling.build(text, "sm_70"), runtime.sources(70)))


def triton_tool(name: str) -> str:
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    if not path.exists():
        pytest.skip(f"Triton has no {name} here")
    return str(path)


def test_sm_70_resources(tmp_path: Path) -> None:
    """Every kernel in use is there, and its registers fit the threads it is launched with."""
    tool = triton_tool("cuobjdump")
    found: dict[str, tuple[int, int]] = {}
    for i, image in enumerate(cubins()):
        (tmp_path / f"{i}.cubin").write_bytes(image)
        text = subprocess.run(
            [tool, "--dump-resource-usage", f"{tmp_path}/{i}.cubin"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        here = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", text)
        found.update((name, (int(registers), int(stack))) for name, registers, stack in here)
        assert set(runtime.PARTS[i].names(70)) <= {name for name, _, _ in here}
    for variant in variants.all_variants(70):
        registers, stack = found[variant.name]
        blocks = int(re.search(r"_o(\d+)(?:_p\d)?$", variant.name)[1])  # type: ignore[index]
        warps = getattr(variant, "nw", 0) or getattr(variant, "warps", 0)
        threads = getattr(variant, "threads", 0) or warps * 32
        if variant.macro == "MOE_DOWN":
            threads = 512
        # A multiprocessor of Volta has 65536 registers, given out in units of 8 a thread.
        assert -(-registers // 8) * 8 * threads * blocks <= 65536, variant.name
        assert stack <= 160, f"{variant.name} spills {stack} bytes"
    for variant in [v for table in variants.GEMV.values() for _, v in table]:
        assert found[variant.name][1] == 0, f"{variant.name} spills"


@functools.cache
def disassembler() -> str | None:
    """nvdisasm of CUDA 12 (13.1 no longer reads sm_70): NVDISASM, or what is on the path."""
    return os.environ.get("NVDISASM") or shutil.which("nvdisasm")


def instructions(image: bytes, folder: Path) -> dict[str, Counter[str]]:
    path = folder / "k.cubin"
    path.write_bytes(image)
    tool = disassembler()
    if tool is None:
        pytest.skip("no nvdisasm of CUDA 12 (set NVDISASM)")
    run = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True)
    if "SM70" in run.stderr:
        pytest.skip(f"this nvdisasm does not read sm_70: {run.stderr.strip()[:80]}")
    found = {}
    for part in re.split(r"\.text\.(?=\w+:)", run.stdout)[1:]:
        ops = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?P\w+ )?([A-Z][A-Z0-9_.]+)", part.split(".section")[0])
        found[part.split(":")[0]] = Counter(ops)
    return found


def test_volta_s_tensor_cores_and_half2_are_used(tmp_path: Path) -> None:
    found = instructions(cubins()[0], tmp_path)
    for name, ops in found.items():
        if name.startswith(("gemm", "moe_gemm")):
            assert sum(n for op, n in ops.items() if op.startswith("HMMA.884")) >= 64, name
        if name.startswith(("gemv", "moe_up", "moe_down")):
            assert sum(n for op, n in ops.items() if op.startswith("HFMA2")) >= 14, name
            assert ops["LDG.E.128.CONSTANT.SYS"] >= 1, f"{name}: weights come in 16-byte loads"
        if name.startswith("gemv"):
            assert not any(op.startswith(("LDL", "STL")) for op in ops), f"{name} uses local memory"


def test_ptx_is_for_compute_70() -> None:
    ptx = compiling.nvrtc().compile(runtime.sources(80)[1], "compute_70").decode()
    assert ".target sm_70" in ptx


def test_cache_is_filled_once_and_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLTRITON_KERNEL_CACHE", str(tmp_path / "cache"))
    source = 'extern "C" __global__ void nothing() {}\n'
    image = compiling.build(source, "sm_70")
    assert image[:4] == b"\x7fELF"
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".cubin"]

    def no_compiler() -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "nvrtc", no_compiler)
    assert compiling.build(source, "sm_70") == image
    with pytest.raises(AssertionError, match="compiled again"):
        compiling.build(source, "compute_70")
    with pytest.raises(AssertionError, match="compiled again"):
        compiling.build(source + " ", "sm_70")


def test_a_folder_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VOLTRITON_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    assert compiling.build('extern "C" __global__ void nothing2() {}\n', "sm_70")[:4] == b"\x7fELF"
    assert "are not kept" in caplog.text


def test_a_source_that_does_not_compile_says_where() -> None:
    with pytest.raises(compiling.CompileError, match=r"sm_70: .*undefined_name"):
        compiling.nvrtc().compile('extern "C" __global__ void f() { undefined_name(); }', "sm_70")


def test_includes_are_taken_once() -> None:
    text = compiling.read_source("sm70_moe.cu", "sm70_gemm.cu")
    assert text.count("DEV u32 hfma2(") == 1
    assert '#include "' not in text
