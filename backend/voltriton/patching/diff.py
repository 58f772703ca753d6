"""A strict unified-diff applier: hunks fit exactly where they say, or not at all.

No fuzz and no whitespace leniency, so that a patch that applies is the patch that was reviewed. Offsets are
allowed only when a series is moved to a new upstream version (`refresh`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)\n")


class DiffError(Exception):
    """A patch file that cannot be read, or a hunk that does not fit; the message says where."""


@dataclass(frozen=True)
class Hunk:
    """`lines` keep their first character (blank, - or +) and their newline; line numbers begin at 1."""

    old_start: int
    new_start: int
    heading: str
    lines: tuple[str, ...]

    def side(self, new: bool) -> list[str]:
        skip = "-" if new else "+"
        return [line[1:] for line in self.lines if line[0] != skip]

    def render(self) -> str:
        counts = len(self.side(False)), len(self.side(True))
        head = f"@@ -{self.old_start},{counts[0]} +{self.new_start},{counts[1]} @@{self.heading}\n"
        return head + "".join(self.lines)


@dataclass(frozen=True)
class FileDiff:
    path: str
    hunks: tuple[Hunk, ...]

    def render(self) -> str:
        return f"--- a/{self.path}\n+++ b/{self.path}\n" + "".join(hunk.render() for hunk in self.hunks)


def parse(text: str) -> list[FileDiff]:
    """The file diffs of `text`, which begins with a `---` line."""
    lines = text.splitlines(keepends=True)
    diffs: list[FileDiff] = []
    at = 0
    while at < len(lines):
        path = _path(lines, at)
        hunks, at = _hunks(lines, at + 2)
        diffs.append(FileDiff(path, hunks))
    return diffs


def _path(lines: Sequence[str], at: int) -> str:
    old, new = lines[at].rstrip("\n"), (lines[at + 1].rstrip("\n") if at + 1 < len(lines) else "")
    if not old.startswith("--- a/") or new != "+++ b/" + old[6:]:
        raise DiffError(f"expected `--- a/PATH` and `+++ b/PATH` of one file, found {old!r} and {new!r}")
    return old[6:]


def _hunks(lines: Sequence[str], at: int) -> tuple[tuple[Hunk, ...], int]:
    hunks: list[Hunk] = []
    while at < len(lines) and (match := HUNK.fullmatch(lines[at])):
        want = [int(match[2] or 1), int(match[4] or 1)]
        body: list[str] = []
        at += 1
        while want != [0, 0]:
            if at == len(lines) or lines[at][0] not in " -+" or min(want) < 0:
                raise DiffError(f"hunk {match[0].strip()!r} has other line counts than it says")
            want[0] -= lines[at][0] != "+"
            want[1] -= lines[at][0] != "-"
            body.append(lines[at])
            at += 1
        hunks.append(Hunk(int(match[1]), int(match[3]), match[5], tuple(body)))
    if not hunks:
        raise DiffError(
            f"expected a hunk, found {lines[at]!r}" if at < len(lines) else "a file without hunks"
        )
    return tuple(hunks), at


def apply(diff: FileDiff, text: str) -> str:
    """`text` with the hunks applied, each exactly at its line."""
    lines = text.splitlines(keepends=True)
    shift = 0
    for hunk in diff.hunks:
        old, new = hunk.side(False), hunk.side(True)
        at = hunk.old_start - 1 + shift
        if lines[at : at + len(old)] != old or hunk.new_start - 1 != at:
            raise DiffError(f"{diff.path}: the hunk at line {hunk.old_start} does not fit")
        lines[at : at + len(old)] = new
        shift += len(new) - len(old)
    return "".join(lines)


def move(diff: FileDiff, text: str) -> FileDiff:
    """The same hunks with the line numbers at which they fit in `text`; each must fit in one place only."""
    lines = text.splitlines(keepends=True)
    hunks: list[Hunk] = []
    shift = start = 0
    for hunk in diff.hunks:
        old, new = hunk.side(False), hunk.side(True)
        places = [i for i in range(start, len(lines) - len(old) + 1) if lines[i : i + len(old)] == old]
        exact = [i for i in places if i == hunk.old_start - 1]
        if len(exact or places) != 1:
            raise DiffError(f"{diff.path}: the hunk at line {hunk.old_start} fits in {len(places)} places")
        at = (exact or places)[0]
        hunks.append(replace(hunk, old_start=at + 1, new_start=at + 1 + shift))
        shift += len(new) - len(old)
        start = at + len(old)
    return replace(diff, hunks=tuple(hunks))
