"""The folder for an engine host's temporary files: gone with it, however it ended, and never taken from a live one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from voltriton.errors import StartError
from voltriton.stub.scratch import Scratch

HOLD = """
import sys, time
from voltriton.stub.scratch import Scratch
print(Scratch(sys.argv[1]).path, flush=True)
time.sleep(60)
"""


def test_removed_with_what_is_in_it(tmp_path: Path) -> None:
    scratch = Scratch(str(tmp_path))
    (scratch.path / "socket").touch()
    assert scratch.path.parent == tmp_path
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    scratch.remove()
    scratch.remove()
    assert not list(tmp_path.iterdir())


def test_a_killed_ones_folder_goes_with_the_next_start_and_a_live_ones_stays(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        Scratch(str(tmp_path)).remove()
        assert folder.is_dir()
        other.kill()
        other.wait()
        assert folder.is_dir()
    Scratch(str(tmp_path)).remove()
    assert not list(tmp_path.iterdir())


def test_a_child_that_has_the_descriptor_holds_it(tmp_path: Path) -> None:
    scratch = Scratch(str(tmp_path))
    with subprocess.Popen(["sleep", "60"], pass_fds=[scratch.fd]) as child:
        os.close(scratch.fd)  # as where the stub was killed
        Scratch(str(tmp_path)).remove()
        assert scratch.path.is_dir()
        child.kill()
    Scratch(str(tmp_path)).remove()
    assert not scratch.path.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "kept").mkdir(parents=True)
    link = tmp_path / "voltriton-host-abc"
    link.symlink_to(other)
    Scratch(str(tmp_path)).remove()
    assert (other / "kept").is_dir()


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"temporary files cannot be written to .*none.*set TMPDIR"):
        Scratch(str(tmp_path / "none"))
