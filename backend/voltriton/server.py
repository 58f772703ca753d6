"""`voltriton serve`: starts tritonserver with a model repository, looks after it, drains and stops it.

What it looks after (docs/operations.md has the table with the measured times):

* a stub that died: Triton keeps its streams open for ever and calls the model ready, so the server is started again
  at once, which ends them with an error;
* a model that does not answer a canary of one token, or an engine that was given up: unload and load (a plain load
  does nothing);
* a server that ended by itself: started again. All with growing pauses, and no oftener than the limit.

Exit status: 0 stopped as asked, 1 could not start, 3 given up after too many repairs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from voltriton.errors import StartError
from voltriton.processes import alive, command_line, descendants, die_with_parent
from voltriton.triton import Layout, compose, default_root

RESTART_WINDOW_S = 600.0
MAX_BACKOFF_S = 60.0
KEY_HEADER = "voltriton-key"
# Models below are taken from the repository in this order of need; any other name is loaded too.
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


@dataclass
class Status:
    """Written to `run/serve.json` whenever it changes; `voltriton status` shows it."""

    state: str = "starting"
    pid: int = field(default_factory=os.getpid)
    server_pid: int | None = None
    since: float = field(default_factory=time.time)
    repairs: int = 0
    last_failure: str | None = None
    http: str = ""
    grpc: str = ""
    metrics: str = ""
    models: list[str] = field(default_factory=list)


class Server:
    """One tritonserver process, and what can be asked of it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._key = secrets.token_hex(16)
        self._layout = Layout(options.root.absolute())
        self.process: subprocess.Popen[bytes] | None = None

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
        log = self.options.log.open("ab") if self.options.log else None
        try:
            self.process = subprocess.Popen(
                self._command(models),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                # A Ctrl-C is ours: the server is told by a signal of its own, after the drain.
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        finally:
            if log is not None:
                log.close()

    def _command(self, models: list[str]) -> list[str]:
        o = self.options
        restricted = f"model-repository,shared-memory:{KEY_HEADER}={self._key}"
        return [
            str(self._layout.server),
            f"--model-repository={o.repository.absolute()}",
            f"--backend-directory={self._layout.backends}",
            "--model-control-mode=explicit",
            *[f"--load-model={name}" for name in models],
            f"--http-address={o.address}", f"--http-port={o.http_port}",
            f"--grpc-address={o.address}", f"--grpc-port={o.grpc_port}",
            f"--metrics-address={o.address}", f"--metrics-port={o.metrics_port}",
            # Loading, unloading and shared memory are for us alone.
            f"--http-restricted-api={restricted}",
            f"--grpc-restricted-protocol={restricted}",
            f"--exit-timeout-secs={max(1, round(o.grace_s))}",
            # Few cores gain from fewer delivery threads (measured: half of tritonserver's CPU a response).
            "--backend-config=python,thread-pool-size=4",
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
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("/v2/health/ready")[0] == 200
        return False

    def canary(self, model: str) -> str | None:
        """One token through the whole path; None when well, otherwise what went wrong."""
        body = {"text_input": ".", "max_tokens": 1, "exclude_input_in_output": True}
        try:
            code, text = self.request(f"/v2/models/{model}/generate", body, self.options.canary_timeout_s)
        except TimeoutError:
            return f"no answer within {self.options.canary_timeout_s:g} s"
        except OSError as error:
            return str(error)
        # An overloaded engine, or one that is being started again, looks after itself.
        if code == 200 or "UNAVAILABLE: overloaded" in text or "it is being started again" in text:
            return None
        return text.strip()[:300]

    def reload(self, model: str) -> None:
        """Unload and load; StartError with the server's words where the load fails."""
        self.request(f"/v2/repository/models/{model}/unload", {}, self.options.grace_s + 30)
        code, text = self.request(f"/v2/repository/models/{model}/load", {}, self.options.ready_timeout_s)
        if code != 200:
            raise StartError(f"{model} could not be loaded again: {text.strip()[:500]}")

    def children(self) -> list[int]:
        return descendants(self.pid) if self.pid is not None else []

    def stubs(self) -> set[int]:
        return {pid for pid in self.children() if "triton_python_backend_stub" in command_line(pid)}

    def hosts(self) -> list[int]:
        return [pid for pid in self.children() if "-m voltriton.host" in command_line(pid)]

    def open_requests(self) -> int:
        """By the stubs' own count; 0 where the metrics cannot be read."""
        url = f"http://{self.options.address}:{self.options.metrics_port}/metrics"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2.0) as response:
            lines = response.read().decode().splitlines()
            return sum(
                int(float(x.rpartition(" ")[2])) for x in lines if x.startswith("voltriton:requests_open{")
            )
        return 0

    def drain(self) -> None:
        """Every engine host refuses new requests from now on, and ends the open ones when its grace is over."""
        for pid in self.hosts():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """The server and all below it, at once."""
        if self.process is None:
            return
        below = self.children()
        self.process.kill()
        self.process.wait()
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def stop(self, timeout_s: float) -> int:
        """SIGTERM, and SIGKILL when the time is over; returns the exit status."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout_s)
            self.kill()
        return self.process.returncode


class Supervisor:
    """Keeps one server alive until it is told to stop."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._server = Server(options)
        self._stop = threading.Event()
        self._drain = threading.Event()
        self._repairs: deque[float] = deque()
        self._status_file = Layout(options.root.absolute()).run / "serve.json"
        self.status = Status(
            http=f"{options.address}:{options.http_port}",
            grpc=f"{options.address}:{options.grpc_port}",
            metrics=f"{options.address}:{options.metrics_port}",
        )

    def run(self, on_ready: Callable[[], None] = lambda: None) -> int:
        """Blocks until stopped; returns the exit status."""
        try:
            self._start()
            self._say("ready")
            on_ready()
            return self._watch()
        except StartError as error:
            self._say(str(error))
            self._set("failed", str(error))
            return 1
        finally:
            self._server.stop(self._options.grace_s + 10)
            self._remove_status()

    def stop(self) -> None:
        self._stop.set()

    def drain(self) -> None:
        self._drain.set()

    def _start(self) -> None:
        self._set("starting")
        self.status.models = repository_models(self._options.repository)
        self._server.start()
        self.status.server_pid = self._server.pid
        deadline = time.monotonic() + self._options.ready_timeout_s
        while not self._server.ready():
            process = self._server.process
            if process is not None and process.poll() is not None:
                raise StartError(
                    f"tritonserver ended with status {process.returncode} while starting; "
                    f"the reason is in {self._options.log or 'its output above'}"
                )
            if time.monotonic() > deadline or self._stop.is_set():
                raise StartError(f"not ready within {self._options.ready_timeout_s:g} s")
            time.sleep(0.1)
        self._stubs = self._server.stubs()
        self._set("ready")

    def _watch(self) -> int:
        next_canary = time.monotonic() + self._options.canary_interval_s
        while not self._stop.wait(0.25):
            if self._drain.is_set() and self.status.state == "ready":
                self._set("draining")
                self._say("draining: new requests are refused")
                self._server.drain()
            failure = self._dead()
            if failure is not None:
                if not self._repair(failure, self._restart):
                    return 3
            elif time.monotonic() > next_canary and self.status.state == "ready":
                next_canary = time.monotonic() + self._options.canary_interval_s
                failure = self._sick()
                if failure is not None and not self._repair(failure, self._reload):
                    return 3
        return self._finish()

    def _dead(self) -> str | None:
        """What no canary is needed for: the server ended, or one of its stubs did."""
        process = self._server.process
        if process is None or process.poll() is not None:
            return f"tritonserver ended with status {process.returncode if process else None}"
        for pid in self._stubs:
            if not alive(pid):
                return f"the Python stub {pid} died; Triton would keep its requests open for ever"
        return None

    def _sick(self) -> str | None:
        if ENGINE_MODEL not in self.status.models:
            return None
        failure = self._server.canary(ENGINE_MODEL)
        return None if failure is None or self._stop.is_set() else f"canary: {failure}"

    def _repair(self, failure: str, how: Callable[[], None]) -> bool:
        """False when it has been tried too often; a failed repair is tried again by starting the server anew."""
        while not self._stop.is_set():
            now = time.monotonic()
            self._repairs.append(now)
            while self._repairs[0] < now - RESTART_WINDOW_S:
                self._repairs.popleft()
            self._set("repairing", failure)
            self._say(failure)
            if len(self._repairs) > self._options.max_repairs:
                self._say(f"given up: {len(self._repairs)} repairs within {RESTART_WINDOW_S:g} s")
                self._set("failed", failure)
                return False
            if len(self._repairs) > 1:
                self._stop.wait(min(2.0 ** (len(self._repairs) - 2), MAX_BACKOFF_S))
            try:
                how()
            except (StartError, OSError) as error:
                failure, how = str(error), self._restart
                continue
            self.status.repairs += 1
            self._set("ready", failure)
            self._say("ready again")
            return True
        return True

    def _reload(self) -> None:
        self._say(f"unloading and loading {ENGINE_MODEL}")
        self._server.reload(ENGINE_MODEL)
        self._stubs = self._server.stubs()

    def _restart(self) -> None:
        self._say("starting tritonserver again")
        self._server.kill()
        self._start()

    def _finish(self) -> int:
        """Open requests may finish within the grace; new ones are refused meanwhile."""
        self._set("draining")
        self._say(f"stopping: open requests may finish within {self._options.grace_s:g} s")
        self._server.drain()
        deadline = time.monotonic() + self._options.grace_s
        # The stubs report once a second.
        time.sleep(min(1.2, self._options.grace_s))
        while self._server.open_requests() and time.monotonic() < deadline:
            time.sleep(0.1)
        status = self._server.stop(max(10.0, self._options.grace_s))
        self._set("stopped")
        return 0 if status == 0 else 1

    def _set(self, state: str, failure: str | None = None) -> None:
        self.status.state, self.status.since = state, time.time()
        if failure is not None:
            self.status.last_failure = failure
        self._status_file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._status_file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(self.status), indent=2) + "\n")
        fresh.rename(self._status_file)

    def _remove_status(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self._status_file.read_text())["pid"] == os.getpid():
                self._status_file.unlink()


def repository_models(repository: Path) -> list[str]:
    """Names of the models in a repository; StartError where there is none."""
    if not repository.is_dir():
        raise StartError(f"no model repository at {repository}")
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        raise StartError(f"no model in {repository}: a model is a folder with a config.pbtxt")
    return models


def check_ports(options: Options) -> None:
    """StartError that names a port which is taken; tritonserver would say so only after loading the models."""
    for name, port in (
        ("http", options.http_port), ("grpc", options.grpc_port), ("metrics", options.metrics_port),
    ):  # fmt: skip
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.address, port))
            except OSError as error:
                raise StartError(
                    f"{name} port {port} on {options.address} cannot be used ({error.strerror}); "
                    f"choose another with --{name}-port, or stop what uses it"
                ) from None


def parse(argv: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="voltriton serve", description="Start tritonserver with a model repository and look after it."
    )
    root = default_root()
    parser.add_argument(
        "--model-repository", type=Path, default=root.parent / "model_repository", metavar="DIR"
    )
    parser.add_argument(
        "--root", type=Path, default=root, help="where tritonserver was laid out (%(default)s)"
    )
    parser.add_argument("--address", default="127.0.0.1", help="%(default)s; anything else is open to others")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--ready-timeout-s", type=float, default=1800.0)
    parser.add_argument(
        "--grace-s", type=float, default=30.0, help="for open requests at the end (%(default)s)"
    )
    parser.add_argument("--canary-interval-s", type=float, default=10.0)
    parser.add_argument("--canary-timeout-s", type=float, default=30.0)
    parser.add_argument("--max-repairs", type=int, default=5, help="within ten minutes (%(default)s)")
    parser.add_argument("--log", type=Path, help="file for tritonserver's output")
    parser.add_argument("extra", nargs="*", metavar="-- OPTION", help="further options of tritonserver")
    args = vars(parser.parse_args(argv))
    args["repository"], args["extra"] = args.pop("model_repository"), tuple(args.pop("extra"))
    return Options(**args)


def main(argv: list[str]) -> int:
    supervisor = Supervisor(
        parse(argv), lambda line: print(f"voltriton serve: {line}", file=sys.stderr, flush=True)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    signal.signal(signal.SIGUSR1, lambda *_: supervisor.drain())
    return supervisor.run()
