"""Lays NVIDIA's tritonserver (/opt/tritonserver of its image) out where `voltriton serve` looks for the package's.

`python -m voltriton.triton` then finds a server there, makes the rest, and downloads none.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from voltriton.triton import Layout, default_root

NGC = Path("/opt/tritonserver")


def main() -> int:
    home = Layout(default_root()).home
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = NGC / "backends/python/triton_python_backend_stub"
    if not stub.is_file():
        print(f"{stub} is not there: this is no image of NVIDIA's Triton", file=sys.stderr)
        return 1
    copies = {
        stub: home / "python_backend_stubs" / python / stub.name,
        NGC / "backends/python/libtriton_python.so": home / "backends/python/libtriton_python.so",
        NGC / "backends/python/triton_python_backend_utils.py": home
        / "backends/python/triton_python_backend_utils.py",
    }
    for source, target in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    (home / "bin").mkdir(exist_ok=True)
    (home / "bin/tritonserver").symlink_to(NGC / "bin/tritonserver")
    return 0


if __name__ == "__main__":
    sys.exit(main())
