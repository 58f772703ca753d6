"""The form of a series: what the checker finds, and that ours is sound."""

import importlib.util
from pathlib import Path

import pytest
from test_patch_tree import ONE, TWO, change, header, patch, place, write_series
from voltriton.patching import main
from voltriton.patching.series import load, problems

REPO = Path(__file__).parents[2]
__all__ = ["place"]  # a fixture of the sibling module

GOOD = header("one") + change(ONE, "a = 1", "a = 10")


def test_our_series_is_well_formed():
    assert problems(REPO / "patches") == []


def test_our_series_applies_and_every_prefix_compiles(capsys):
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    assert main(["check"]) == 0, capsys.readouterr().err


def test_the_plugin_computes_the_same_hash():
    pytest.importorskip("vllm")
    from voltriton_vllm import pin

    assert pin.series_hash(REPO / "patches") == load(REPO / "patches").hash
    assert load(REPO / "patches").upstream.version == pin.VERSION


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD.replace("Subject: one\n", "subject one\n"), "header has no Subject:"),
        (GOOD.replace("Because of the test.\n\n", ""), "no reason below the subject"),
        (GOOD.replace("Upstream: no\n", ""), "header has no Upstream:"),
        (GOOD.replace("Drop-when: never", "Drop-when: "), "header has no Drop-when:"),
        (GOOD.replace("tests/t.py", "tests/nothing.py"), "Test: tests/nothing.py does not exist"),
        (GOOD.replace("\n", "\r\n"), "CR"),
        (GOOD + "Binary files a/x and b/x differ\n", "Binary"),
        (GOOD.replace("@@ -1,1 +1,1 @@", "@@ -1 +1 @@"), "not in the form that refresh writes"),
        (
            header("long") + "--- a/vllm/one.py\n+++ b/vllm/one.py\n@@ -1,0 +1,401 @@\n" + "+y\n" * 401,
            "changes 401",
        ),
    ],
)
def test_faults_of_a_patch_are_found(place, text, fault):
    (place / "patches/0001.patch").write_bytes(text.encode())
    assert any("0001.patch" in line and fault in line for line in problems(place / "patches")), fault


def test_bytes_that_are_no_text_are_found(place):
    (place / "patches/0001.patch").write_bytes(b"\xff" + GOOD.encode())
    assert any("0001.patch" in line and "utf-8" in line for line in problems(place / "patches"))


def test_faults_of_the_list_are_found(place):
    folder = place / "patches"
    (folder / "series").write_text("0001.patch\n0001.patch\n0009.patch\n")
    found = problems(folder)
    assert "series: 0001.patch is listed twice" in found
    assert "series: 0009.patch does not exist" in found
    assert "0002.patch is not in series" in found


def test_a_touched_file_without_a_pin_is_found(place):
    folder = place / "patches"
    file = folder / "UPSTREAM"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if TWO not in line))
    assert any(f"no hash of {TWO}" in line for line in problems(folder))


def test_a_prefix_that_does_not_compile_is_found(place, capsys):
    write_series(
        place / "patches",
        {
            "0001.patch": header("one") + change(ONE, "a = 1", "a = ("),
            "0002.patch": header("two") + change(ONE, "a = (", "a = 2"),
        },
    )
    assert patch(place, "refresh") == 0  # writes UPSTREAM in its form
    assert patch(place, "check") == 1
    assert "0001.patch: vllm/one.py does not compile afterwards" in capsys.readouterr().err
