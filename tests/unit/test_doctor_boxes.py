"""The doctor on recorded boxes: what is found, in which state, with which exit code."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
from recordings import make_recordings
from voltriton.doctor import main
from voltriton.doctor.box import Box, Options
from voltriton.doctor.command import ORDER, examine
from voltriton.doctor.host import RealHost, RecordedHost, RecordingHost
from voltriton.doctor.rows import CHECKS, STATUSES, Row
from voltriton.doctor.troubles import TROUBLES, seen_by, table

RECORDINGS = Path(__file__).parent / "recordings"
ROOT = Path(__file__).parents[2]


def rows_of(name: str, **options: object) -> dict[str, Row]:
    box = Box(RecordedHost(RECORDINGS / name), Options(**options))  # type: ignore[arg-type]
    return {row.check: row for row in examine(box)}


def failing(rows: dict[str, Row], status: str = "fail") -> set[str]:
    return {name for name, row in rows.items() if row.status == status}


def test_committed_recordings_are_what_the_program_writes(tmp_path: Path) -> None:
    make_recordings.write(tmp_path)
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    for path in written:
        assert filecmp.cmp(tmp_path / path, RECORDINGS / path, shallow=False), path


def test_a_good_nvlink_box_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("nvlink-box")
    assert failing(rows) == set()
    assert failing(rows, "warn") == set()
    assert rows["link.topology"].found == "6 x NV2"
    assert rows["link.nvlink"].found == "24 links up, 25.781 GB/s each way"
    assert main(["--replay", str(RECORDINGS / "nvlink-box")]) == 0
    assert "ready: " in capsys.readouterr().out


def test_a_bad_pcie_box_has_every_fault_named() -> None:
    rows = rows_of("pcie-box")
    assert failing(rows) == {
        "gpu.ecc",
        "gpu.xid",
        "host.shm",
        "torch.version",
        "torch.architectures",
        "torch.runs",
        "vllm.patches",
        "vllm.extensions",
        "triton.compiler",
        "nccl.architectures",
        "env.variables",
    }
    assert failing(rows, "warn") == {
        "gpu.retired_pages",
        "gpu.clocks",
        "gpu.temperature",
        "gpu.throttle",
        "gpu.persistence",
        "gpu.processes",
        "gpu.memory",
        "gpu.pcie",
        "link.topology",
        "link.p2p",
        "link.iommu",
        "link.acs",
        "link.aspm",
        "host.memlock",
        "host.open_files",
        "host.governor",
        "host.leftovers",
        "nccl.loaded",
    }
    assert "Xid 62" in rows["gpu.xid"].found
    assert "GPU 3: 150 of 250 W" in rows["gpu.power_limit"].found
    assert rows["link.acs"].found == "on at 1 bridge(s): 3a:00.0"
    assert "2 x PHB, 4 x SYS" in rows["link.topology"].found


def test_every_problem_says_what_to_do() -> None:
    for name in make_recordings.BOXES:
        for row in rows_of(name).values():
            assert row.status in STATUSES and row.found and row.needed, row
            if row.status in ("warn", "fail"):
                assert row.fix or row.why, row


def test_wsl2() -> None:
    rows = rows_of("wsl2", gpus=1)
    assert rows["host.wsl"].status == "warn" and "docs/windows.md" in rows["host.wsl"].fix
    assert rows["gpu.present"].status == "ok"
    assert rows_of("wsl2")["gpu.present"].status == "fail"


@pytest.mark.parametrize(
    ("name", "found", "fix"),
    [
        ("broken-driver", "couldn't communicate with the NVIDIA driver", "modprobe nvidia"),
        ("bare-container", "nvidia-smi is not installed", "--gpus all"),
        ("unreadable", "cannot be read", "dmesg"),
    ],
)
def test_no_answer_from_the_driver(name: str, found: str, fix: str) -> None:
    row = rows_of(name)["gpu.present"]
    assert row.status == "fail"
    assert found in row.found and fix in row.fix
    assert "4 NVIDIA card(s)" in row.why
    assert rows_of(name)["gpu.driver"].status == "skip"


def test_without_a_card_the_cpu_profile_can_serve() -> None:
    rows = rows_of("no-card")
    assert failing(rows) == set()
    assert rows["gpu.present"].status == "note"
    assert rows_of("no-card", target="v100")["gpu.present"].status == "fail"


def test_mixed_and_unknown_cards() -> None:
    rows = rows_of("mixed-cards", target="v100")
    assert rows["gpu.driver"].status == "fail" and "R580" in rows["gpu.driver"].why + rows["gpu.driver"].fix
    assert "does not know" not in rows["gpu.mixed"].found
    assert rows["gpu.model"].status == "warn" and "X900 (Rubin, unknown)" in rows["gpu.model"].found
    assert rows["gpu.mixed"].status == "warn"
    assert rows["gpu.mig"].status == "fail"
    assert rows["gpu.compute_mode"].status == "warn"
    assert rows["link.topology"].status == "warn" and "no matrix" in rows["link.topology"].found


def test_r470_is_too_old_and_its_xml_is_read() -> None:
    rows = rows_of("old-driver")
    assert rows["gpu.driver"].status == "fail" and "525.60" in rows["gpu.driver"].why
    assert rows["gpu.model"].status == "ok"
    assert rows["gpu.power_limit"].found == "250 W"
    assert rows["link.topology"].status == "note"


def test_a_container_counts_its_own_limits() -> None:
    rows = rows_of("bare-container")
    assert rows["host.memory"].status == "warn" and "limit of the container" in rows["host.memory"].found
    assert rows["host.shm"].status == "fail"


def test_infiniband_only_when_asked(tmp_path: Path) -> None:
    assert rows_of("nvlink-box")["net.infiniband"].status == "skip"
    assert rows_of("nvlink-box", infiniband=True)["net.infiniband"].status == "fail"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--replay", str(RECORDINGS / "broken-driver")]) == 1
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["ready"] is False and answer["target"] == "v100"
    assert {row["check"] for row in answer["rows"]} == set(CHECKS)
    assert sum(answer["counts"].values()) == len(answer["rows"])
    assert captured.err.startswith("voltriton doctor: not ready: gpu.present")


def test_colours_and_problems_only(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--color", "--problems", "--replay", str(RECORDINGS / "pcie-box")])
    out = capsys.readouterr().out
    assert "\x1b[" in out and "gpu.present" not in out and "gpu.xid" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--replay", "/nowhere"], "no recording"),
        (["--gpus", "0"], "at least 1"),
        (["--only", "gqu", "--replay", str(RECORDINGS / "no-card")], "no check begins with gqu"),
    ],
)
def test_wrong_usage_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_unknown_profile_is_a_row() -> None:
    row = rows_of("nvlink-box", profile="v200")["profile.arguments"]
    assert row.status == "fail" and "there are cpu, hopper, revolta-tp4, v100-tp4" in row.found


def test_a_check_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(box: Box) -> Row:
        raise KeyError("surprise")

    from voltriton.doctor.rows import Check

    monkeypatch.setitem(CHECKS, "gpu.driver", Check("gpu.driver", broken, ()))
    row = rows_of("nvlink-box")["gpu.driver"]
    assert row.status == "warn" and "the check itself failed: KeyError" in row.found


def test_a_recording_gives_the_same_rows(tmp_path: Path) -> None:
    """What `--record` keeps of this machine replays to the same answer."""
    only = [
        "host.shm",
        "host.memory",
        "host.memlock",
        "host.open",
        "host.huge",
        "host.cores",
        "gpu.present",
        "link.aspm",
    ]
    seen = examine(Box(RecordingHost(RealHost(), tmp_path), Options()), only)
    assert examine(Box(RecordedHost(tmp_path), Options()), only) == seen


def test_every_trouble_is_seen_or_says_why_not() -> None:
    assert sorted(TROUBLES) == list(range(1, 88))
    for number, trouble in TROUBLES.items():
        assert bool(seen_by(number)) != bool(trouble.unseen), number
    assert {number for check in CHECKS.values() for number in check.troubles} <= set(TROUBLES)


def test_the_manual_has_the_table_of_troubles() -> None:
    assert table() in (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def test_every_check_has_a_place_in_the_report() -> None:
    assert {name.split(".")[0] for name in CHECKS} <= set(ORDER)


def test_deep_has_nothing_to_move_with_one_card() -> None:
    assert rows_of("wsl2", gpus=1, deep=True)["deep.transfers"].found == "one card"
    assert rows_of("nvlink-box", deep=True)["deep.transfers"].status == "skip"
