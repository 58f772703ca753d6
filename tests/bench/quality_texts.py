"""Texts for the quality table: `python tests/bench/quality_texts.py OUT` writes OUT/calib_* and OUT/test_*, no text in both.

Chats come from two packages of the Python index (voltriton.checkpoint.demo_texts), prose from Debian's documentation
packages, fetched by apt-get without root and unpacked with dpkg-deb. The prose tested on is another book than those
calibrated on. The books are under the GPL or CC-BY-SA, so they are fetched and not kept in the repository.
"""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

from voltriton.checkpoint.demo_texts import demo_texts

CALIBRATION_BOOKS = {
    "en": ("debian-reference-en", "debian-faq"),
    "zh": ("debian-reference-zh-cn", "debian-faq-zh-cn", "maint-guide-zh-cn"),
}
TESTED = ("debian-handbook", {"en": "en-US", "zh": "zh-CN"})
SKIPPED = ("pre", "script", "style", "nav", "table")
LEAST_CHARACTERS = 40
EVERY = 4  # one chat in so many is for the test


class Paragraphs(HTMLParser):
    """The text of paragraphs and titles, without listings and tables."""

    def __init__(self) -> None:
        super().__init__()
        self._skipping = 0
        self._text = ""
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipping += tag in SKIPPED
        self._end(tag)

    def handle_endtag(self, tag: str) -> None:
        self._skipping -= tag in SKIPPED and self._skipping > 0
        self._end(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._text += data

    def _end(self, tag: str) -> None:
        if tag in ("p", "div", "h1", "h2", "h3", "li", "dd", "dt"):
            text = re.sub(r"\s+", " ", self._text).strip()
            self._text = ""
            if len(text) >= LEAST_CHARACTERS:
                self.found.append(text)


def book(pages: Iterable[Path], language: str) -> str:
    """Paragraphs in order, each once; of a Chinese book those that were translated."""
    found: dict[str, None] = {}
    for page in sorted(pages):
        parser = Paragraphs()
        content = gzip.decompress(page.read_bytes()) if page.suffix == ".gz" else page.read_bytes()
        parser.feed(content.decode("utf-8"))
        found |= dict.fromkeys(p for p in parser.found if language != "zh" or is_chinese(p))
    return "\n\n".join(found)


def is_chinese(text: str) -> bool:
    return len(re.findall(r"[\u4e00-\u9fff]", text)) > 0.3 * len(text)


def unpacked(package: str, work: Path) -> Path:
    subprocess.run(["apt-get", "download", "-q", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
    (archive,) = work.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, work / package], check=True)
    return work / package


def pages_of(folder: Path) -> Iterator[Path]:
    """HTML pages: of the packages here, those of the wanted language only."""
    yield from (p for p in folder.rglob("*.html*") if p.suffix in (".html", ".gz"))


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    languages = tuple(CALIBRATION_BOOKS)
    for language, chats in zip(languages, demo_texts(languages, out / "cache"), strict=True):
        lines = chats.read_text(encoding="utf-8").splitlines(keepends=True)
        tested = lines[::EVERY]
        calibrated = [line for i, line in enumerate(lines) if i % EVERY]
        write(
            out / f"calib_chat_{language}.jsonl", "".join(line for line in calibrated if line not in tested)
        )
        write(out / f"test_chat_{language}.jsonl", "".join(tested))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for language, packages in CALIBRATION_BOOKS.items():
            text = "\n\n".join(book(pages_of(unpacked(p, work)), language) for p in packages)
            write(out / f"calib_prose_{language}.txt", text)
        package, folders = TESTED
        handbook = unpacked(package, work)
        for language, folder in folders.items():
            pages = handbook.glob(f"usr/share/doc/*/html/{folder}/*.html")
            write(out / f"test_handbook_{language}.txt", book(pages, language))


def write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    print(f"{file}: {len(text)} characters")


if __name__ == "__main__":
    main()
