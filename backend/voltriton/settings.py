"""What a model is served with: `1/model.json`, a profile, and the parameters of `config.pbtxt`.

`model.json` holds vLLM's engine arguments, as for NVIDIA's backend, and optionally a key `voltriton`
with the settings below. A profile (`profiles/NAME.json`) holds engine arguments and environment
variables, each with its reason; what `model.json` says goes before the profile. Standard library only:
the stub reads this too. The engine arguments' names and types are vLLM's and checked by the host.
A profile's entry may hold other values for CPUs with a feature: `"on_cpu": {"avx512_bf16": "bfloat16"}`.
"""

from __future__ import annotations

import json
import re
import types
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from voltriton.errors import InvalidArgument, nearest

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Settings:
    """Ours, under the key `voltriton` of `model.json`. Numbers carry their unit in their names."""

    # A profile of `profiles/`; None leaves the engine arguments as they are in model.json.
    profile: str | None = None
    # `module:Class` of the engine; `file.py:Class` for one of your own.
    engine: str = "voltriton.host.vllm_engine.engine:VllmEngine"
    # The Python that runs the engine host; None: the one this package was installed for.
    python: str | None = None
    # Environment of the engine host, over the profile's.
    env: dict[str, str] = field(default_factory=dict)

    # Requests that may wait beside the running ones (max_num_seqs); one more is refused.
    max_queued_requests: int = 1024
    # Prompt tokens that may wait for their prefill; None: no limit.
    max_queued_prompt_tokens: int | None = None
    # max_tokens where a request says none: None means vLLM's 16 for prompts and what is left for `messages`.
    default_max_tokens: int | None = None
    # The largest max_tokens a request may ask for.
    max_max_tokens: int | None = None
    # The longest a request may take, queue included; None: no limit.
    max_request_s: float | None = None
    # Longest JSON schema, regular expression or grammar, in characters.
    max_grammar_chars: int = 65536
    # Most and largest images of a request.
    max_images: int = 8
    max_image_bytes: int = 20 << 20

    # How long an engine may take to start, and how long it may make no step with work pending.
    start_timeout_s: float = 1800.0
    stuck_timeout_s: float = 120.0
    # The host reports each second: silence for so long means that it is stopped or hangs.
    silent_timeout_s: float = 30.0
    # A dead engine is started again after this pause, then twice, four times ... of it (60 s at most), and so often
    # within ten minutes.
    restart_pause_s: float = 1.0
    max_restarts: int = 5
    # finalize: how long open requests may go on, and how long the engine may take to stop.
    drain_grace_s: float = 30.0
    stop_timeout_s: float = 15.0

    # How often cancellation is looked for, and threads that send responses.
    poll_interval_ms: int = 150
    sender_threads: int = 2

    # Chat: vLLM's names of parsers, and variables given to every chat template.
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # Adapters that a request may load by name: folders below this one. None: none but those of multi_lora.json.
    lora_folder: str | None = None
    # Prompt text in logs: only when asked for.
    log_prompts: bool = False


@dataclass(frozen=True)
class ModelSettings:
    """All that the host needs to start."""

    settings: Settings
    # vLLM's engine arguments: profile, then model.json over it.
    engine_args: dict[str, Any]
    env: dict[str, str]
    # name -> path, from multi_lora.json
    loras: dict[str, str]


def load(version_folder: Path) -> ModelSettings:
    """Reads `model.json` (and `multi_lora.json`) of a model version.

    Raises InvalidArgument with file, key, value and what is allowed.
    """
    given = read_object(version_folder / "model.json")
    settings = parse_settings(given.pop("voltriton", {}), "model.json: voltriton")
    if settings.lora_folder is not None:
        settings = replace(settings, lora_folder=resolve(settings.lora_folder, version_folder))
    profile = load_profile(settings.profile) if settings.profile else {}
    engine_args = {**profile.get("engine", {}), **given}
    if isinstance(engine_args.get("model"), str):
        engine_args["model"] = resolve(engine_args["model"], version_folder)
    return ModelSettings(
        settings=settings,
        engine_args=engine_args,
        env={**profile.get("env", {}), **settings.env},
        loras=load_loras(version_folder, engine_args.get("enable_lora", False)),
    )


def resolve(path: str, folder: Path) -> str:
    """`./x` and `../x` are relative to the folder of `model.json`; anything else is left to vLLM."""
    if path.startswith(("./", "../")):
        return str((folder / path).resolve())
    return path


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InvalidArgument names file, line and column."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path}: got {type(value).__name__}, a JSON object is needed")
    return value


def parse_settings(value: Any, where: str) -> Settings:
    """Settings from a JSON object; unknown names and wrong types are refused by name."""
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where}: got {value!r}, a JSON object is needed")
    hints = typing.get_type_hints(Settings)
    for name, item in value.items():
        if name not in hints:
            raise InvalidArgument(f"{where}.{name} is not a setting{nearest(name, hints)}")
        check_type(item, hints[name], f"{where}.{name}")
    settings = Settings(**value)
    for name, least in _LEAST.items():
        number = getattr(settings, name)
        if number is not None and number < least:
            raise InvalidArgument(f"{where}.{name}: got {number}, at least {least} is allowed")
    return settings


_LEAST: dict[str, float] = {
    "max_queued_requests": 0, "max_queued_prompt_tokens": 1, "default_max_tokens": 1, "max_max_tokens": 1,
    "max_request_s": 0.001, "max_grammar_chars": 1, "max_images": 0, "max_image_bytes": 1,
    "start_timeout_s": 1, "stuck_timeout_s": 0.1, "silent_timeout_s": 2,
    "restart_pause_s": 0, "max_restarts": 0, "drain_grace_s": 0, "stop_timeout_s": 0.1,
    "poll_interval_ms": 10, "sender_threads": 1,
}  # fmt: skip


def check_type(value: Any, hint: Any, where: str) -> None:
    """Strict: a string is no number and no boolean, a boolean is no number. Raises InvalidArgument."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is types.NoneType:
            if value is None:
                return
        elif kind is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return
        elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            if kind is dict and typing.get_args(option)[1:] == (str,):
                _check_strings(value, where)
            return
    names = " or ".join(_JSON_NAMES.get(typing.get_origin(o) or o, str(o)) for o in options)
    raise InvalidArgument(f"{where}: got {value!r}, {names} is needed")


_JSON_NAMES = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a string",
    dict: "an object", types.NoneType: "null", list: "a list",
}  # fmt: skip


def _check_strings(value: dict[str, Any], where: str) -> None:
    for key, item in value.items():
        if not isinstance(item, str):
            raise InvalidArgument(f"{where}.{key}: got {item!r}, a string is needed")


def load_profile(name: str) -> dict[str, dict[str, Any]]:
    """`{"engine": {...}, "env": {...}}` of a profile on this machine, the reasons left out."""
    known = sorted(p.stem for p in PROFILES.glob("*.json"))
    if name not in known:
        raise InvalidArgument(
            f"voltriton.profile: got {name!r}, there are {', '.join(known)}{nearest(name, known)}"
        )
    data = read_object(PROFILES / f"{name}.json")
    try:
        features = cpu_features(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        features = frozenset()
    return {
        part: {key: profile_value(entry, features) for key, entry in data.get(part, {}).items()}
        for part in ("engine", "env")
    }


def profile_value(entry: dict[str, Any], features: frozenset[str]) -> Any:
    """Of a profile's entry, on a CPU with these features (names as in /proc/cpuinfo)."""
    special: dict[str, Any] = entry.get("on_cpu", {})
    return next((value for feature, value in special.items() if feature in features), entry["value"])


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """What the text of /proc/cpuinfo says of the first core."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def load_loras(version_folder: Path, enabled: Any) -> dict[str, str]:
    """name -> path from `multi_lora.json`, which must be there when `enable_lora` is true (bool or "true")."""
    if enabled is not True and str(enabled).lower() != "true":
        return {}
    path = version_folder / "multi_lora.json"
    loras = read_object(path)
    _check_strings(loras, str(path))
    return {name: resolve(target, version_folder) for name, target in loras.items()}
