"""What the engine host sets before vLLM starts: it works from a folder whose name has a space, and leaves what is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from voltriton.host.vllm_engine import arguments


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "VOLTRITON_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))


def a_torch(folder: Path) -> Path:
    """A PyTorch's folder with the real library in it."""
    real = arguments.installed("torch")
    assert real is not None
    (folder / "torch" / "lib").mkdir(parents=True)
    for library in real.glob("lib/libgomp*.so*"):
        (folder / "torch" / "lib" / library.name).symlink_to(library)
    return folder / "torch"


def preloads(folder: Path) -> tuple[str, str]:
    """LD_PRELOAD, and what the loader says of it."""
    done = subprocess.run([sys.executable, "-c", ""], cwd=folder, capture_output=True, text=True)
    return os.environ.get("LD_PRELOAD", ""), done.stderr


def test_openmp_of_a_folder_with_a_space_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "new comer"
    torch = a_torch(root)
    (root / "run").mkdir()
    monkeypatch.chdir(root / "run")
    arguments.name_openmp(torch)
    assert preloads(root / "run") == ("../torch/lib/libgomp.so.1", "")
    arguments.name_openmp(torch)
    assert os.environ["LD_PRELOAD"] == "../torch/lib/libgomp.so.1"


def test_an_ordinary_folder_is_left_to_vllm(tmp_path: Path) -> None:
    arguments.name_openmp(a_torch(tmp_path))
    arguments.name_openmp(None)
    assert "LD_PRELOAD" not in os.environ


def test_where_no_path_can_be_written_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = a_torch(tmp_path / "new comer")
    monkeypatch.chdir(tmp_path)
    arguments.name_openmp(torch)
    assert "LD_PRELOAD" not in os.environ


def test_caches_lie_beside_our_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLTRITON_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    arguments.prepare_environment({})
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "cache" / "vllm")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"


def test_where_we_may_not_write_vllm_keeps_its_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLTRITON_HOME", str(tmp_path / "none"))
    arguments.prepare_environment({})
    assert "VLLM_CACHE_ROOT" not in os.environ
