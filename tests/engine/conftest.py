"""One tritonserver with the real engine and the demo model for all tests that leave it as it was."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "triton"), str(Path(__file__).parent)]

from server import Server
from voltriton.triton import default_root

DEMO = default_root() / "models" / "smollm2-nvfp4"


def real_repository(folder: Path, model: Path, **engine_args: Any) -> Path:
    """The product's repository with another model."""
    shutil.copytree(ROOT / "model_repository", folder)
    content = {"model": str(model), **engine_args, "voltriton": {"profile": "cpu"}}
    (folder / "vllm" / "1" / "model.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    if not (DEMO / "config.json").exists():
        pytest.fail("the demo model is not there: .venv/bin/voltriton fetch smollm2 (scripts/test does it)")
    return DEMO


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("real")
    repository = real_repository(folder / "repository", demo_model)
    with Server(repository, folder / "log", ready_s=600) as running:
        yield running
