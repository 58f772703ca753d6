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

from voltriton.claim import Claim, sweep
from voltriton.errors import StartError
from voltriton.processes import alive, command_line, descendants, die_with_parent, session, shared_memory
from voltriton.triton import Layout, compose, default_root, folder_arguments

RESTART_WINDOW_S = 600.0
# From the last answer to the end of the server; a response that leaked in Triton would hold it up for its whole
# exit timeout. Longer than an engine's stop_timeout_s.
STOP_S = 25.0
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
    """Written to `run/serve-PORT.json` whenever it changes; `voltriton status` shows it."""

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


def state_file(root: Path, http_port: int) -> Path:
    """One a server: the HTTP port tells those of a host apart."""
    return Layout(root.absolute()).run / f"serve-{http_port}.json"


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
        log = self.options.log.open("ab") if self.options.log else None
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
            f"--exit-timeout-secs={max(1, round(o.grace_s))}",
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
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
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
        deadline = time.monotonic() + 5.0
        while below and time.monotonic() < deadline:
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            below = [pid for pid in {*below, *self.children()} if alive(pid)]
        if self._claim is not None:
            self._claim.clean()

    def release(self) -> None:
        """After the end: nothing of the server stays in /dev/shm."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

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


class Probe(threading.Thread):
    """One canary, on a thread of its own: a server that dies meanwhile must be seen at once."""

    def __init__(self, server: Server) -> None:
        super().__init__(name="voltriton-canary", daemon=True)
        self._server = server
        self.failure: str | None = None
        self.hanging = False
        self.start()

    def run(self) -> None:
        try:
            self.failure = self._server.canary(ENGINE_MODEL)
        except Hanging as error:
            self.failure, self.hanging = str(error), True
        self._server.note_shared_memory()


class Supervisor:
    """Keeps one server alive until it is told to stop."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._server = Server(options)
        self._stop = threading.Event()
        self._drain = threading.Event()
        self._repairs: deque[float] = deque()
        self._stubs: set[int] = set()
        self._probe: Probe | None = None
        self._next_canary = 0.0
        self._status_file = state_file(options.root, options.http_port)
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
            return 0 if self._stop.is_set() else 1
        finally:
            self._server.stop(self._options.grace_s + 10)
            self._server.release()
            self._remove_status()

    def stop(self) -> None:
        self._stop.set()

    def drain(self) -> None:
        self._drain.set()

    def _start(self) -> None:
        self._set("starting")
        log = self._options.log
        begin = log.stat().st_size if log is not None and log.exists() else 0
        self.status.models = repository_models(self._options.repository)
        self._server.start()
        self.status.server_pid = self._server.pid
        deadline = time.monotonic() + self._options.ready_timeout_s
        while not self._server.ready():
            process = self._server.process
            if process is not None and process.poll() is not None:
                raise StartError(
                    load_failure(log, begin)
                    or f"tritonserver ended with status {process.returncode} while starting; "
                    f"the reason is in {log or 'its output above'}"
                )
            if self._stop.is_set():
                raise StartError("stopped before it was ready")
            if time.monotonic() > deadline:
                raise StartError(f"not ready within {self._options.ready_timeout_s:g} s")
            time.sleep(0.1)
        self._stubs = self._server.stubs()
        self._server.note_shared_memory()
        self._set("draining" if self._drain.is_set() else "ready")

    def _watch(self) -> int:
        self._rest()
        while not self._stop.wait(0.25):
            if self._drain.is_set():
                self._keep_draining()
            failure = self._dead()
            if failure is not None:
                if not self._repair(failure, self._restart):
                    return 3
                self._rest()
            elif self.status.state == "ready" and not self._cure():
                return 3
        return self._finish()

    def _keep_draining(self) -> None:
        if self.status.state == "ready":
            self._set("draining")
            self._say("draining: new requests are refused")
        # Again and again: an engine that was started meanwhile does not know of it.
        self._server.drain()

    def _dead(self) -> str | None:
        """What no canary is needed for: the server ended, or one of its stubs did."""
        process = self._server.process
        if process is None or process.poll() is not None:
            return f"tritonserver ended with status {process.returncode if process else None}"
        for pid in self._stubs:
            if not alive(pid):
                return f"the Python stub {pid} died; Triton would keep its requests open for ever"
        return None

    def _cure(self) -> bool:
        """A canary when it is time, and the repair where it found something; False when there were too many."""
        probe = self._probe
        if probe is None:
            if time.monotonic() > self._next_canary and ENGINE_MODEL in self.status.models:
                self._probe = Probe(self._server)
            return True
        if probe.is_alive():
            return True
        well = probe.failure is None or self._repair(
            f"canary: {probe.failure}", self._restart if probe.hanging else self._reload
        )
        self._rest()
        return well

    def _rest(self) -> None:
        """Until the next canary; one that still runs is of a server that is gone."""
        self._probe = None
        self._next_canary = time.monotonic() + self._options.canary_interval_s

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
            self._set("draining" if self._drain.is_set() else "ready", failure)
            self._say("ready again")
            return True
        return True

    def _reload(self) -> None:
        self._say(f"unloading and loading {ENGINE_MODEL}")
        self._server.reload(ENGINE_MODEL)
        self._stubs = self._server.stubs()
        self._server.note_shared_memory()

    def _restart(self) -> None:
        self._say("starting tritonserver again")
        self._server.kill()
        self._start()

    def _finish(self) -> int:
        """Open requests may finish within the grace; new ones are refused meanwhile."""
        self._server.drain()
        self._set("draining")
        self._say(f"stopping: open requests may finish within {self._options.grace_s:g} s")
        deadline = time.monotonic() + self._options.grace_s
        # The stubs report once a second.
        time.sleep(min(1.2, self._options.grace_s))
        while self._server.open_requests() and time.monotonic() < deadline:
            time.sleep(0.1)
        unanswered = self._server.open_requests()
        status = self._server.stop(STOP_S if not unanswered else self._options.grace_s)
        self._set("stopped")
        if unanswered:
            self._say(f"{unanswered} requests were still open after {self._options.grace_s:g} s")
        elif status != 0:
            self._say(f"every request was answered, but tritonserver did not end within {STOP_S:g} s")
        return 1 if unanswered else 0

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


def read_metric(address: str, name: str, timeout_s: float) -> float:
    """A metric of a running server, summed over all labels. OSError where the metrics cannot be read."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as response:
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
