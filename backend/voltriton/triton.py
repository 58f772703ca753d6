"""A tritonserver that can serve our backend, laid out in one folder of ours (`.voltriton`).

    triton/            the package nvidia-pytriton, unpacked: server, Python backend, stubs
    stub-env/          a virtual environment with numpy 1.26, for the stub alone: the stub of Triton 24.10 was built
                       with a pybind11 that aborts on numpy 2, and vLLM needs numpy 2
    backends/python/   Triton's Python backend; its stub is started by a script that puts stub-env first on PATH
                       (the interpreter inside is isolated: the PATH is the one thing that it looks at)
    backends/vllm/     our backend
    bin/tritonserver   the server

`python -m voltriton.triton --root DIR` makes it; a second run finds everything there and says so.
"""

from __future__ import annotations

import argparse
import ctypes.util
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from voltriton.errors import StartError

PYTRITON = "nvidia-pytriton==0.7.0"
STUB_NUMPY = "numpy==1.26.4"
# backend/vllm/model.py of this checkout, or of the installed copy
BACKEND_ENTRY = Path(__file__).resolve().parents[1] / "vllm" / "model.py"


@dataclass(frozen=True)
class Layout:
    """Where things are under the root."""

    root: Path

    @property
    def package(self) -> Path:
        return self.root / "triton"

    @property
    def home(self) -> Path:
        return self.package / "pytriton" / "tritonserver"

    @property
    def stub_env(self) -> Path:
        return self.root / "stub-env"

    @property
    def backends(self) -> Path:
        return self.root / "backends"

    @property
    def server(self) -> Path:
        return self.root / "bin" / "tritonserver"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def run(self) -> Path:
        return self.root / "run"


def default_root() -> Path:
    """`VOLTRITON_HOME`, or `.voltriton` beside this checkout's pyproject.toml, or in the current folder."""
    if home := os.environ.get("VOLTRITON_HOME"):
        return Path(home)
    checkout = Path(__file__).resolve().parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / ".voltriton"


def install(root: Path) -> Layout:
    """Makes what is missing. StartError with one line that says what to do."""
    layout = Layout(root.absolute())
    root.mkdir(parents=True, exist_ok=True)
    if not (layout.home / "bin" / "tritonserver").exists():
        _unpack(layout)
    if not (layout.stub_env / "done").exists():
        _make_stub_env(layout)
    compose(layout)
    return layout


def compose(layout: Layout) -> None:
    """The backend directory and the server's link; cheap, and done again whenever something could have moved."""
    python = layout.backends / "python"
    python.mkdir(parents=True, exist_ok=True)
    source = layout.home / "backends" / "python"
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        # Copies: Triton refuses a backend whose files are links that lead out of its folder.
        _copy(source / name, python / name)
    stub = layout.home / "python_backend_stubs" / _python_version() / "triton_python_backend_stub"
    if not stub.exists():
        raise StartError(f"{PYTRITON} has no stub for Python {_python_version()}: use 3.11 or 3.12")
    _make_executable(stub)
    _write(python / "triton_python_backend_stub", _stub_script(layout, stub), 0o755)
    (layout.backends / "vllm").mkdir(exist_ok=True)
    _copy(BACKEND_ENTRY, layout.backends / "vllm" / "model.py")
    # The stub's interpreter finds this package through its own environment.
    _write(_site(layout) / "voltriton.pth", f"{BACKEND_ENTRY.parents[1]}\n", 0o644)
    layout.server.parent.mkdir(exist_ok=True)
    _make_executable(layout.home / "bin" / "tritonserver")
    _link(layout.home / "bin" / "tritonserver", layout.server)


def folder_arguments(layout: Layout, repository: Path) -> tuple[list[str], Path | None]:
    """The options that name folders, and the folder that the server must be started in (None: any).

    Triton starts a stub by a line of shell without quotes: a path with a space in it would be cut there, and the load
    would hang. Such paths are named relative to our root, or by a link in it.
    """
    repository, backends, cwd = repository.absolute(), layout.backends, None
    if not (_plain(repository) and _plain(backends)):
        cwd, backends = layout.root, Path("backends")
        if not _plain(repository):
            link = Path("run") / f"repository-{digest(str(repository).encode())[:12]}"
            layout.run.mkdir(parents=True, exist_ok=True)
            _link(repository, layout.root / link)
            repository = link
    return [f"--model-repository={repository}", f"--backend-directory={backends}"], cwd


def _plain(path: Path) -> bool:
    return re.fullmatch(r"[\w./+:@%,=-]+", str(path)) is not None


def _stub_script(layout: Layout, stub: Path) -> str:
    """Environment for the stub alone; what it replaces is kept for the engine host, which must not inherit it."""
    lines = [
        "#!/bin/sh",
        "# Written by voltriton.triton: the stub's interpreter takes its numpy from stub-env.",
        'export VOLTRITON_STUB_PATH="$PATH"',
        f'export PATH={shlex.quote(str(layout.stub_env / "bin"))}:"$PATH"',
        f': "${{VOLTRITON_PYTHON:={sh_default(sys.executable)}}}"',
        "export VOLTRITON_PYTHON",
    ]
    folder = libpython_folder(layout)
    if folder is not None:
        lines += [
            'if [ -n "${LD_LIBRARY_PATH+set}" ]; then export VOLTRITON_STUB_LD_LIBRARY_PATH="$LD_LIBRARY_PATH"; fi',
            f'export LD_LIBRARY_PATH={shlex.quote(str(folder))}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',
        ]
    return "\n".join([*lines, f'exec {shlex.quote(str(stub))} "$@"', ""])


def sh_default(value: str) -> str:
    """For use inside `${NAME:=...}` within double quotes."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")


def libpython_folder(layout: Layout) -> Path | None:
    """The folder of this Python's shared library where the loader would not find it by itself.

    StartError where there is none: the stub embeds Python and cannot start without.
    """
    name = f"libpython{_python_version()}.so.1.0"
    for folder in (Path(str(sysconfig.get_config_var("LIBDIR"))), layout.root / "libpython"):
        if (folder / name).exists():
            return folder
    if ctypes.util.find_library(f"python{_python_version()}"):
        return None
    return _fetch_libpython(layout, name)


def _fetch_libpython(layout: Layout, name: str) -> Path:
    """Debian and Ubuntu: `apt-get download` needs no root."""
    package = f"libpython{_python_version()}"
    folder = layout.root / "libpython"
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        with tempfile.TemporaryDirectory() as tmp:
            done = subprocess.run(
                ["apt-get", "-q", "download", package], cwd=tmp, capture_output=True, text=True
            )
            debs = list(Path(tmp).glob("*.deb"))
            if done.returncode == 0 and debs:
                subprocess.run(["dpkg-deb", "-x", str(debs[0]), tmp], check=True)
                for found in Path(tmp).rglob(name):
                    folder.mkdir(exist_ok=True)
                    shutil.copy(found, folder / name)
                    return folder
    raise StartError(
        f"{name} is not on this machine and Triton's Python stub needs it: install the package {package} "
        f"(apt-get install {package}), or use a Python that was built with --enable-shared"
    )


def _unpack(layout: Layout) -> None:
    # Always the same folder: what a killed run left in it (300 MB) goes with the next one.
    tmp = layout.root / "unpacking"
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        pip("download", "--no-deps", "--only-binary=:all:", "-d", str(tmp), PYTRITON)
        (wheel,) = tmp.glob("*.whl")
        fresh = tmp / "triton"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)
        shutil.rmtree(layout.package, ignore_errors=True)
        fresh.rename(layout.package)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _make_stub_env(layout: Layout) -> None:
    shutil.rmtree(layout.stub_env, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(layout.stub_env)], check=True)
    pip(
        "install",
        "--no-deps",
        "--only-binary=:all:",
        "--no-compile",
        "--target",
        str(_site(layout)),
        STUB_NUMPY,
    )
    (layout.stub_env / "done").touch()


def pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args, "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise StartError(
            f"pip {args[0]} {args[-1]} failed ({last[-1].removeprefix('ERROR: ')}): check the network, the proxy and "
            "pip's configuration"
        )


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _site(layout: Layout) -> Path:
    return layout.stub_env / "lib" / f"python{_python_version()}" / "site-packages"


def _copy(source: Path, target: Path) -> None:
    """Only where the content differs, and by renaming: a server that runs is not disturbed."""
    if (
        target.is_file()
        and not target.is_symlink()
        and digest(target.read_bytes()) == digest(source.read_bytes())
    ):
        return
    fresh = target.with_suffix(".new")
    shutil.copyfile(source, fresh)
    fresh.rename(target)


def _link(source: Path, target: Path) -> None:
    if target.is_symlink() and target.resolve() == source.resolve():
        return
    target.unlink(missing_ok=True)
    target.symlink_to(source)


def _make_executable(path: Path) -> None:
    # A wheel unpacked by zipfile has no mode bits. Nothing is changed where there is nothing to change: the file
    # system may be read-only.
    mode = path.stat().st_mode
    if mode & 0o755 != 0o755:
        path.chmod(mode | 0o755)


def _write(path: Path, text: str, mode: int) -> None:
    if path.exists() and not path.is_symlink() and digest(path.read_bytes()) == digest(text.encode()):
        return
    # A new file, not a changed one: a stub that runs from the old one is not disturbed.
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(mode)
    fresh.rename(path)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Lays out tritonserver with our backend.")
    parser.add_argument("--root", type=Path, default=default_root())
    args = parser.parse_args(argv)
    try:
        layout = install(args.root)
    except (StartError, OSError, subprocess.CalledProcessError) as error:
        print(f"voltriton: {error}", file=sys.stderr)
        return 1
    print(f"tritonserver: {layout.server}\nbackends: {layout.backends}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
