"""One tritonserver with the scripted engine for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server import Server, fake_repository


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fake")
    (folder / "adapters" / "c").mkdir(parents=True)
    (folder / "adapters" / "c" / "adapter_config.json").touch()
    settings = {"lora_folder": str(folder / "adapters")}
    repository = fake_repository(folder / "repository", settings, enable_lora=True, max_model_len=4096)
    (repository / "vllm" / "1" / "multi_lora.json").write_text('{"a": "/loras/a", "b": "/loras/b"}')
    with Server(repository, folder / "log") as running:
        yield running
