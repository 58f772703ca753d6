from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from voltriton import settings as settings_module
from voltriton.errors import InvalidArgument
from voltriton.settings import PROFILES, Settings, load, load_profile, parse_settings


def write(folder: Path, model: Any, **files: Any) -> Path:
    (folder / "model.json").write_text(model if isinstance(model, str) else json.dumps(model))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_official_model_json_is_taken_as_it_is(tmp_path: Path) -> None:
    given = {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.1, "enforce_eager": True}
    model = load(write(tmp_path, given))
    assert (model.engine_args, model.settings, model.env) == (given, Settings(), {})


def test_model_json_goes_before_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "cpu_features", lambda cpuinfo: frozenset())
    model = load(
        write(tmp_path, {"model": "m", "max_num_seqs": 3, "voltriton": {"profile": "cpu", "env": {"A": "b"}}})
    )
    assert model.engine_args["max_num_seqs"] == 3
    assert model.engine_args["dtype"] == "float32"
    assert (model.env["A"], model.env["HF_HUB_OFFLINE"]) == ("b", "1")


def test_relative_model_path_is_relative_to_its_file(tmp_path: Path) -> None:
    model = load(write(tmp_path, {"model": "../weights"}))
    assert model.engine_args["model"] == str(tmp_path.parent / "weights")


@pytest.mark.parametrize("profile", sorted(p.stem for p in PROFILES.glob("*.json")))
def test_every_value_of_a_profile_has_a_reason(profile: str) -> None:
    data = json.loads((PROFILES / f"{profile}.json").read_text())
    for part in ("engine", "env"):
        for name, entry in data[part].items():
            assert entry["reason"].strip(), name
    assert load_profile(profile)["engine"]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2 avx512f avx512_vnni", "float32"),
        ("fpu avx2 avx512f avx512_bf16", "bfloat16"),
        ("fpu amx_tile amx_bf16", "bfloat16"),
        (None, "float32"),
    ],
)
def test_the_cpu_decides_the_type_of_the_cpu_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str | None, dtype: str
) -> None:
    read = Path.read_text

    def cpuinfo(path: Path, *args: str | None, **kwargs: str | None) -> str:
        if str(path) != "/proc/cpuinfo":
            return read(path, *args, **kwargs)
        if flags is None:
            raise PermissionError(path)
        return f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: \n"

    monkeypatch.setattr(Path, "read_text", cpuinfo)
    assert load_profile("cpu")["engine"]["dtype"] == dtype
    assert load_profile("v100-tp4")["engine"]["dtype"] == "float16"
    (tmp_path / "model.json").write_text(
        '{"model": "x", "dtype": "float16", "voltriton": {"profile": "cpu"}}'
    )
    assert load(tmp_path).engine_args["dtype"] == "float16", "model.json goes before the profile"


BAD = [
    ("{", "is not JSON"),
    ("[]", "a JSON object is needed"),
    ({"voltriton": []}, "model.json: voltriton: got [], a JSON object is needed"),
    ({"voltriton": {"profil": "cpu"}}, "voltriton.profil is not a setting; did you mean 'profile'?"),
    ({"voltriton": {"profile": "v100"}}, "voltriton.profile: got 'v100', there are"),
    ({"voltriton": {"max_queued_requests": "8"}}, "max_queued_requests: got '8', a whole number is needed"),
    ({"voltriton": {"max_queued_requests": True}}, "max_queued_requests: got True, a whole number is needed"),
    ({"voltriton": {"log_prompts": "false"}}, "log_prompts: got 'false', true or false is needed"),
    ({"voltriton": {"stuck_timeout_s": 0}}, "stuck_timeout_s: got 0, at least 0.1 is allowed"),
    ({"voltriton": {"env": {"A": 1}}}, "voltriton.env.A: got 1, a string is needed"),
    ({"voltriton": {"max_max_tokens": 1.5}}, "max_max_tokens: got 1.5, a whole number or null is needed"),
    ({"enable_lora": True}, "multi_lora.json is missing"),
    ({"enable_lora": "true"}, "multi_lora.json is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_model_json_is_refused_by_name(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        load(write(tmp_path, model))
    assert message in str(refused.value)


def test_missing_model_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"model\.json is missing"):
        load(tmp_path)


def test_adapters_are_read_when_enabled(tmp_path: Path) -> None:
    model = load(write(tmp_path, {"enable_lora": True}, multi_lora={"a": "./adapters/a", "b": "/b"}))
    assert model.loras == {"a": str(tmp_path / "adapters" / "a"), "b": "/b"}


def test_whole_numbers_are_numbers_too() -> None:
    assert parse_settings({"stuck_timeout_s": 3}, "x").stuck_timeout_s == 3
