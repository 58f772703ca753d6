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
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from voltriton.errors import StartError
from voltriton.processes import alive, set_name
from voltriton.server import (
    ENGINE_MODEL,
    STOP_S,
    Hanging,
    Options,
    Server,
    check_ports,
    load_failure,
    repository_models,
)
from voltriton.triton import Layout, default_root

NAME = "voltriton-serve"
RESTART_WINDOW_S = 600.0
MAX_BACKOFF_S = 60.0


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
        self._unwritable = False
        self.status = Status(
            http=f"{options.address}:{options.http_port}",
            grpc=f"{options.address}:{options.grpc_port}",
            metrics=f"{options.address}:{options.metrics_port}",
        )

    def run(self, on_ready: Callable[[], None] = lambda: None) -> int:
        """Blocks until stopped; returns the exit status."""
        try:
            check_ports(self._options)
        except StartError as error:
            # Nothing is written: the state file is that of the server which has the port.
            self._say(str(error))
            return 1
        try:
            self._start()
            self._say("ready")
            on_ready()
            return self._watch()
        except (StartError, OSError) as error:
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
        if self._unwritable:
            self._save()

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
            how = (
                f"did not end within {STOP_S:g} s"
                if status == -signal.SIGKILL
                else f"ended with status {status}"
            )
            self._say(f"every request was answered, but tritonserver {how}")
        return 1 if unanswered else 0

    def _set(self, state: str, failure: str | None = None) -> None:
        self.status.state, self.status.since = state, time.time()
        if failure is not None:
            self.status.last_failure = failure
        self._save()

    def _save(self) -> None:
        try:
            self._write_status()
            self._unwritable = False
        except OSError as error:
            # A full disk is no reason to stop serving.
            if not self._unwritable:
                self._unwritable = True
                self._say(
                    f"the state cannot be written to {self._status_file} ({error.strerror}): "
                    "`voltriton status` and `voltriton drain` do not see it"
                )

    def _write_status(self) -> None:
        self._status_file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._status_file.with_suffix(f".{os.getpid()}")
        try:
            fresh.write_text(json.dumps(asdict(self.status), indent=2) + "\n")
            fresh.rename(self._status_file)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise

    def _remove_status(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self._status_file.read_text())["pid"] == os.getpid():
                self._status_file.unlink()


def seconds(text: str) -> float:
    """For argparse."""
    value = float(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 0 or more seconds")
    return value


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
    parser.add_argument("--ready-timeout-s", type=seconds, default=1800.0)
    parser.add_argument(
        "--grace-s", type=seconds, default=30.0, help="for open requests at the end (%(default)s)"
    )
    parser.add_argument("--canary-interval-s", type=seconds, default=10.0)
    parser.add_argument("--canary-timeout-s", type=seconds, default=30.0)
    parser.add_argument("--max-repairs", type=int, default=5, help="within ten minutes (%(default)s)")
    parser.add_argument("--log", type=Path, help="file for tritonserver's output")
    parser.add_argument("extra", nargs="*", metavar="-- OPTION", help="further options of tritonserver")
    args = vars(parser.parse_args(argv))
    args["repository"], args["extra"] = args.pop("model_repository"), tuple(args.pop("extra"))
    return Options(**args)


def main(argv: list[str]) -> int:
    set_name(NAME)
    supervisor = Supervisor(
        parse(argv), lambda line: print(f"voltriton serve: {line}", file=sys.stderr, flush=True)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    signal.signal(signal.SIGUSR1, lambda *_: supervisor.drain())
    return supervisor.run()
