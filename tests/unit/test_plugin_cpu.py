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
SHAPES = [(960, 576), (64, 1552), (50, 32), (1, 16), (33, 2048), (40, 4112)]
ROWS = [*range(14), 16, 17, 24, 25, 31, 32, 33, 100]


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


@pytest.mark.parametrize("dtype", BOUNDS)
def test_more_rows_than_are_put_in_order_at_a_time(kernel, dtype):
    torch.manual_seed(0)
    for rows, shape in ((513, (33, 64)), (1030, (18, 4112)), (200, (17, 21040))):
        assert worst(rows, shape, dtype, per_row=True, bias=True) < BOUNDS[dtype], (rows, shape)


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


def every_pair(dtype: torch.dtype, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of each code with each finite scale, [copies * 16 columns, N], and what it should be."""
    scale = torch.arange(256, dtype=torch.uint8)
    scale = scale[scale & 0x7F != 0x7F].view(-1, 1)
    packed = (torch.arange(0, 16, 2) | (torch.arange(1, 16, 2) << 4)).to(torch.uint8).repeat(len(scale), 1)
    parts = packed, scale.view(torch.float8_e4m3fn), torch.tensor(0.25)
    found = linear.linear(torch.eye(16, dtype=dtype).repeat(copies, 1), linear.pack(*parts))
    return found, dequantise(*parts, torch.float32).t().to(dtype).repeat(copies, 1)


@pytest.mark.parametrize("copies", [1, 2])  # few rows, many rows
@pytest.mark.parametrize("dtype", BOUNDS)
def test_each_code_with_each_scale_is_exact(kernel, dtype, copies):
    found, wanted = every_pair(dtype, copies)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512bf16", "amx"])
def test_each_instruction_set(kernel, isa):
    """In a process of its own: the choice is made once."""
    flag = {"avx512": "avx512bw", "avx512bf16": "avx512_bf16", "amx": "amx_bf16"}.get(isa, isa)
    if flag not in build._cpu_flags():
        pytest.skip(f"this CPU has no {flag}")
    code = (
        "import test_plugin_cpu as t; t.build.load()\n"
        "for d in t.BOUNDS:\n"
        "    assert all(t.torch.equal(*t.every_pair(d, copies)) for copies in (1, 2)), d\n"
        "    for m in (*range(1, 14), 16, 17, 24, 25, 40, 100):\n"
        "        for shape in ((50, 576), (33, 4112)):\n"
        "            assert t.worst(m, shape, d, True, True) < t.BOUNDS[d], (d, m, shape)\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])  # noqa: PTH120
    environment = os.environ | {"VOLTRITON_CPU_ISA": isa, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_number_of_threads_changes_no_bit(kernel, dtype):
    packed = linear.pack(*random_nvfp4(130, 4112, per_row=True))
    before = torch.get_num_threads()
    try:
        for rows in (5, 70, 600):
            x = torch.randn(rows, 4112).to(dtype)
            results = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(linear.linear(x, packed))
            assert all(torch.equal(results[0], result) for result in results)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nan_stay_in_their_row(kernel, dtype, value):
    packed = torch.full((32, 24), 0x22, dtype=torch.uint8)  # every weight is 1
    parts = packed, torch.ones(32, 3).to(torch.float8_e4m3fn), torch.tensor(1.0)
    for rows in (2, 20, 40):
        x = torch.ones(rows, 48, dtype=dtype)
        x[1, 7] = value
        y = linear.linear(x, linear.pack(*parts)).float()
        torch.testing.assert_close(y[1], torch.full((32,), value), equal_nan=True)
        assert bool((y[0] == 48).all() and (y[2:] == 48).all())


def test_beside_vector_code_and_onednn(kernel):
    """AMX's registers are a thread's: what runs before and after our kernel finds them as it needs them."""
    packed = linear.pack(*random_nvfp4(64, 128, per_row=False))
    x, w = torch.randn(64, 128).bfloat16(), torch.randn(96, 128).bfloat16()
    first = torch.nn.functional.linear(x, w), linear.linear(x, packed)
    for _ in range(3):
        assert torch.equal(first[0], torch.nn.functional.linear(x, w))
        assert torch.equal(first[1], linear.linear(x, packed))


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


def test_a_compiler_without_amx_builds_the_rest(tmp_path, monkeypatch):
    log = tmp_path / "log"
    compiler = tmp_path / "old-c++"
    compiler.write_text(
        f"""#!/bin/sh
case "$*" in *-mamx*) echo "error: unrecognized command-line option '-mamx-tile'" >&2; exit 1;; esac
echo "$*" >> {log}
while [ $# -gt 1 ]; do [ "$1" = -o ] && touch "$2"; shift; done
"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("VOLTRITON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    assert build.library().is_file()
    operator, link = log.read_text().splitlines()[-2:]
    assert "-DWITH_AVX512BF16 " in operator
    assert "AMX" not in operator
    assert "avx512bf16.o" in link
    assert "amx.o" not in link
