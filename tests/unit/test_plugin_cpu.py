"""The CPU kernel against the oracle: every instruction set of this machine, every type, edges of all sizes."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from voltriton_vllm.codec import dequantise
from voltriton_vllm.cpu import build, linear

# Relative to the largest result: rounding of the result's type, and float32 sums in another order.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 6e-4}
SHAPES = [(960, 576), (64, 1552), (50, 32), (1, 16), (33, 2048)]
ROWS = [0, 1, 2, 3, 5, 8, 11, 12, 13, 100]


@pytest.fixture(scope="module")
def kernel():
    reason = build.load()
    if reason is not None:
        pytest.skip(reason)


def random_nvfp4(n: int, k: int, per_row: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8)  # every E4M3 number, tiny ones too
    factor = (torch.rand(n) + 0.5) * 0.01 if per_row else torch.tensor(0.01)
    return packed, scale.view(torch.float8_e4m3fn), factor


def worst(rows: int, shape: tuple[int, int], dtype: torch.dtype, per_row: bool, bias: bool) -> float:
    n, k = shape
    parts = random_nvfp4(n, k, per_row)
    x = torch.randn(rows, k).to(dtype)
    b = torch.randn(n) if bias else None
    found = linear.linear(x, linear.pack(*parts), b)
    assert found.dtype == dtype
    assert found.shape == (rows, n)
    wanted = x.double() @ dequantise(*parts, torch.float32).double().t() + (0 if b is None else b)
    return 0.0 if rows == 0 else float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_oracle(kernel, dtype, shape):
    torch.manual_seed(0)
    for rows in ROWS:
        assert worst(rows, shape, dtype, per_row=rows % 2 == 0, bias=rows % 3 == 0) < BOUNDS[dtype], rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_under_another_default_type_as_vllm_does(kernel, dtype):
    parts = random_nvfp4(50, 64, per_row=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        packed = linear.pack(*parts)
    finally:
        torch.set_default_dtype(before)
    x = torch.randn(3, 64)
    assert torch.equal(linear.linear(x, packed), linear.linear(x, linear.pack(*parts)))


def test_factors_of_another_type_are_refused(kernel):
    packed = linear.pack(*random_nvfp4(32, 64, per_row=False))
    wrong = dataclasses.replace(packed, factor=packed.factor.half())
    with pytest.raises(RuntimeError, match="float32 is needed"):
        linear.linear(torch.randn(1, 64), wrong)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_narrower_instruction_sets(kernel, isa):
    if isa not in "".join(build._cpu_flags()):
        pytest.skip(f"this CPU has no {isa}")
    code = (
        "import test_plugin_cpu as t; t.build.load()\n"
        "for d in t.BOUNDS:\n"
        "    for m in (1, 3, 8, 40):\n"
        "        assert t.worst(m, (50, 576), d, True, True) < t.BOUNDS[d], (d, m)\n"
    )
    environment = os.environ | {"VOLTRITON_CPU_ISA": isa, "PYTHONPATH": os.path.dirname(__file__)}  # noqa: PTH120
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_leading_dimensions_are_kept(kernel):
    parts = random_nvfp4(32, 64, per_row=False)
    x = torch.randn(2, 3, 64)
    assert linear.linear(x, linear.pack(*parts)).shape == (2, 3, 32)


def test_memory_is_that_of_the_checkpoint():
    packed = linear.pack(*random_nvfp4(64, 512, per_row=False))
    assert packed.bytes() == 64 * 512 * 9 // 16 + 64 * 4


def test_sizes_that_do_not_fit_are_refused(kernel):
    packed, scale, factor = random_nvfp4(32, 64, per_row=False)
    with pytest.raises(ValueError, match="do not fit"):
        linear.pack(packed, scale[:, :2], factor)
    with pytest.raises(RuntimeError, match="do not fit"):
        linear.linear(torch.randn(1, 32), linear.pack(packed, scale, factor))


def test_the_shape_is_known_to_the_compiler(kernel):
    parts = linear.pack(*random_nvfp4(32, 64, per_row=False))
    x = torch.randn(4, 64)
    torch.library.opcheck(
        torch.ops.voltriton_cpu.nvfp4_linear.default,
        (x, parts.words, parts.scale, parts.factor, None, 32),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_without_a_compiler_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("VOLTRITON_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found: install g\\+\\+"):
        build.library()


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("VOLTRITON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match=r"broken-c\+\+ cannot compile .*no such thing"):
        build.library()
    assert not list((tmp_path / "cache").rglob("*.so"))
