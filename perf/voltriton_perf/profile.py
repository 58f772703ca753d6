"""What `voltriton sla` is to prove: traffic mix, users and targets, read from a small YAML file.

name: seeds
users: {wanted: 128, least: 1, most: 256}
requests_per_user: 3
language: en            # en, zh, mixed
shared_prefix: 0.0      # part of each prompt, 0 to 1
mix:
  - {share: 65, prompt_tokens: 128, output_tokens: 128}
targets:
  ttft_p95_ms: 200      # also itl_, gap_, e2e_ with mean, p50, p90, p95, p99: at most
  user_tokens_s: 28     # of the middle user while decoding: at least
  output_tokens_s: 100  # of all users together: at least; requests_s too
  error_rate: 0.01      # at most
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from voltriton_perf.stats import Summary

INPUTS = Path(__file__).resolve().parents[1] / "inputs"
_LATENCY = re.compile(r"(ttft|itl|gap|e2e)_(mean|p50|p90|p95|p99)_ms")
_AT_LEAST = ("output_tokens_s", "user_tokens_s", "requests_s")


class ProfileError(Exception):
    """One line: file, key, value and what is allowed."""


@dataclass(frozen=True)
class Part:
    """One kind of traffic; shares are relative to their sum."""

    share: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Profile:
    name: str
    wanted: int
    least: int
    most: int
    requests_per_user: int
    language: str
    shared_prefix: float
    mix: tuple[Part, ...]
    targets: dict[str, float]


@dataclass(frozen=True)
class Verdict:
    target: str
    allowed: str
    got: float | None
    met: bool


def load(name: str) -> Profile:
    """A file, or the name of one in perf/inputs. ProfileError says what is wrong with it."""
    path = Path(name)
    if not path.exists() and (INPUTS / f"{name}.yaml").exists():
        path = INPUTS / f"{name}.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in INPUTS.glob("*.yaml")))
        raise ProfileError(f"{name}: {error.strerror}; profiles that come with us: {known}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{name}: no YAML: {' '.join(str(error).split())}") from None
    return parse(data, name)


def parse(data: Any, where: str) -> Profile:
    top = _keys(
        data, where, ("name", "users", "mix", "targets"), ("requests_per_user", "language", "shared_prefix")
    )
    users = _keys(top["users"], f"{where}: users", ("wanted",), ("least", "most"))
    wanted = _whole(users["wanted"], f"{where}: users.wanted")
    least = _whole(users.get("least", 1), f"{where}: users.least")
    most = _whole(users.get("most", wanted * 2), f"{where}: users.most")
    if not least <= wanted <= most:
        raise ProfileError(
            f"{where}: users: got least {least}, wanted {wanted}, most {most}; allowed: in this order"
        )
    if not isinstance(top["mix"], list) or not top["mix"]:
        raise ProfileError(f"{where}: mix: got {top['mix']!r}, allowed: a list of parts")
    language = top.get("language", "en")
    if language not in ("en", "zh", "mixed"):
        raise ProfileError(f"{where}: language: got {language!r}, allowed: en, zh, mixed")
    shared = top.get("shared_prefix", 0.0)
    if not _is_number(shared) or not 0 <= shared <= 1:
        raise ProfileError(f"{where}: shared_prefix: got {shared!r}, allowed: 0 to 1")
    return Profile(
        name=str(top["name"]), wanted=wanted, least=least, most=most,
        requests_per_user=_whole(top.get("requests_per_user", 3), f"{where}: requests_per_user"),
        language=language, shared_prefix=float(shared),
        mix=tuple(_part(part, f"{where}: mix[{i}]") for i, part in enumerate(top["mix"])),
        targets=_targets(top["targets"], f"{where}: targets"),
    )  # fmt: skip


def _part(data: Any, where: str) -> Part:
    part = _keys(data, where, ("share", "prompt_tokens", "output_tokens"), ())
    if not _is_number(part["share"]) or part["share"] <= 0:
        raise ProfileError(f"{where}.share: got {part['share']!r}, allowed: more than 0")
    return Part(
        float(part["share"]),
        _whole(part["prompt_tokens"], f"{where}.prompt_tokens"),
        _whole(part["output_tokens"], f"{where}.output_tokens"),
    )


def _targets(data: Any, where: str) -> dict[str, float]:
    if not isinstance(data, dict) or not data:
        raise ProfileError(f"{where}: got {data!r}, allowed: names with numbers, at least one")
    for name, value in data.items():
        if not (_LATENCY.fullmatch(str(name)) or name in (*_AT_LEAST, "error_rate")):
            known = [
                *_AT_LEAST,
                "error_rate",
                *(f"{m}_{p}_ms" for m in ("ttft", "itl", "e2e") for p in ("p50", "p95")),
            ]
            raise ProfileError(f"{where}.{name} is no target{_nearest(str(name), known)}")
        if not _is_number(value) or value < 0:
            raise ProfileError(f"{where}.{name}: got {value!r}, allowed: 0 or more")
    return {str(name): float(value) for name, value in data.items()}


def _keys(data: Any, where: str, needed: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ProfileError(f"{where}: got {data!r}, allowed: keys {', '.join(needed + optional)}")
    for name in data:
        if name not in needed + optional:
            raise ProfileError(f"{where}: unknown key {name!r}{_nearest(str(name), needed + optional)}")
    if missing := [name for name in needed if name not in data]:
        raise ProfileError(f"{where}: {missing[0]} is missing")
    return data


def _nearest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ProfileError(f"{where}: got {value!r}, allowed: a whole number, 1 or more")
    return value


def judge(targets: dict[str, float], summary: Summary) -> list[Verdict]:
    """One verdict a target. A latency that was not measured (nothing succeeded) is missed."""
    return [_verdict(name, limit, value_of(name, summary)) for name, limit in targets.items()]


def _verdict(name: str, limit: float, got: float | None) -> Verdict:
    at_least = name in _AT_LEAST
    met = got is not None and (got >= limit if at_least else got <= limit)
    return Verdict(name, f"{'at least' if at_least else 'at most'} {limit:g}", got, met)


def value_of(name: str, summary: Summary) -> float | None:
    if name == "error_rate":
        return round(summary.error_rate, 4)
    if name == "user_tokens_s":
        # A user's own speed while its answer is being written: what the middle one sees.
        return round(1000 / summary.itl_ms["p50"], 2) if summary.itl_ms and summary.itl_ms["p50"] else None
    if name in _AT_LEAST:
        return float(getattr(summary, name))
    metric, which, _ = name.split("_")
    spread: dict[str, float] | None = getattr(summary, f"{metric}_ms")
    return spread[which] if spread else None
