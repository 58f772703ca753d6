"""The patch series: `patches/UPSTREAM` (the pin), `patches/series` (the order), `patches/*.patch`."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from voltriton.patching.diff import DiffError, FileDiff, apply, move, parse

HEADERS = ("Subject", "Upstream", "Drop-when", "Test")
MAX_CHANGED_LINES = 400


class PatchError(Exception):
    """Nothing was changed; the message is one line that says what is wrong and what to do."""


@dataclass(frozen=True)
class Upstream:
    """The pin: vLLM's version, SHA-256 of its packages, and the allowed SHA-256 of every file we touch."""

    version: str
    packages: dict[str, str]
    files: dict[str, tuple[str, ...]]

    def render(self) -> str:
        rows = ["# The vLLM that the series is for. Written by `voltriton patch refresh`; packages by hand."]
        rows += [f'version = "{self.version}"', "", "[packages]  # file name: SHA-256"]
        rows += [f'"{name}" = "{sha}"' for name, sha in sorted(self.packages.items())]
        rows += ["", "[files]  # before patching; SHA-256 in any of the packages"]
        for path, hashes in sorted(self.files.items()):
            rows.append(f'"{path}" = [{", ".join(f"{chr(34)}{sha}{chr(34)}" for sha in hashes)}]')
        return "\n".join(rows) + "\n"


@dataclass(frozen=True)
class Patch:
    name: str
    header: str
    diffs: tuple[FileDiff, ...]

    def render(self) -> str:
        return self.header + "".join(diff.render() for diff in self.diffs)

    def fields(self) -> dict[str, str]:
        found = re.findall(r"^([A-Z][A-Za-z-]+): (.*)$", self.header, re.MULTILINE)
        return {key: value.strip() for key, value in found}

    def reason(self) -> str:
        """The prose between the subject and the other fields."""
        rest = self.header.split("\n", 1)[1] if "\n" in self.header else ""
        return re.split(r"^[A-Z][A-Za-z-]+: ", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()

    def changed_lines(self) -> int:
        return sum(line[0] != " " for diff in self.diffs for hunk in diff.hunks for line in hunk.lines)


@dataclass(frozen=True)
class Series:
    folder: Path
    upstream: Upstream
    patches: tuple[Patch, ...]

    @property
    def hash(self) -> str:
        """The same as `voltriton_vllm.pin.series_hash`, which may not import this package."""
        digest = hashlib.sha256()
        for patch in self.patches:
            digest.update(patch.name.encode() + b"\0" + (self.folder / patch.name).read_bytes())
        return digest.hexdigest()[:16]

    def touched(self) -> list[str]:
        return sorted({diff.path for patch in self.patches for diff in patch.diffs})

    def apply(self, files: dict[str, str]) -> dict[str, str]:
        """Texts after the whole series; `files` has every touched file before it."""
        result = dict(files)
        for patch in self.patches:
            result.update(apply_one(patch, result))
        return result


def apply_one(patch: Patch, files: dict[str, str]) -> dict[str, str]:
    """Only the files that `patch` changes, after it."""
    try:
        return {diff.path: apply(diff, files[diff.path]) for diff in patch.diffs}
    except DiffError as error:
        raise PatchError(f"{patch.name}: {error}") from None


def move_one(patch: Patch, files: dict[str, str]) -> Patch:
    try:
        return Patch(patch.name, patch.header, tuple(move(diff, files[diff.path]) for diff in patch.diffs))
    except DiffError as error:
        raise PatchError(f"{patch.name}: {error}; change that patch by hand and keep its purpose") from None


def default_folder() -> Path:
    """`patches/` of the checkout that the plugin was installed from (it lies beside the plugin)."""
    spec = importlib.util.find_spec("voltriton_vllm")
    folder = Path(spec.origin).parents[1] if spec is not None and spec.origin else Path("patches")
    if not (folder / "series").is_file():
        raise PatchError(
            f"no series of patches in {folder}: install voltriton from its checkout, or give --patches"
        )
    return folder


def load(folder: Path) -> Series:
    return Series(folder, load_upstream(folder), tuple(load_patch(folder, n) for n in series_names(folder)))


def series_names(folder: Path) -> list[str]:
    lines = (line.strip() for line in (folder / "series").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def load_upstream(folder: Path) -> Upstream:
    try:
        data = tomllib.loads((folder / "UPSTREAM").read_text(encoding="utf-8"))
        files = {path: tuple(hashes) for path, hashes in data["files"].items()}
        return Upstream(data["version"], dict(data["packages"]), files)
    except (OSError, ValueError, KeyError) as error:
        raise PatchError(f"{folder / 'UPSTREAM'} cannot be read: {error!r}") from None


def load_patch(folder: Path, name: str) -> Patch:
    try:
        text = (folder / name).read_bytes().decode("utf-8")
        begin = re.search(r"^--- a/", text, re.MULTILINE)
        if begin is None:
            raise DiffError("no `--- a/PATH` line")
        return Patch(name, text[: begin.start()], tuple(parse(text[begin.start() :])))
    except (OSError, UnicodeDecodeError, DiffError) as error:
        raise PatchError(f"{folder / name}: {error}") from None


def problems(folder: Path) -> list[str]:
    """What is wrong with the series as files: one line a fault, none when all is well."""
    names = series_names(folder)
    found = [f"series: {name} is listed twice" for name in sorted({n for n in names if names.count(n) > 1})]
    found += [f"series: {name} does not exist" for name in names if not (folder / name).is_file()]
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*.patch")}
    found += [f"{name} is not in series" for name in sorted(present - set(names))]
    for name in dict.fromkeys(names):
        if (folder / name).is_file():
            found += [f"{name}: {fault}" for fault in patch_problems(folder, name)]
    return found or upstream_problems(folder)


def patch_problems(folder: Path, name: str) -> list[str]:
    try:
        patch = load_patch(folder, name)
    except PatchError as error:
        return [str(error)]
    fields = patch.fields()
    found = [f"header has no {key}:" for key in HEADERS if not fields.get(key)]
    if not patch.header.startswith("Subject: "):
        found.append("the first line is not Subject:")
    if not patch.reason():
        found.append("no reason below the subject")
    raw = (folder / name).read_bytes()
    if b"\r" in raw:
        found.append("has CR line ends")
    elif patch.render().encode() != raw:
        found.append("is not in the form that refresh writes")
    if patch.changed_lines() > MAX_CHANGED_LINES:
        found.append(
            f"changes {patch.changed_lines()} lines, allowed {MAX_CHANGED_LINES}: new code goes to the plugin"
        )
    tests = [t for t in re.split(r"[,\s]+", fields.get("Test", "")) if t]
    return found + [f"Test: {t} does not exist" for t in tests if not (folder.parent / t).exists()]


def upstream_problems(folder: Path) -> list[str]:
    series = load(folder)
    touched, pinned = set(series.touched()), set(series.upstream.files)
    found = [f"UPSTREAM: no hash of {path}, which a patch changes" for path in sorted(touched - pinned)]
    found += [f"UPSTREAM: {path} is changed by no patch" for path in sorted(pinned - touched)]
    if series.upstream.render() != (folder / "UPSTREAM").read_text(encoding="utf-8"):
        found.append("UPSTREAM: is not in the form that refresh writes")
    return found
