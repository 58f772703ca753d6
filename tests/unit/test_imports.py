"""Which room may import which (docs: CONTRIBUTING.md), read from the source, not from what happens to be loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB_ALLOWED = {"numpy", "triton_python_backend_utils", "voltriton"}


def imports(path: Path) -> set[str]:
    """Full names of all imported modules, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", files("clients", "perf/voltriton_perf"), ids=str)
def test_clients_and_perf_import_neither_backend_nor_vllm(path: Path) -> None:
    assert not tops(path) & {"voltriton", "voltriton_vllm", "vllm", "torch"}


@pytest.mark.parametrize("path", files("backend/voltriton"), ids=str)
def test_vllm_is_imported_in_its_own_room_only(path: Path) -> None:
    if "vllm_engine" not in path.parts:
        assert "vllm" not in tops(path)


@pytest.mark.parametrize("path", files("patches/voltriton_vllm"), ids=str)
def test_the_plugin_imports_nothing_of_ours(path: Path) -> None:
    assert not tops(path) & {"voltriton", "voltriton_client", "voltriton_perf"}


@pytest.mark.parametrize("path", files("backend/voltriton/stub"), ids=str)
def test_the_stub_needs_the_standard_library_and_numpy_only(path: Path) -> None:
    foreign = {name for name in tops(path) if name not in sys.stdlib_module_names}
    assert foreign <= STUB_ALLOWED | {"__future__"}
    ours = {name for name in imports(path) if name.startswith("voltriton.")}
    assert all(name.split(".")[1] in ("errors", "processes", "settings", "wire", "stub") for name in ours)


def test_nothing_of_ours_touches_cuda_or_vllm_when_it_is_imported() -> None:
    """Ranks are started by spawn, but a context made by an import would still sit on GPU 0 (C083)."""
    code = (
        "import sys, voltriton.supervisor, voltriton.host.main, voltriton.host.vllm_engine.engine, voltriton.cli;"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
