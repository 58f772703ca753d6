"""Where the checks get their facts: a real machine, or a recording of one.

Checks never touch the machine themselves. They ask a `Host`, so that a recording (`voltriton doctor --record DIR`)
of somebody's box can be replayed here, and so that the tests need no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from voltriton.doctor.fatbin import FatbinError, device_code


@dataclass(frozen=True)
class Output:
    """What a command said. `code` is None when it could not be started or took too long; `err` then says why."""

    code: int | None
    out: str
    err: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def missing(self) -> bool:
        return self.code is None and self.err == "not found"


class Host(Protocol):
    def run(self, name: str, argv: list[str], timeout_s: float = 20) -> Output:
        """Runs a command; `name` is how a recording calls it."""

    def read(self, path: str) -> str | None:
        """The text of a file, None when it is absent or not readable."""

    def glob(self, pattern: str) -> list[str]:
        """Absolute paths that match, sorted."""

    def env(self, name: str) -> str | None:
        """An environment variable."""

    def device_code(self, path: str) -> list[str]:
        """GPU architectures with code in a shared library, such as `sm_70` or `compute_90` (for PTX)."""


class RealHost:
    def run(self, name: str, argv: list[str], timeout_s: float = 20) -> Output:
        del name
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                timeout=timeout_s,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            return Output(None, "", "not found")
        except subprocess.TimeoutExpired:
            return Output(None, "", f"no answer within {timeout_s:g} s")
        except OSError as error:
            return Output(None, "", str(error))
        return Output(done.returncode, _text(done.stdout), _text(done.stderr))

    def read(self, path: str) -> str | None:
        try:
            return _text(Path(path).read_bytes())
        except OSError:
            return None

    def glob(self, pattern: str) -> list[str]:
        try:
            return sorted(str(path) for path in Path("/").glob(pattern.lstrip("/")))
        except OSError:
            return []

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def device_code(self, path: str) -> list[str]:
        try:
            return device_code(Path(path))
        except (OSError, FatbinError):
            return []


class RecordingHost:
    """Asks the real machine and keeps every answer in a folder that `RecordedHost` can read."""

    def __init__(self, real: Host, folder: Path) -> None:
        self._real = real
        self._folder = folder
        self._notes: dict[str, dict[str, object]] = {"env": {}, "device_code": {}, "glob": {}, "failed": {}}

    def run(self, name: str, argv: list[str], timeout_s: float = 20) -> Output:
        output = self._real.run(name, argv, timeout_s)
        self._write(f"commands/{name}", output.out)
        if not output.ok:
            self._notes["failed"][name] = {"code": output.code, "err": output.err}
        self._save()
        return output

    def read(self, path: str) -> str | None:
        text = self._real.read(path)
        if text is not None:
            self._write(f"root{path}", text)
        return text

    def glob(self, pattern: str) -> list[str]:
        found = self._real.glob(pattern)
        self._notes["glob"][pattern] = found
        self._save()
        return found

    def env(self, name: str) -> str | None:
        value = self._real.env(name)
        if value is not None:
            self._notes["env"][name] = value
            self._save()
        return value

    def device_code(self, path: str) -> list[str]:
        found = self._real.device_code(path)
        self._notes["device_code"][path] = found
        self._save()
        return found

    def _write(self, name: str, text: str) -> None:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def _save(self) -> None:
        self._write("notes.json", json.dumps(self._notes, indent=1, sort_keys=True) + "\n")


class RecordedHost:
    """A machine read from a folder: `commands/NAME`, `root/proc/...`, and `notes.json` for the rest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} is no recording of `voltriton doctor --record`: {error}") from error

    def run(self, name: str, argv: list[str], timeout_s: float = 20) -> Output:
        del argv, timeout_s
        failed = self._notes.get("failed", {}).get(name)
        path = self._folder / "commands" / name
        out = path.read_text(encoding="utf-8") if path.is_file() else None
        if failed is not None:
            return Output(failed["code"], out or "", failed["err"])
        return Output(None, "", "not found") if out is None else Output(0, out)

    def read(self, path: str) -> str | None:
        target = self._folder / f"root{path}"
        return target.read_text(encoding="utf-8") if target.is_file() else None

    def glob(self, pattern: str) -> list[str]:
        return list(self._notes.get("glob", {}).get(pattern, []))

    def env(self, name: str) -> str | None:
        value = self._notes.get("env", {}).get(name)
        return None if value is None else str(value)

    def device_code(self, path: str) -> list[str]:
        return list(self._notes.get("device_code", {}).get(path, []))


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
