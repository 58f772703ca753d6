"""One tritonserver: starts it with a model repository and a claim on /dev/shm, asks it, ends it and all below it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from voltriton.claim import Claim, sweep
from voltriton.errors import StartError
from voltriton.processes import (
    alive,
    command_line,
    descendants,
    die_with_parent,
    kill_all,
    session,
    shared_memory,
    survives,
)
from voltriton.triton import Layout, compose, folder_arguments

KEY_HEADER = "voltriton-key"
# `http_proxy` in the environment is for the internet, not for a server of this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# For the end of killed processes; one that is stuck in a driver takes longer, and is not waited for.
KILL_S = 5.0
# From the last answer to the end of the server, whose models unload: longer than an engine's stop_timeout_s. A response
# that leaked in Triton would hold it up for its whole exit timeout.
STOP_S = 25.0
# The model that the supervisor asks and repairs; all others of the repository are loaded too.
ENGINE_MODEL = "vllm"


@dataclass(frozen=True)
class Options:
    repository: Path
    root: Path
    address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    ready_timeout_s: float = 1800.0
    grace_s: float = 30.0
    canary_interval_s: float = 10.0
    canary_timeout_s: float = 30.0
    max_repairs: int = 5
    log: Path | None = None
    extra: tuple[str, ...] = ()


class Hanging(Exception):
    """The server takes requests and answers none: it cannot be expected to unload a model either."""


class Server:
    """One tritonserver process, and what can be asked of it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._key = secrets.token_hex(16)
        self._layout = Layout(options.root.absolute())
        self.process: subprocess.Popen[bytes] | None = None
        self._claim: Claim | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def start(self) -> None:
        """StartError where it cannot be started; it is not ready yet when this returns."""
        check_ports(self.options)
        models = repository_models(self.options.repository)
        if not self._layout.server.exists():
            raise StartError(
                f"no tritonserver at {self._layout.server}: run scripts/setup (or make demo) first"
            )
        compose(self._layout)
        if self._claim is None:
            sweep()
            self._claim = Claim()
        folders, cwd = folder_arguments(self._layout, self.options.repository)
        log = self._open_log()
        try:
            self.process = subprocess.Popen(
                self._command(folders, models, self._claim.prefix),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                # A Ctrl-C is ours: the server is told by a signal of its own, after the drain.
                start_new_session=True,
                # Held by the server and its stubs: the claim lasts as long as one of them does.
                pass_fds=[self._claim.fd],
                preexec_fn=die_with_parent(os.getpid()),
            )
        finally:
            if log is not None:
                log.close()

    def _open_log(self) -> BinaryIO | None:
        if self.options.log is None:
            return None
        try:
            return self.options.log.open("ab")
        except OSError as error:
            raise StartError(f"--log {self.options.log} cannot be written: {error.strerror}") from None

    def _command(self, folders: list[str], models: list[str], region_prefix: str) -> list[str]:
        o = self.options
        restricted = f"model-repository,shared-memory:{KEY_HEADER}={self._key}"
        return [
            str(self._layout.server),
            *folders,
            "--model-control-mode=explicit",
            *[f"--load-model={name}" for name in models],
            f"--http-address={o.address}", f"--http-port={o.http_port}",
            f"--grpc-address={o.address}", f"--grpc-port={o.grpc_port}",
            f"--metrics-address={o.address}", f"--metrics-port={o.metrics_port}",
            # Loading, unloading and shared memory are for us alone.
            f"--http-restricted-api={restricted}",
            f"--grpc-restricted-protocol={restricted}",
            f"--exit-timeout-secs={round(max(o.grace_s, STOP_S))}",
            # Few cores gain from fewer delivery threads (measured: half of tritonserver's CPU a response).
            "--backend-config=python,thread-pool-size=4",
            f"--backend-config=python,shm-region-prefix-name={region_prefix}",
            *o.extra,
        ]  # fmt: skip

    def request(self, path: str, body: Any = None, timeout_s: float = 5.0) -> tuple[int, str]:
        """Status and text; OSError where nothing answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{self.options.address}:{self.options.http_port}{path}",
            data=data,
            method="GET" if body is None else "POST",
            headers={KEY_HEADER: self._key},
        )
        try:
            with _OPENER.open(request, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("/v2/health/ready")[0] == 200
        return False

    def canary(self, model: str) -> str | None:
        """One token through the whole path; None when well, otherwise what went wrong.

        Raises Hanging where nothing answers and nothing moves: a long queue alone is no illness.
        """
        limit_s = self.options.canary_timeout_s
        body = {
            "text_input": ".", "max_tokens": 1, "exclude_input_in_output": True,
            "timeout_ms": max(1, round(limit_s * 1000)),
        }  # fmt: skip
        before = self.progress()
        try:
            code, text = self.request(f"/v2/models/{model}/generate", body, limit_s + 1.0)
        except TimeoutError:
            code, text = 0, "DEADLINE_EXCEEDED"
        except OSError as error:
            return str(error)
        # An overloaded engine, or one that is being started again, looks after itself.
        if code == 200 or "UNAVAILABLE: overloaded" in text or "it is being started again" in text:
            return None
        if "is not healthy" in text:
            # Triton's own word for a stub that shows no sign of life.
            raise Hanging(text.strip()[:300])
        if "DEADLINE_EXCEEDED" in text:
            if self.progress() != before:
                return None
            raise Hanging(f"no answer within {limit_s:g} s, and nothing else is being answered")
        return text.strip()[:300]

    def reload(self, model: str) -> None:
        """Unload and load; StartError where one of them fails.

        Triton says that a model is unloaded when it has only begun to, and never ends where a response leaked: the
        old engine would keep its memory, so nothing is loaded beside it.
        """
        before = [pid for pid in self.children() if self._serves(pid, model)]
        self.request(f"/v2/repository/models/{model}/unload", {}, self.options.grace_s + 30)
        deadline = time.monotonic() + self.options.grace_s + 30
        while any(map(alive, before)):
            if time.monotonic() > deadline:
                raise StartError(f"{model} was not unloaded within {self.options.grace_s + 30:g} s")
            time.sleep(0.1)
        code, text = self.request(f"/v2/repository/models/{model}/load", {}, self.options.ready_timeout_s)
        if code != 200:
            raise StartError(f"{model} could not be loaded again: {text.strip()[:500]}")

    @staticmethod
    def _serves(pid: int, model: str) -> bool:
        line = command_line(pid)
        return "triton_python_backend_stub" in line and f"/{model}/" in line

    def children(self) -> list[int]:
        """Also when the server itself is dead: its stubs stay in its session."""
        if self.pid is None:
            return []
        own = {pid for pid in session(self.pid) if pid != self.pid}
        return sorted(own.union(descendants(self.pid), *map(descendants, own)))

    def note_shared_memory(self) -> None:
        """Writes down what the engines' processes have in /dev/shm: one that is killed leaves it there."""
        if self._claim is not None:
            self._claim.note(shared_memory(self.children()))

    def stubs(self) -> set[int]:
        return {pid for pid in self.children() if "triton_python_backend_stub" in command_line(pid)}

    def hosts(self) -> list[int]:
        return [pid for pid in self.children() if "-m voltriton.host" in command_line(pid)]

    def open_requests(self) -> int:
        """By the stubs' own count; 0 where the metrics cannot be read."""
        return int(self.metric("voltriton:requests_open"))

    def progress(self) -> float:
        """Grows with every token and every end of a request."""
        names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "voltriton:requests_total")
        return sum(map(self.metric, names))

    def metric(self, name: str) -> float:
        """Sum over all labels; 0 where the metrics cannot be read."""
        with contextlib.suppress(OSError):
            return read_metric(f"{self.options.address}:{self.options.metrics_port}", name, timeout_s=2.0)
        return 0.0

    def drain(self) -> None:
        """Every engine host refuses new requests from now on, and ends the open ones when its grace is over.

        One whose Python is still starting would be killed by the signal: it is to be told later.
        """
        for pid in self.hosts():
            if survives(pid, signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """The server and all below it, at once."""
        self._end(0.0)

    def stop(self, timeout_s: float) -> int:
        """SIGTERM, and SIGKILL when the time is over; returns the exit status. Nothing below the server lives after."""
        return self._end(timeout_s)

    def _end(self, timeout_s: float) -> int:
        if self.process is None:
            return 0
        self.note_shared_memory()
        below = self.children()
        if timeout_s > 0:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.process.kill()
        self.process.wait()
        # Also after an orderly end: a server whose exit timeout is over leaves its children, and what they have mapped
        # could not be removed.
        kill_all(lambda: {*below, *self.children()}, KILL_S)
        if self._claim is not None:
            self._claim.clean()
        return self.process.returncode

    def release(self) -> None:
        """After the end: nothing of the server stays in /dev/shm."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None


def read_metric(address: str, name: str, timeout_s: float) -> float:
    """A metric of a running server, summed over all labels. OSError where the metrics cannot be read."""
    with _OPENER.open(f"http://{address}/metrics", timeout=timeout_s) as response:
        lines = response.read().decode().splitlines()
    return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(name + "{"))


def repository_models(repository: Path) -> list[str]:
    """Names of the models in a repository; StartError where there is none."""
    if not repository.is_dir():
        raise StartError(f"no model repository at {repository}")
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        raise StartError(f"no model in {repository}: a model is a folder with a config.pbtxt")
    return models


def load_failure(log: Path | None, begin: int) -> str | None:
    """What tritonserver says of a model that did not load, in what it has written to its log since `begin`."""
    if log is None:
        return None
    with log.open("rb") as text:
        text.seek(begin)
        for line in text.read().decode(errors="replace").splitlines():
            if "failed to load '" in line:
                return line.partition("failed to load ")[2].strip().rstrip('"').replace('\\"', '"')
    return None


def check_ports(options: Options, remedy: str = "choose another with --{name}-port") -> None:
    """StartError that names a port which is taken; tritonserver would say so only after loading the models."""
    seen: dict[int, str] = {}
    for name, port in (
        ("http", options.http_port), ("grpc", options.grpc_port), ("metrics", options.metrics_port),
    ):  # fmt: skip
        if port and seen.setdefault(port, name) != name:
            raise StartError(
                f"{name} port {port} is the {seen[port]} port already; {remedy.format(name=name)}"
            )
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.address, port))
            except OSError as error:
                raise StartError(
                    f"{name} port {port} on {options.address} cannot be used ({error.strerror}); "
                    f"{remedy.format(name=name)}, or stop what uses it"
                ) from None
            except OverflowError:
                raise StartError(f"{name} port: got {port}, allowed: 1 to 65535") from None
