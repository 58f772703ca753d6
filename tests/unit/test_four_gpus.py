"""What of the programs for several GPUs needs no GPU: the kit's stripping, and how answers of ranks are compared."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(GPU), *sys.path])


def entry(arch: int, payload: bytes, kind: int = 2) -> bytes:
    return struct.pack("<HHIQ12xI", kind, 0, 32, len(payload), arch) + payload


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_the_code_of_one_architecture_is_kept(tmp_path: Path) -> None:
    import build_four_gpus_kit as kit

    def library(other: bytes) -> bytes:
        one = fatbin(entry(70, other), entry(90, b"n" * 24), entry(80, other, kind=1))
        two = fatbin(entry(90, b"m" * 8), entry(100, other))
        ptx = fatbin(entry(80, other), entry(75, other, 1), entry(80, b"p" * 16, 1), entry(100, other, 1))
        return b"head" + one + b"between" + two + ptx + b"tail"

    path = tmp_path / "library.so"
    path.write_bytes(library(b"v" * 40) + struct.pack("<I", 0xBA55ED50) + b"looks like one, and is none")
    kit.strip_fatbin(path, 90)
    assert (
        path.read_bytes()
        == library(bytes(40)) + struct.pack("<I", 0xBA55ED50) + b"looks like one, and is none"
    )


def test_a_sequence_is_compared_up_to_its_first_difference() -> None:
    import four_gpus

    one = [[(5, 1.0), (6, 0.001), (7, 1.0)], [(1, 2.0), (2, 0.5)], [(3, 1.0)]]
    many = [[(5, 1.0), (9, 0.001), (8, 1.0)], [(1, 2.0), (4, 0.5)], [(3, 1.0)]]
    assert four_gpus.compare(one, many) == {"positions": 5, "equal": 3, "near_ties": 1, "different": 1}


def test_a_part_that_fails_or_is_late_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    import four_gpus

    report = four_gpus.Report(tmp_path)
    with report.part("broken", 5):
        raise RuntimeError("no such thing")
    with report.part("late", 1):
        four_gpus.wait_for(lambda: False, 30, "what does not come")
    with report.part("well", 5):
        report.row("well", tokens_s=12.25)
    with report.part("late outside", 2):
        with report.part("broken inside", 5):
            raise RuntimeError("no such thing")
        four_gpus.wait_for(lambda: False, 30, "what does not come")
    text = (tmp_path / "results.txt").read_text()
    assert "broken: FAILED RuntimeError: no such thing" in text
    assert "late: FAILED TimeoutError: not done within 1 s" in text
    assert "well: tokens_s 12.25" in text
    assert "broken inside: FAILED RuntimeError" in text
    assert "late outside: FAILED TimeoutError: not done within 2 s" in text
    assert report.failed
