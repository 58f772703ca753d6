"""Tensors of a long text on the disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch


class States:
    """A list of tensors, of several windows each, in a file without a name: of a long text they are larger than all
    else that is in memory. An item that is set must have the size of the one before."""

    def __init__(self, folder: Path):
        self._fd, name = tempfile.mkstemp(dir=folder)
        Path(name).unlink()
        weakref.finalize(self, os.close, self._fd)
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._starts = [0]

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))

    def append(self, state: torch.Tensor) -> None:
        self._kinds.append((state.dtype, state.shape))
        self._starts.append(self._starts[-1] + state.nbytes)
        self[len(self) - 1] = state

    def __getitem__(self, index: int) -> torch.Tensor:
        dtype, shape = self._kinds[index]
        content = bytearray(self._starts[index + 1] - self._starts[index])
        os.preadv(self._fd, [content], self._starts[index])
        return torch.frombuffer(content, dtype=dtype).reshape(shape)

    def __setitem__(self, index: int, state: torch.Tensor) -> None:
        view = memoryview(state.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        at = self._starts[index]
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done
