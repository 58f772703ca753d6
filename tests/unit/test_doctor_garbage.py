"""Whatever a tool says, the doctor answers with rows and never with a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from voltriton.doctor.box import Box, Options
from voltriton.doctor.command import examine
from voltriton.doctor.host import Output, RecordedHost
from voltriton.doctor.rows import STATUSES
from voltriton.doctor.smi import SmiError, parse_smi, parse_topology

GOOD = Path(__file__).parent / "recordings/nvlink-box"
COMMANDS = sorted(path.name for path in (GOOD / "commands").iterdir())
FILES = sorted(str(path.relative_to(GOOD / "root")) for path in (GOOD / "root").rglob("*") if path.is_file())
GARBAGE = ["", "\x00\xff", "N/A", "[Unknown Error]", "<a>", "{}", "-1 -1 -1", "\n\n\n", "9" * 5000]


class Broken(RecordedHost):
    """The good box, one answer replaced."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(GOOD)
        self._name, self._text = name, text

    def run(self, name: str, argv: list[str], timeout_s: float = 20) -> Output:
        return Output(0, self._text) if name == self._name else super().run(name, argv, timeout_s)

    def read(self, path: str) -> str | None:
        return self._text if path == f"/{self._name}" else super().read(path)


def check(host: RecordedHost) -> None:
    for row in examine(Box(host, Options(infiniband=True, deep=True))):
        assert row.status in STATUSES
        assert "the check itself failed" not in row.found, row


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("name", COMMANDS + FILES)
def test_garbage_from_one_source(name: str, text: str) -> None:
    check(Broken(name, text))


@pytest.mark.parametrize("name", COMMANDS)
def test_an_answer_cut_short(name: str) -> None:
    text = (GOOD / "commands" / name).read_text(encoding="utf-8")
    for cut in range(0, len(text), max(1, len(text) // 25)):
        check(Broken(name, text[:cut]))


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_readers_raise_nothing_but_their_own_error(text: str) -> None:
    for reader in (parse_smi, parse_topology):
        try:
            reader(text)
        except SmiError:
            continue
