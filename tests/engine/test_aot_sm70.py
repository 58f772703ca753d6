"""Triton kernels on the serving paths compile for Volta: machine code, no fp8 type, shared memory within 96 KB."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
PROGRAM = Path(__file__).with_name("aot_sm70.py")
SHARED_LIMIT = 98304


@pytest.mark.parametrize("group", ["attention", "gdn", "runner", "sampler", "qwen4_exp"])
def test_every_kernel_of_the_group_fits(group, tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run([sys.executable, str(PROGRAM), group], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows
    bad = [row for row in rows if row["error"] or row["cubin"] == 0 or row["shared"] > SHARED_LIMIT]
    assert bad == []
