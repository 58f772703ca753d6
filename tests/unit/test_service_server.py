"""How tritonserver is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from voltriton.server import STOP_S, Options, Server
from voltriton.settings import Settings


@pytest.mark.parametrize(("grace_s", "exit_s"), [(0, STOP_S), (2, STOP_S), (30, 30), (120.4, 120)])
def test_triton_waits_for_models_that_unload_however_short_the_grace(
    tmp_path: Path, grace_s: float, exit_s: float
) -> None:
    server = Server(Options(repository=tmp_path, root=tmp_path, grace_s=grace_s))
    options = [o for o in server._command([], [], "region") if o.startswith("--exit-timeout-secs=")]
    assert options == [f"--exit-timeout-secs={exit_s:.0f}"]
    assert exit_s > Settings().stop_timeout_s, "what an engine has for its end"
