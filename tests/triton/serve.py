"""`voltriton serve` as a process of its own, for tests that break what it looks after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mounts import seen_by
from server import Server, free_ports, wait_for
from voltriton.processes import alive, descendants, shared_memory
from voltriton.supervisor import state_file
from voltriton.triton import default_root


class Serve(Server):
    """`with Serve(repository, folder) as serve:` is ready inside; what it started is gone after, or it is an error."""

    def __init__(
        self,
        repository: Path,
        folder: Path,
        *options: str,
        before: list[str] | None = None,
        env: dict[str, str] | None = None,
        ready_s: float = 60,
    ) -> None:
        """`before` is what the command is started with (mounts.namespace), `env` is added to the environment."""
        self.http, self.grpc, self.metrics = free_ports(3)
        self.log = folder / "triton.log"
        self.says = folder / "serve.log"
        self._ready_s = ready_s
        self._env = {**os.environ, "VOLTRITON_TEST": "1", **(env or {})}
        self._command = [
            *(before or []),
            sys.executable, "-m", "voltriton.cli", "serve", f"--model-repository={repository}",
            f"--http-port={self.http}", f"--grpc-port={self.grpc}", f"--metrics-port={self.metrics}",
            f"--log={self.log}", "--canary-interval-s=1", *options,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self._seen: set[int] = set()
        self._files: set[str] = set()

    def start(self) -> None:
        with self.says.open("ab") as says:
            self.process = subprocess.Popen(self._command, stderr=says, stdout=says, env=self._env)

    def __enter__(self) -> Serve:
        self.start()
        try:
            wait_for(lambda: self.state() == "ready" or self._ended(), self._ready_s, "voltriton serve")
        except BaseException:
            self.stop()
            raise
        self.look()
        return self

    def _ended(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"voltriton serve ended with {self.process.returncode}: {self.said()}")
        return False

    def status(self) -> dict[str, Any]:
        file = state_file(default_root(), self.http)
        if self.process is not None and self.process.poll() is None:
            file = seen_by(self.process.pid, file)
        try:
            status: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError):
            return {}
        return status

    def state(self) -> str:
        return str(self.status().get("state"))

    def said(self) -> str:
        return self.says.read_text()

    def look(self) -> None:
        """Remembers the processes and their files in /dev/shm, to ask for later."""
        assert self.process is not None
        below = descendants(self.process.pid)
        self._seen |= set(below)
        self._files |= shared_memory(below)

    def server_pid(self) -> int:
        return int(self.status()["server_pid"])

    def wait_until_back(self, repairs: int = 1) -> None:
        wait_for(
            lambda: (self.status().get("repairs", 0) >= repairs and self.state() == "ready") or self._ended(),
            60,
            "the repair",
        )
        self.look()

    def __exit__(self, *exc: object) -> None:
        self.stop()
        if exc[0] is None:
            self.check_nothing_is_left()

    def stop(self, timeout_s: float = 60) -> int:
        assert self.process is not None
        self.look()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def check_nothing_is_left(self, within_s: float = 10) -> float:
        """No process and no file in /dev/shm; returns how long it took."""
        began = time.monotonic()
        wait_for(lambda: not any(map(alive, self._seen)), within_s, "the end of all processes")
        took = time.monotonic() - began
        left = {name for name in self._files if (Path("/dev/shm") / name).exists()}
        assert not left
        return took
