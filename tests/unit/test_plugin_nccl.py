"""NCCL for Volta: version and machine code, from libraries that the test makes."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from voltriton_vllm import nccl


def fat_binary(*codes: tuple[int, int]) -> bytes:
    """(kind, architecture) of each entry, with a payload of 8 bytes."""
    entries = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, 8)
        + bytes(12)
        + struct.pack("<I", arch)
        + bytes(32)
        + b"payload!"
        for kind, arch in codes
    )
    return nccl.MAGIC + struct.pack("<HHQ", 1, 16, len(entries)) + entries


def library(folder: Path, version: int, *codes: tuple[int, int]) -> str:
    """A shared library that answers ncclGetVersion, with a fat binary appended."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, target = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text(f"int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    with target.open("ab") as file:
        file.write(fat_binary(*codes))
    return str(target)


def test_entries_are_read_from_all_fat_binaries(tmp_path):
    file = tmp_path / "some"
    file.write_bytes(b"x" * 7 + fat_binary((1, 90), (2, 70)) + b"y" * 9 + fat_binary((2, 80)))
    assert nccl.architectures(file) == {70, 80}


def test_a_damaged_one_does_not_hang(tmp_path):
    file = tmp_path / "some"
    file.write_bytes(fat_binary((2, 70))[:60] + nccl.MAGIC + b"\xff" * 12)
    assert nccl.architectures(file) <= {70}


def test_the_pinned_kind_is_accepted(tmp_path):
    nccl.check(library(tmp_path, 23007, (2, 70), (2, 80)))


@pytest.mark.parametrize(
    ("version", "codes", "message"),
    [
        (
            22105,
            [(2, 70)],
            r"NCCL 2\.21\.5 in .*: 2\.29\.7 or newer is needed; install nvidia-nccl-cu12==2\.30\.7",
        ),
        (23007, [(2, 80), (2, 90)], r"has code for sm_80, sm_90, not for sm_70; install nvidia-nccl-cu12"),
        (23007, [(1, 70)], "has code for no GPU, not for sm_70"),
    ],
)
def test_others_are_refused_in_one_line(tmp_path, version, codes, message):
    with pytest.raises(nccl.NcclError, match=message) as error:
        nccl.check(library(tmp_path, version, *codes))
    assert "\n" not in str(error.value)


def test_no_library_is_refused(tmp_path):
    with pytest.raises(nccl.NcclError, match="is no NCCL library"):
        nccl.check(str(tmp_path / "libnccl.so.2"))


def test_only_ranks_are_asked(monkeypatch):
    assert not nccl.is_rank()
    monkeypatch.setattr(nccl.multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr(nccl.multiprocessing.current_process(), "_name", "VllmWorker-1")
    assert nccl.is_rank()
