"""qwen4_exp's choice among more keys than it may attend to, on the path of a V100: see the program."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)


def test_the_selection_is_that_of_torch():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    program = Path(__file__).with_name("qsa_interpreted.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        row["check"]: row["wrong"] for row in map(json.loads, done.stdout.splitlines()) if "check" in row
    }
    assert found == {"selection, prefill": 0, "selection, decode": 0, "expansion": 0}
