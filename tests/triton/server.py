"""One private tritonserver for tests: free ports on 127.0.0.1, a repository made for it, an end that is checked."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from voltriton.processes import (
    command_line,
    descendants,
    die_with_parent,
    kill_all,
    remove_shared_memory,
    shared_memory,
)
from voltriton.triton import Layout, compose, default_root, folder_arguments

ROOT = Path(__file__).resolve().parents[2]
FAKE = f"{ROOT}/tests/triton/fake_engine.py:FakeEngine"


def free_ports(count: int) -> list[int]:
    """Below the kernel's own range, so that no outgoing connection takes one before the server does."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def fake_repository(folder: Path, settings: dict[str, Any] | None = None, **engine_args: Any) -> Path:
    """The repository of the product, its engine the scripted one."""
    shutil.copytree(ROOT / "model_repository", folder)
    write_model(folder, settings, **engine_args)
    return folder


def write_model(folder: Path, settings: dict[str, Any] | None = None, **engine_args: Any) -> None:
    model = {
        "model": "fake",
        **engine_args,
        "voltriton": {"engine": FAKE, "stop_timeout_s": 3, **(settings or {})},
    }
    (folder / "vllm" / "1" / "model.json").write_text(json.dumps(model))


class Server:
    """`with Server(repository) as server:` is ready inside, and gone without a trace after."""

    def __init__(
        self,
        repository: Path,
        log: Path,
        *options: str,
        env: dict[str, str] | None = None,
        ready_s: float = 60,
    ):
        self.http, self.grpc, self.metrics = free_ports(3)
        self.log = log
        layout = Layout(default_root())
        compose(layout)
        folders, self._cwd = folder_arguments(layout, repository)
        command = [
            str(layout.server),
            *folders,
            "--http-address=127.0.0.1", f"--http-port={self.http}",
            "--grpc-address=127.0.0.1", f"--grpc-port={self.grpc}",
            "--metrics-address=127.0.0.1", f"--metrics-port={self.metrics}",
            "--exit-timeout-secs=20",
            *options,
        ]  # fmt: skip
        self._command = command
        self._env = {**os.environ, **(env or {})}
        self._ready_s = ready_s
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc}"

    def __enter__(self) -> Server:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
                # A test run that is killed must leave nothing behind.
                preexec_fn=die_with_parent(os.getpid()),
            )
        try:
            wait_for(lambda: self.ready() or self._ended(), self._ready_s, "the server to be ready")
        except BaseException:
            self.stop()
            raise
        return self

    def _ended(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(
                f"tritonserver ended with {self.process.returncode}:\n{self.log_text()[-3000:]}"
            )
        return False

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 40) -> int:
        """SIGTERM; SIGKILL of it and all below where that does not end it. Returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                below = self.children()
                files = shared_memory(below)
                self.process.kill()
                self.process.wait()
                kill_all(lambda: below, 10)
                remove_shared_memory(files)
        return self.process.returncode

    def ready(self) -> bool:
        try:
            return self.get("/v2/health/ready")[0] == 200
        except OSError:
            return False

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        return self._open(urllib.request.Request(f"http://127.0.0.1:{port or self.http}{path}"))

    def post(self, path: str, body: Any, timeout_s: float = 60) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", data=data)
        return self._open(request, timeout_s)

    @staticmethod
    def _open(request: urllib.request.Request, timeout_s: float = 60) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a name with these labels; 0 where there is none."""
        total = 0.0
        try:
            page = self.get("/metrics", self.metrics)[1]
        except OSError:
            return 0.0  # the page is the last thing that a server opens
        for line in page.splitlines():
            head, _, value = line.rpartition(" ")
            if (head == name or head.startswith(name + "{")) and all(
                f'{k}="{v}"' in head for k, v in labels.items()
            ):
                total += float(value)
        return total

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """All processes below the server."""
        assert self.process is not None
        return descendants(self.process.pid)

    def host_pid(self) -> int:
        """The engine host's."""
        for pid in self.children():
            if "voltriton.host" in command_line(pid):
                return pid
        raise AssertionError("no engine host runs")

    def stub_pid(self) -> int:
        for pid in self.children():
            line = command_line(pid)
            if "triton_python_backend_stub" in line and "vllm" in line:
                return pid
        raise AssertionError("no stub runs")


def wait_for(condition: Any, timeout_s: float, what: str) -> Any:
    """Polls; AssertionError with `what` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.02)
    return value


def shm_files() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir()}
