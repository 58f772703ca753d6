"""`voltriton patch` on a small tree: apply, verify, revert, upgrade, refusals."""

import hashlib
import json
from pathlib import Path

import pytest
from voltriton.patching import main
from voltriton.patching.series import load

ONE, TWO = "vllm/one.py", "vllm/sub/two.py"
TEXTS = {ONE: "a = 1\nb = 2\nc = 3\n", TWO: "x = 1\n"}


def header(subject: str) -> str:
    return (
        f"Subject: {subject}\n\nBecause of the test.\n\nUpstream: no\nDrop-when: never\nTest: tests/t.py\n\n"
    )


def change(path: str, old: str, new: str) -> str:
    return f"--- a/{path}\n+++ b/{path}\n@@ -1,1 +1,1 @@\n-{old}\n+{new}\n"


def write_series(folder: Path, patches: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.patch"):
        old.unlink()
    for name, text in patches.items():
        (folder / name).write_text(text)
    (folder / "series").write_text("# order\n" + "".join(f"{name}\n" for name in patches))
    touched = sorted(path for path in TEXTS if any(f"+++ b/{path}\n" in text for text in patches.values()))
    pins = "".join(f'"{p}" = ["{hashlib.sha256(TEXTS[p].encode()).hexdigest()}"]\n' for p in touched)
    (folder / "UPSTREAM").write_text(f'version = "0.32.0"\n[packages]\n[files]\n{pins}')


@pytest.fixture
def place(tmp_path):
    """A checkout with two patches (`patches`), and an unpacked vLLM beside it (`tree`)."""
    tree = tmp_path / "tree with a space"
    for path, text in {**TEXTS, "vllm/__init__.py": "", "vllm/_version.py": "version = '0.32.0'\n"}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/t.py").write_text("")
    write_series(
        tmp_path / "patches",
        {
            "0001.patch": header("one") + change(ONE, "a = 1", "a = 10") + change(TWO, "x = 1", "x = 10"),
            "0002.patch": header("two") + change(ONE, "a = 10", "a = 100"),
        },
    )
    return tmp_path


def patch(place: Path, *command: str) -> int:
    folder = ["--patches", str(place / "patches")]
    tree = [] if command[0] == "hash" else ["--tree", str(place / "tree with a space")]
    return main([*folder, *command, *tree])


def contents(place: Path) -> dict[str, bytes]:
    tree = place / "tree with a space"
    return {p.relative_to(tree).as_posix(): p.read_bytes() for p in sorted(tree.rglob("*")) if p.is_file()}


def test_apply_verify_revert_restores_every_byte(place, capsys):
    before = contents(place)
    assert patch(place, "verify") == 1
    assert patch(place, "apply") == 0
    assert contents(place)[ONE] == b"a = 100\nb = 2\nc = 3\n"
    assert contents(place)[TWO] == b"x = 10\n"
    assert patch(place, "verify") == 0
    assert patch(place, "revert") == 0
    assert contents(place) == before
    assert patch(place, "revert") == 0
    capsys.readouterr()


def test_apply_again_changes_nothing(place, capsys):
    patch(place, "apply")
    before = contents(place)
    assert patch(place, "apply") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert contents(place) == before


def test_compiled_files_of_the_old_source_are_dropped(place):
    cache = place / "tree with a space/vllm/__pycache__"
    cache.mkdir()
    (cache / "one.cpython-311.pyc").write_bytes(b"old")
    (cache / "other.cpython-311.pyc").write_bytes(b"old")
    patch(place, "apply")
    assert [p.name for p in cache.iterdir()] == ["other.cpython-311.pyc"]


def test_another_series_replaces_the_one_that_is_there(place):
    before = contents(place)
    patch(place, "apply")
    write_series(place / "patches", {"0003.patch": header("three") + change(TWO, "x = 1", "x = 7")})
    assert patch(place, "verify") == 1
    assert patch(place, "apply") == 0
    assert contents(place)[ONE].decode() == TEXTS[ONE]
    assert contents(place)[TWO] == b"x = 7\n"
    assert patch(place, "verify") == 0
    assert patch(place, "revert") == 0
    assert contents(place) == before


def test_an_interrupted_apply_is_finished_by_the_next(place, monkeypatch):
    from voltriton.patching import tree

    real, calls = tree.replace_source, []

    def fails_at_the_second(path, data):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("no space left on device")
        real(path, data)

    monkeypatch.setattr(tree, "replace_source", fails_at_the_second)
    assert patch(place, "apply") == 1
    monkeypatch.setattr(tree, "replace_source", real)
    assert patch(place, "verify") == 1
    assert patch(place, "apply") == 0
    assert patch(place, "verify") == 0


def test_a_file_changed_by_others_is_named_with_its_hashes_and_nothing_is_done(place, capsys):
    (place / "tree with a space" / ONE).write_text("a = 1\nb = 2\nc = 4\n")
    before = contents(place)
    assert patch(place, "apply") == 1
    message = capsys.readouterr().err
    found = hashlib.sha256(before[ONE]).hexdigest()
    wanted = hashlib.sha256(TEXTS[ONE].encode()).hexdigest()
    assert f"{ONE} has sha256 {found}, pinned {wanted}" in message
    assert message.count("\n") == 1
    assert contents(place) == before


def test_patched_by_hand_a_second_time_is_refused(place, capsys):
    patch(place, "apply")
    (place / "tree with a space" / ONE).write_text("a = 1000\nb = 2\nc = 3\n")
    assert patch(place, "apply") == 1
    assert "changed by others" in capsys.readouterr().err
    assert patch(place, "verify") == 1
    assert f"changed by others {ONE}" in capsys.readouterr().out


def test_another_version_is_refused_by_name(place, capsys):
    (place / "tree with a space/vllm/_version.py").write_text("version = '0.33.1'\n")
    for command in ("apply", "verify"):
        assert patch(place, command) == 1
        message = capsys.readouterr().err
        assert "vllm 0.33.1" in message
        assert "install vllm==0.32.0" in message


def test_a_folder_without_vllm_is_refused(tmp_path, place, capsys):
    assert main(["--patches", str(place / "patches"), "apply", "--tree", str(tmp_path / "tests")]) == 1
    assert "has no vllm/__init__.py" in capsys.readouterr().err


def test_the_record_is_what_the_plugin_reads(place):
    patch(place, "apply")
    record = json.loads(contents(place)["vllm/voltriton-patches.json"])
    assert record["series"] == load(place / "patches").hash
    assert record["files"][TWO] == hashlib.sha256(b"x = 10\n").hexdigest()


def test_hash_changes_with_any_byte_of_a_patch(place, capsys):
    assert patch(place, "hash") == 0
    first = capsys.readouterr().out.strip()
    assert len(first) == 16
    file = place / "patches/0002.patch"
    file.write_text(file.read_text().replace("Because", "because"))
    patch(place, "hash")
    assert capsys.readouterr().out.strip() != first


def test_refresh_moves_line_numbers_and_pins(place):
    tree = place / "tree with a space"
    (tree / ONE).write_text("# new line\n" + TEXTS[ONE])
    (tree / "vllm/_version.py").write_text("version = '0.33.0'\n")
    assert patch(place, "refresh") == 0
    assert patch(place, "check") == 0
    assert patch(place, "apply") == 0
    assert contents(place)[ONE] == b"# new line\na = 100\nb = 2\nc = 3\n"
    assert load(place / "patches").upstream.version == "0.33.0"


def test_refresh_names_the_patch_that_no_longer_fits(place, capsys):
    (place / "tree with a space" / TWO).write_text("y = 1\n")
    assert patch(place, "refresh") == 1
    assert "0001.patch: vllm/sub/two.py: the hunk at line 1 fits in 0 places" in capsys.readouterr().err
