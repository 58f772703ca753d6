"""The strict diff applier: exact or refused."""

import pytest
from voltriton.patching.diff import DiffError, apply, move, parse

OLD = "".join(f"line {i}\n" for i in range(1, 21))
DIFF = """--- a/x.py
+++ b/x.py
@@ -2,3 +2,4 @@ def f():
 line 2
-line 3
+line three
+line three and a half
 line 4
@@ -18,3 +19,2 @@
 line 18
-line 19
 line 20
"""


def test_parse_and_render_are_inverse():
    (diff,) = parse(DIFF)
    assert diff.path == "x.py"
    assert diff.render() == DIFF


def test_apply_changes_only_what_the_hunks_say():
    (diff,) = parse(DIFF)
    lines = apply(diff, OLD).splitlines()
    assert lines[1:5] == ["line 2", "line three", "line three and a half", "line 4"]
    assert lines[-2:] == ["line 18", "line 20"]
    assert len(lines) == 20


@pytest.mark.parametrize(
    "text",
    [
        "a line more\n" + OLD,  # an offset
        OLD.replace("line 4\n", "line 4 \n"),  # whitespace
        OLD.replace("line 18", "line eighteen"),  # context
        "",
    ],
)
def test_what_does_not_fit_exactly_is_refused(text):
    (diff,) = parse(DIFF)
    with pytest.raises(DiffError, match=r"x\.py: the hunk at line \d+ does not fit"):
        apply(diff, text)


def test_move_finds_the_new_lines_and_apply_then_fits():
    (diff,) = parse(DIFF)
    shifted = "new first line\n" + OLD
    moved = move(diff, shifted)
    assert [hunk.old_start for hunk in moved.hunks] == [3, 19]
    assert apply(moved, shifted) == "new first line\n" + apply(diff, OLD)


def test_move_refuses_two_places():
    (diff,) = parse("--- a/x\n+++ b/x\n@@ -9,1 +9,1 @@\n-same\n+other\n")
    with pytest.raises(DiffError, match="fits in 2 places"):
        move(diff, "same\nsame\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--- a/x\n+++ b/y\n@@ -1,1 +1,1 @@\n-a\n+b\n", "of one file"),
        ("--- a/x\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-a\n", "of one file"),
        ("--- a/x\n+++ b/x\n", "without hunks"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,1 @@\n-a\n+b\n", "other line counts"),
        ("--- a/x\n+++ b/x\nBinary files differ\n", "expected a hunk"),
    ],
)
def test_malformed_diffs_are_refused(text, message):
    with pytest.raises(DiffError, match=message):
        parse(text)
