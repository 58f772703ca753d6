"""An output folder that is either whole or not there.

Everything is written into a hidden folder beside the wanted one and renamed at the very end, so a reader
never sees half a model. A journal in it names the finished tensors: after a kill, the same command goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from types import TracebackType

import torch

from voltriton.checkpoint.errors import CheckpointError
from voltriton.checkpoint.tensors import FileWriter, Spec, Stored

SHARD_BYTES = 4 << 30
SYNC_BYTES = 512 << 20  # a crash of the machine costs at most this much work
SPARE_BYTES = 64 << 20


def check_output(out: Path) -> None:
    """Refuse an output that would overwrite something."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CheckpointError(f"{out} is there already and not empty: name another folder")


def check_free_disk(where: Path, need_bytes: int, what: str) -> None:
    parent = where
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < need_bytes + SPARE_BYTES:
        raise CheckpointError(
            f"{what} needs {_gb(need_bytes + SPARE_BYTES)} of free disk at {parent}, there are {_gb(free)}: "
            "free some or choose another folder"
        )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def shards_of(specs: list[Spec], limit: int = SHARD_BYTES) -> dict[str, list[Spec]]:
    """File name -> its tensors, in order, each file at most `limit` bytes unless one tensor is larger."""
    groups: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups)}


class ModelFolder:
    """Context manager; on a clean exit the folder appears under its name, otherwise it stays hidden."""

    def __init__(self, out: Path, specs: list[Spec], identity: str):
        """`identity`: changes with the source and the options; a journal of another one is void."""
        self._out = out
        self._temp = out.parent / f".{out.name}.partial"
        self._specs = specs
        self._sizes = {spec.name: spec.nbytes for spec in specs}
        self._identity = hashlib.sha256((identity + repr(specs)).encode()).hexdigest()
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._pending_bytes = 0
        self._files: list[FileWriter] = []
        self._home: dict[str, FileWriter] = {}
        self.done: set[str] = set()

    def __enter__(self) -> ModelFolder:
        check_output(self._out)
        self._temp.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            self._read_journal()
            self.check_room(0, f"writing {self._out}")
            self._open_files()
        except BaseException as error:
            self._leave(type(error))
            raise
        return self

    def _take_lock(self) -> None:
        self._lock_fd = os.open(self._temp / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise CheckpointError(f"{self._out} is being written by another process: wait for it") from None

    def _read_journal(self) -> None:
        journal = self._temp / ".journal"
        lines = journal.read_text().splitlines() if journal.exists() else []
        if lines and lines[0] == self._identity:
            self.done = set(lines[1:]) & {s.name for s in self._specs}
            return
        for old in self._temp.iterdir():
            if old.name != ".lock":
                old.unlink() if not old.is_dir() else shutil.rmtree(old)
        journal.write_text(self._identity + "\n")

    def check_room(self, extra_bytes: int, what: str) -> None:
        """Refuse what needs more disk than there is: all that is not done yet, and `extra_bytes` beside it."""
        left = sum(s.nbytes for s in self._specs if s.name not in self.done)
        check_free_disk(self._temp, left + extra_bytes, what)

    def _open_files(self) -> None:
        shards = shards_of(self._specs)
        for name, specs in shards.items():
            writer = FileWriter(self._temp / name, specs)
            self._files.append(writer)
            self._home.update({s.name: writer for s in specs})
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(s.nbytes for s in self._specs)},
                "weight_map": {s.name: name for name, specs in shards.items() for s in specs},
            }
            self.write_json("model.safetensors.index.json", index)

    def write(self, name: str, byte_offset: int, data: torch.Tensor) -> None:
        self._home[name].write(name, byte_offset, data)

    def finish(self, *names: str) -> None:
        """These tensors are complete. They count as done once their bytes are on the disk."""
        with self._lock:
            self._pending += names
            self._pending_bytes += sum(self._sizes[n] for n in names)
            if self._pending_bytes >= SYNC_BYTES:
                self._checkpoint()

    def stored(self, name: str) -> Stored:
        """A tensor that was written, by this run or one before."""
        return self._home[name].stored(name)

    def save(self) -> None:
        """Put all finished tensors on the disk now: for work that takes longer than writing it does."""
        with self._lock:
            self._checkpoint()

    def _checkpoint(self) -> None:
        for file in self._files:
            file.sync()
        with (self._temp / ".journal").open("a") as journal:
            journal.write("".join(f"{name}\n" for name in self._pending))
        self.done |= set(self._pending)
        self._pending, self._pending_bytes = [], 0

    def write_json(self, name: str, content: object) -> None:
        (self._temp / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    def copy(self, file: Path) -> None:
        shutil.copyfile(file, self._temp / file.name)

    @property
    def path(self) -> Path:
        """Where the files are while they are being written (for libraries that save by themselves)."""
        return self._temp

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or not issubclass(kind, (CheckpointError, OSError)):
                self._checkpoint()  # a kill or Ctrl-C: the next run goes on from here
            if kind is None:
                self._publish()
        finally:
            self._leave(kind)

    def _leave(self, kind: type[BaseException] | None) -> None:
        for file in self._files:
            file.close()
        if kind is not None and issubclass(kind, (CheckpointError, OSError)):
            shutil.rmtree(self._temp, ignore_errors=True)  # bad input or a full disk: leave nothing
        os.close(self._lock_fd)

    def _publish(self) -> None:
        missing = [s.name for s in self._specs if s.name not in self.done]
        if missing:
            raise CheckpointError(f"{self._out}: {missing[0]} was not written")
        for name in (".journal", ".lock"):
            (self._temp / name).unlink()
        for file in self._temp.iterdir():
            file.chmod(0o644)
            _sync_path(file)
        _sync_path(self._temp)
        self._temp.rename(self._out)
        _sync_path(self._out.parent)


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
