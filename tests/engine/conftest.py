"""One tritonserver with the real engine and the demo model for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import DEMO, real_repository
from server import Server


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
