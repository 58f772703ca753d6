"""A vLLM on disk: which one it is, what state its files are in, and changing them safely."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from voltriton.patching.series import PatchError, Series

RECORD = "vllm/voltriton-patches.json"  # read by voltriton_vllm.pin at every start
ORIGINALS = "vllm/voltriton-originals.zip"
PINNED, PATCHED, CHANGED = "as published", "patched", "changed by others"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Tree:
    """`root` holds the folder `vllm`: a site-packages folder or an unpacked source package."""

    root: Path
    name: str
    version: str

    def read(self, path: str) -> bytes:
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            raise PatchError(
                f"{self.root / path} is missing: install {self.name} {self.version} anew"
            ) from None

    def record(self) -> dict[str, Any]:
        """What the last `apply` wrote; empty where there was none."""
        try:
            found: dict[str, Any] = json.loads((self.root / RECORD).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found

    def originals(self) -> dict[str, bytes]:
        try:
            with zipfile.ZipFile(self.root / ORIGINALS) as archive:
                return {name: archive.read(name) for name in archive.namelist()}
        except (FileNotFoundError, zipfile.BadZipFile):
            return {}


def find_tree(given: Path | None) -> Tree:
    """The tree that was given, or the installed vLLM, found without importing it."""
    root = given if given is not None else _installed_root()
    if not (root / "vllm" / "__init__.py").is_file():
        raise PatchError(f"{root} has no vllm/__init__.py: give the folder that holds `vllm`")
    name, version = _identity(root)
    return Tree(root, name, version)


def _installed_root() -> Path:
    spec = PathFinder.find_spec("vllm", sys.path)
    if spec is None or spec.origin is None:
        raise PatchError("vLLM is not installed here: run scripts/setup, or give --tree")
    return Path(spec.origin).parents[1]


def _identity(root: Path) -> tuple[str, str]:
    for found in metadata.distributions(path=[str(root)]):
        if re.fullmatch(r"vllm(-cpu)?", found.name.lower().replace("_", "-")):
            return found.name, found.version
    package_info = root / "PKG-INFO"
    if package_info.is_file() and (match := re.search(r"^Version: (\S+)$", package_info.read_text(), re.M)):
        return "vllm", match[1]
    version_file = root / "vllm" / "_version.py"
    if version_file.is_file() and (match := re.search(r"version = '([^']+)'", version_file.read_text())):
        return "vllm", match[1]
    raise PatchError(f"{root}: cannot tell which version of vLLM this is (no metadata, no vllm/_version.py)")


def require_version(tree: Tree, series: Series) -> None:
    if tree.version.split("+")[0] != series.upstream.version:
        raise PatchError(
            f"{tree.name} {tree.version} in {tree.root} is not the pinned version: "
            f"install {tree.name}=={series.upstream.version}"
        )


def pristine(tree: Tree, series: Series) -> dict[str, bytes]:
    """Published bytes of every file that this or an earlier series touches; refuses others' changes."""
    record, originals = tree.record(), tree.originals()
    ours = record.get("files", {}).items() | record.get("previous", {}).items()
    found: dict[str, bytes] = {}
    faults: list[str] = []
    for path in sorted({*series.touched(), *record.get("files", {}), *record.get("previous", {})}):
        data = tree.read(path)
        pins = series.upstream.files.get(path, ())
        before = originals.get(path)
        if sha256(data) in pins or before == data:
            found[path] = data
        elif before is not None and (path, sha256(data)) in ours and (not pins or sha256(before) in pins):
            found[path] = before
        else:
            faults.append(f"{path} has sha256 {sha256(data)}, pinned {' or '.join(pins) or 'none'}")
    if faults:
        raise PatchError(
            f"{tree.root}: changed by others, so nothing was done: {'; '.join(faults)}. "
            f"Install {tree.name}=={series.upstream.version} anew."
        )
    return found


def patched(series: Series, before: dict[str, bytes]) -> dict[str, bytes]:
    """All files of `before`, those that the series touches in their patched form."""
    texts = {path: before[path].decode("utf-8") for path in series.touched()}
    return before | {path: text.encode("utf-8") for path, text in series.apply(texts).items()}


def apply(tree: Tree, series: Series) -> list[str]:
    """Bring the tree to exactly this series; returns the files that had to be written."""
    require_version(tree, series)
    before = pristine(tree, series)
    after = patched(series, before)
    files = {path: sha256(after[path]) for path in series.touched()}
    changed = [path for path, data in after.items() if tree.read(path) != data]
    record = {"version": series.upstream.version, "series": series.hash, "files": files}
    if not changed and tree.record() == record:
        return []
    # First what is needed to undo or finish an interrupted run, then the files.
    _write_originals(tree, before)
    write(tree.root / RECORD, _json(record | {"previous": tree.record().get("files", {})}))
    for path in changed:
        replace_source(tree.root / path, after[path])
    write(tree.root / RECORD, _json(record))
    _write_originals(tree, {path: before[path] for path in series.touched()})
    return changed


def revert(tree: Tree, series: Series) -> list[str]:
    """Restore the published bytes; returns the files that had to be written."""
    before = pristine(tree, series)
    changed = [path for path, data in before.items() if tree.read(path) != data]
    for path in changed:
        replace_source(tree.root / path, before[path])
    for path in (RECORD, ORIGINALS):
        (tree.root / path).unlink(missing_ok=True)
    return changed


def states(tree: Tree, series: Series) -> dict[str, str]:
    """State of every touched file: PINNED, PATCHED (with this very series) or CHANGED."""
    try:
        after = patched(series, pristine(tree, series))
    except PatchError:
        after = {}
    result: dict[str, str] = {}
    for path in series.touched():
        data = tree.read(path)
        if after.get(path) == data:
            result[path] = PATCHED
        else:
            result[path] = PINNED if sha256(data) in series.upstream.files.get(path, ()) else CHANGED
    return result


def _json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


def _write_originals(tree: Tree, files: dict[str, bytes]) -> None:
    with tempfile.TemporaryFile() as buffer:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, data in sorted(files.items()):
                archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
        buffer.seek(0)
        write(tree.root / ORIGINALS, buffer.read())


def write(path: Path, data: bytes) -> None:
    """Write beside and rename, so that a reader sees the old bytes or the new ones."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def replace_source(path: Path, data: bytes) -> None:
    """Write a Python file and drop its compiled forms (their time stamps count whole seconds)."""
    write(path, data)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
