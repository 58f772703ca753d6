"""Makes .venv (PyTorch CPU build, vLLM, this package, tools) and .voltriton (tritonserver); see scripts/setup.

Each step says what it does and how long it took; a step that is done is skipped. A failure is one line that says
what to do, and the next run goes on from there. Only the standard library: nothing is installed yet.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STATE = ROOT / ".voltriton"
LOG = STATE / "setup.log"
LOCK = ROOT / "requirements.lock"

TORCH = "2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDED_DISK_GIB = 6.0
NEEDED_MEMORY_GIB = 4.0
# cgroup v2 and v1, as a container sees its own
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
# pip's words for an index that cannot be reached
UNREACHABLE = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "SSLError",
    "Could not fetch URL",
    "Temporary failure in name resolution",
)


class SetupError(Exception):
    """One line that says what is wrong and what to do."""


def main() -> int:
    if "--undo" in sys.argv[1:]:
        return undo()
    try:
        STATE.mkdir(exist_ok=True)
        with alone(), temporary_folder():
            preflight()
            LOG.write_text("")
            steps()
    except OSError as error:
        print(f"setup: {error.filename or ROOT}: {error.strerror}; mend that and run again", file=sys.stderr)
        return 1
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


@contextmanager
def alone() -> Iterator[None]:
    """One set-up at a time: a second one waits, and finds everything done."""
    with (STATE / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up of this checkout is running: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def temporary_folder() -> Iterator[None]:
    """For all that is started here: /tmp may be small, and what a killed pip leaves must not stay there."""
    folder = STATE / "tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    before = os.environ.pop("TMPDIR", None)
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        os.environ.update({"TMPDIR": before} if before is not None else {})
        shutil.rmtree(folder, ignore_errors=True)


def steps() -> None:
    total = 6
    step(
        1,
        total,
        "Python environment (.venv)",
        make_venv,
        done=lambda: PYTHON.exists() and runs("-m", "pip", "--version"),
    )
    step(2, total, f"PyTorch {TORCH}, CPU build", install_torch, done=has_torch)
    step(3, total, "vLLM and everything else that requirements.lock names", install_lock, done=has_lock)
    step(4, total, "this package", install_self, done=has_self)
    step(5, total, "patches to vLLM", patch_vllm, done=lambda: runs("-m", "voltriton.cli", "patch", "verify"))
    step(6, total, "tritonserver", lambda: run("-m", "voltriton.triton"), done=has_triton)


def step(number: int, total: int, what: str, action: Callable[[], None], done: Callable[[], bool]) -> None:
    label = f"[{number}/{total}] {what}"
    if done():
        print(f"{label}: there already", flush=True)
        return
    began = time.monotonic()
    with Ticker(label):
        action()
    print(f"{label}: {time.monotonic() - began:.0f} s", flush=True)


class Ticker:
    """On a terminal, the seconds so far and what pip is at; elsewhere one line at the beginning."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        if sys.stdout.isatty():
            self._thread.start()
        else:
            print(f"{self._label} ...", flush=True)

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
            print("\r\033[K", end="", flush=True)

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(1.0):
            width = shutil.get_terminal_size().columns - 1
            line = f"{self._label} ... {time.monotonic() - began:.0f} s{pip_is_at()}"
            print(f"\r\033[K{line[:width]}", end="", flush=True)


def pip_is_at() -> str:
    """`, 57 packages, at numpy`, from pip's own words."""
    at = re.findall(r"^Collecting ([\w.-]+)", log_of_this_command(), re.MULTILINE)
    return f", {len(at)} packages, at {at[-1]}" if at else ""


def preflight() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"Linux on x86-64 is needed (tritonserver and vLLM's CPU build are made for it), this is "
            f"{platform.system()} on {platform.machine()}"
        )
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < NEEDED_DISK_GIB and not (has_lock() and has_triton()):
        raise SetupError(
            f"{free:.1f} GiB are free on the disk of {ROOT}, {NEEDED_DISK_GIB:g} are needed: make room there"
        )
    memory = available_memory_gib()
    if memory < NEEDED_MEMORY_GIB:
        raise SetupError(
            f"{memory:.1f} GiB of memory are available, {NEEDED_MEMORY_GIB:g} are needed for the demo model: "
            "close other programs, or use a larger machine"
        )


def available_memory_gib() -> float:
    """What the machine has available, or a container's limit where that is less."""
    limits = [float("inf")]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) / 2**20)
    for file in CONTAINER_LIMITS:
        if file.exists() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text) / 2**30)
    return min(limits)


def make_venv() -> None:
    # A half-made one (no pip in it) is made anew.
    shutil.rmtree(VENV, ignore_errors=True)
    done = child([sys.executable, "-m", "venv", str(VENV)], capture_output=True)
    if done.returncode:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment: install python{version}-venv "
            f"(apt-get install python{version}-venv), or name another Python: PYTHON=/path/to/python make demo"
        )


def has_torch() -> bool:
    # The installed version, without the seconds that importing it takes.
    probe = f"from importlib.metadata import version; assert version('torch').split('+')[0] == '{TORCH}'"
    return runs("-c", probe)


def install_torch() -> None:
    """Tried in this order: VOLTRITON_TORCH (a wheel or an index), what pip is set up with, PyTorch's own CPU index."""
    chosen = os.environ.get("VOLTRITON_TORCH")
    if chosen:
        where = ["--index-url", chosen, f"torch=={TORCH}"] if "://" in chosen else [chosen]
        attempts = [where]
    else:
        attempts = [[f"torch=={TORCH}+cpu"], ["--index-url", TORCH_INDEX, f"torch=={TORCH}"]]
    for attempt in attempts:
        if pip("install", "--no-deps", *attempt):
            return
    raise SetupError(
        f"the CPU build of PyTorch {TORCH} cannot be had (tried: {'; '.join(' '.join(a) for a in attempts)}): "
        f"{last_error()}. Where {TORCH_INDEX} cannot be reached, download torch-{TORCH}+cpu for this Python elsewhere "
        "and run again with VOLTRITON_TORCH=/path/to/the.whl"
    )


def lock_digest() -> str:
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()


def has_lock() -> bool:
    stamp = VENV / "requirements.sha256"
    return stamp.exists() and stamp.read_text() == lock_digest()


def install_lock() -> None:
    if not pip("install", "--no-deps", "-r", str(LOCK)):
        raise SetupError(f"pip could not install what requirements.lock names: {last_error()}")
    (VENV / "requirements.sha256").write_text(lock_digest())


def has_self() -> bool:
    probe = f"import voltriton, sys; sys.exit(not voltriton.__file__.startswith({str(ROOT)!r}))"
    return (VENV / "bin" / "voltriton").exists() and runs("-c", probe) and entry_points_are_current()


def entry_points_are_current() -> bool:
    """Installed from this pyproject.toml: a changed one has other commands or packages."""
    stamp = VENV / "pyproject.sha256"
    return (
        stamp.exists()
        and stamp.read_text() == hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    )


def install_self() -> None:
    if not pip("install", "--no-deps", "-e", str(ROOT)):
        raise SetupError(f"this package could not be installed: {last_error()}")
    (VENV / "pyproject.sha256").write_text(hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest())


def patch_vllm() -> None:
    run("-m", "voltriton.cli", "patch", "apply")


def has_triton() -> bool:
    return (STATE / "bin" / "tritonserver").exists() and (STATE / "backends" / "vllm" / "model.py").exists()


def runs(*args: str) -> bool:
    """Whether the environment's Python can do it; quiet."""
    if not PYTHON.exists():
        return False
    return subprocess.run([str(PYTHON), *args], capture_output=True, cwd=ROOT).returncode == 0


def run(*args: str) -> None:
    done = child([str(PYTHON), *args], capture_output=True, text=True, cwd=ROOT)
    with LOG.open("a") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise SetupError(f"{lines[-1]} (all of it: {LOG})")


def pip(*args: str) -> bool:
    drop_half_installed()
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *args]
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        return child(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT).returncode == 0


def drop_half_installed() -> None:
    """What a killed pip was just installing looks installed to the next one; INSTALLER is written at the end."""
    for info in VENV.glob("lib/python3*/site-packages/*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(info)


def child(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run it to its end, or to ours: a pip that outlives a killed set-up would work against the next one."""
    return subprocess.run(command, preexec_fn=end_with_us, **options)


def end_with_us() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG (linux/prctl.h)


def last_error() -> str:
    """The cause where pip's last command shows a known one, else its own last word."""
    log = log_of_this_command()
    lines = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    text = lines[-1] if lines else "no reason given"
    if "No space left on device" in log:
        text = "the disk is full: make room and run again"
    elif any(words in log for words in UNREACHABLE):
        text = f"the package index cannot be reached: check the network, the proxy, or pip's configuration ({text})"
    elif "(from versions: none)" in log:
        # All that pip says of a closed port where it may try only once.
        text += (
            " (the package index cannot be reached, or has it not for this Python: check pip's configuration)"
        )
    return f"{text} (all of it: {LOG})"


def log_of_this_command() -> str:
    log = LOG.read_text(errors="replace") if LOG.exists() else ""
    return log[max(log.rfind("\n$ "), 0) :]


def undo() -> int:
    """Takes the patches out of vLLM again; the rest is in two folders that can be deleted."""
    done = subprocess.run([str(PYTHON), "-m", "voltriton.cli", "patch", "revert"], cwd=ROOT)
    print(f"to remove everything: rm -r {VENV} {STATE}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
