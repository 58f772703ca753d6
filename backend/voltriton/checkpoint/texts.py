"""Calibration and test texts as windows of token ids."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from voltriton.checkpoint.errors import CheckpointError

# Plain text is cut into pieces of this many characters, so that a sample of a long book is spread over it.
PIECE_CHARACTERS = 4000


def load_tokenizer(model: Path) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{model}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}"
        ) from error


def windows(tokenizer: Any, files: list[Path], tokens: int, window: int, seed: int) -> list[torch.Tensor]:
    """About `tokens` token ids in windows [1, window], the same share from each file, chosen by `seed`.

    `.jsonl` holds chats (`{"messages": [...]}`, put through the model's template) or texts (`{"text": ...}`);
    every other file is plain text.
    """
    found: list[torch.Tensor] = []
    for file in files:
        share = max(tokens // len(files) // window, 1)
        found += _windows_of(tokenizer, file, share, window, seed)
    return found


def _windows_of(tokenizer: Any, file: Path, count: int, window: int, seed: int) -> list[torch.Tensor]:
    pieces = list(_pieces(tokenizer, file))
    random.Random(seed).shuffle(pieces)
    prefix = _prefix(tokenizer)
    found: list[list[int]] = []
    ids: list[int] = []  # of the window that is not full yet
    for piece in pieces:
        text = tokenizer(piece, add_special_tokens=False)["input_ids"]
        if ids:
            room = window - len(ids)
            ids += text[:room]
            if len(ids) < window:
                continue
            found.append(ids)
            ids = []
            if len(text) <= room:
                continue
        # What attention rests on is at the beginning of a text (arXiv:2309.17453), so a text begins a window, also
        # one of which a part has filled the window before.
        body = text[len(prefix) :] if text[: len(prefix)] == prefix else text
        step = window - len(prefix)
        for begin in range(0, len(body), step):
            ids = prefix + body[begin : begin + step]
            if len(ids) == window:
                found.append(ids)
                ids = []
        if len(found) >= count:
            break
    if not found:
        raise CheckpointError(f"{file} gives {len(ids)} tokens: at least {window} are needed")
    return [torch.tensor([one]) for one in found[:count]]


def _prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer, and so the server, puts before every text: the BOS token, or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _pieces(tokenizer: Any, file: Path) -> Iterator[str]:
    text = read_text(file)
    if file.suffix != ".jsonl":
        for begin in range(0, len(text), PIECE_CHARACTERS):
            yield text[begin : begin + PIECE_CHARACTERS]
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _from_json(tokenizer, line, f"{file}, line {number}")


def read_text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise CheckpointError(f"{file} is empty")
    return text


def _from_json(tokenizer: Any, line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CheckpointError(f"{where}: no JSON: {error}") from None
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return str(row["text"])
    if not (isinstance(row, dict) and isinstance(row.get("messages"), list)):
        raise CheckpointError(f'{where}: expected {{"messages": [...]}} or {{"text": "..."}}')
    if tokenizer.chat_template is None:
        raise CheckpointError(f"{where}: chats need a chat template, and the model has none: give plain text")
    try:
        return str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
    except Exception as error:  # a template is a program of the model's maker and may raise anything
        raise CheckpointError(f"{where}: the model's chat template refuses it: {error}") from error
