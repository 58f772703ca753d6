"""Loads that must be refused: one line with the cause, no child left, and the next load works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import FAKE, Server, command_line, wait_for

CONFIG = 'backend: "vllm"\ninstance_group [{{ count: {count}, kind: {kind} }}]\n'


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("load")
    (folder / "repository").mkdir()
    server = Server(folder / "repository", folder / "log", "--model-control-mode=explicit")
    with server:
        yield server, folder / "repository"


def add(repository: Path, model: Any, name: str = "m", count: int = 1, **settings: Any) -> None:
    folder = repository / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG.format(kind="KIND_MODEL", count=count))
    if isinstance(model, dict):
        model = json.dumps(
            {"model": "fake", **model, "voltriton": {"engine": FAKE, "stop_timeout_s": 2, **settings}}
        )
    (folder / "1" / "model.json").write_text(model)


def load(server: Server) -> tuple[int, str]:
    return server.post("/v2/repository/models/m/load", {})


def hosts(server: Server) -> list[int]:
    return [pid for pid in server.children() if "voltriton.host" in command_line(pid)]


REFUSED = [
    ({"tensor_parallel_size": "4"}, {}, "model.json: tensor_parallel_size: got '4', a whole number is needed"),
    ({}, {"count": 2}, "instance_group.count: got 2, 1 is allowed"),
    ("{", {}, "model.json is not JSON"),
    ({}, {"profil": "cpu"}, "model.json: voltriton.profil is not a setting; did you mean 'profile'?"),
    ({"fail_to_start": "no weights at /nowhere"}, {}, "the engine did not start: no weights at /nowhere"),
    ({"die_at_start": True}, {}, "the engine host ended with signal SIGKILL while starting"),
    ({"start_s": 60}, {"start_timeout_s": 1}, "the engine was not ready within start_timeout_s=1 s"),
    ({}, {"engine": "nowhere:Engine"}, "voltriton.engine: 'nowhere:Engine' cannot be imported"),
    ({}, {"python": "/nowhere/python"}, "/nowhere/python"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "options", "message"), REFUSED, ids=[m[:50] for *_, m in REFUSED])
def test_load_is_refused_with_its_cause_and_leaves_nothing(
    explicit: tuple[Server, Path], model: Any, options: dict[str, Any], message: str
) -> None:
    server, repository = explicit
    add(repository, model, **options)
    code, text = load(server)
    assert code == 400
    assert message in text
    assert "Traceback" not in text
    wait_for(lambda: not server.children(), 15, "the stub to be gone")


def test_the_next_load_works_and_unloads_without_a_trace(explicit: tuple[Server, Path]) -> None:
    server, repository = explicit
    add(repository, {})
    assert load(server)[0] == 200
    body = {"text_input": "a b", "exclude_input_in_output": True}
    assert json.loads(server.post("/v2/models/m/generate", body)[1])["text_output"] == "a b"
    assert len(hosts(server)) == 1
    assert server.post("/v2/repository/models/m/unload", {})[0] == 200
    wait_for(lambda: not server.children(), 15, "the stub and the host to be gone")


def test_metrics_can_be_switched_off(explicit: tuple[Server, Path]) -> None:
    server, repository = explicit
    add(repository, {}, "quiet")
    config = repository / "quiet" / "config.pbtxt"
    config.write_text(
        config.read_text() + 'parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "false" } }\n'
    )
    assert server.post("/v2/repository/models/quiet/load", {})[0] == 200
    assert server.post("/v2/models/quiet/generate", {"text_input": "a"})[0] == 200
    assert 'model="quiet"' not in "".join(
        x for x in server.get("/metrics", server.metrics)[1].splitlines() if "voltriton:" in x
    )
    assert "REPORT_CUSTOM_METRICS is false" in server.log_text()
    server.post("/v2/repository/models/quiet/unload", {})
    wait_for(lambda: not server.children(), 15, "the stub and the host to be gone")


def test_paths_with_spaces(tmp_path: Path) -> None:
    """Triton starts its stub by a line of shell without quotes."""
    from server import fake_repository

    folder = tmp_path / "a folder with 'marks' and $signs"
    folder.mkdir()
    with Server(fake_repository(folder / "my models"), tmp_path / "log") as server:
        code, text = server.post(
            "/v2/models/vllm/generate", {"text_input": "a", "exclude_input_in_output": True}
        )
        assert (code, json.loads(text)["text_output"]) == (200, "a")


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_in_the_log_only_when_asked_for(explicit: tuple[Server, Path], asked: bool) -> None:
    server, repository = explicit
    add(repository, {}, log_prompts=asked)
    assert load(server)[0] == 200
    secret = f"secret-words-{asked}"
    assert server.post("/v2/models/m/generate", {"text_input": secret, "request_id": "one"})[0] == 200
    server.post("/v2/repository/models/m/unload", {})
    wait_for(lambda: not server.children(), 15, "the stub and the host to be gone")
    assert (secret in server.log_text()) is asked
