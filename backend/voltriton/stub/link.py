"""The stub's end of the engine host: starts it, owns the socket, notices its death, starts it again.

The host is disposable. When the engine dies or stalls it says so and exits; when it is killed, the socket
ends. Either way every open request is answered by the owner of the link (`on_down`), and the host is
started again with growing pauses, until it has died too often in too short a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import IO, Any

from voltriton.errors import StartError, Unavailable
from voltriton.processes import descendants, kill, kill_all, remove_shared_memory, session, shared_memory
from voltriton.stub.scratch import Scratch
from voltriton.wire import VERSION, Decoder, encode

RESTART_WINDOW_S = 600.0
MAX_BACKOFF_S = 60.0
# A line of a Python traceback or of vLLM's log that says what went wrong.
_CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Refused|Killed)\b: .+)$")
_NO_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed")


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class Launch:
    """How a host is started."""

    python: str
    env: dict[str, str]
    # First frame's payload: all that the host needs (see voltriton.host.__main__).
    hello: dict[str, Any]
    start_timeout_s: float
    stop_timeout_s: float
    max_restarts: int
    # The host sends its statistics each second; silence for so long means that it hangs (SIGSTOP, say).
    silent_timeout_s: float = 30.0
    restart_pause_s: float = 1.0


@dataclass
class Callbacks:
    """Called on the link's own threads; none may block for long."""

    on_frame: Callable[[list[Any]], None]
    # The host is gone: (error for the open requests)
    on_down: Callable[[Unavailable], None]
    log: Callable[[str], None]
    on_state: Callable[[State], None] = field(default=lambda state: None)


class Host:
    """One process and its socket."""

    def __init__(self, launch: Launch, log: Callable[[str], None]) -> None:
        self._launch = launch
        self._scratch = Scratch(launch.env.get("TMPDIR"))
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._write_lock = threading.Lock()
        self._decoder = Decoder()
        self._frames: deque[list[Any]] = deque()
        self.silent = False
        self.causes: deque[str] = deque(maxlen=20)
        self._shared_memory: set[str] = set()
        with theirs:
            try:
                self.process = self._start(theirs.fileno())
            except OSError:
                self._scratch.remove()
                raise
        pipe = self.process.stdout
        if pipe is None:
            raise StartError("the engine host has no output pipe")
        self._pump = threading.Thread(
            target=self._forward, args=(pipe, log), name="voltriton-log", daemon=True
        )
        self._pump.start()
        self.send(["hello", VERSION, launch.hello])

    def _start(self, socket_fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self._launch.python, "-P", "-u", "-m", "voltriton.host", str(socket_fd), str(os.getpid())],
            pass_fds=[socket_fd, self._scratch.fd],
            env={**self._launch.env, "TMPDIR": str(self._scratch.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Its own group: a Ctrl-C in a terminal must not reach the engine, and the group can be killed whole.
            start_new_session=True,
        )

    def _forward(self, pipe: IO[bytes], log: Callable[[str], None]) -> None:
        """The host's output goes to the server's log; lines that name a cause are kept."""
        for raw in pipe:
            line = raw.decode("utf-8", "replace").rstrip()
            if (match := _CAUSE.search(line)) and not _NO_CAUSE.search(line):
                self.causes.append(match[1])
            log(line)

    def send(self, frame: list[Any]) -> None:
        """OSError where the host is gone."""
        data = encode(frame)
        with self._write_lock:
            self._socket.sendall(data)

    def receive(self) -> list[Any] | None:
        """The next frame; None at the end."""
        while not self._frames:
            try:
                data = self._socket.recv(1 << 18)
            except TimeoutError:
                self.silent = True
                return None
            except OSError:
                return None
            if not data:
                return None
            self._frames.extend(self._decoder.feed(data))
        return self._frames.popleft()

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def note_shared_memory(self) -> None:
        """Remembers what the engine's processes have in /dev/shm: one that is killed leaves it there."""
        self._shared_memory |= shared_memory(self._processes())

    def _processes(self) -> set[int]:
        """The host's session, and what has left it but is still below the host."""
        return {*session(self.process.pid), *descendants(self.process.pid)}

    def end_processes(self) -> int | None:
        """SIGKILL for the host and all its children; its exit status, None where it has not ended within a second."""
        self.note_shared_memory()
        kill(self._processes())
        # A process that is stuck in a driver does not even end by SIGKILL: nobody may wait for that.
        self.wait(1.0)
        return self.process.returncode

    def kill(self, timeout_s: float = 10.0) -> list[int]:
        """Ends the host and all its children, whatever they are doing, and what they leave behind.

        Returns what is still there when the time is over.
        """
        self.end_processes()
        left = kill_all(self._processes, timeout_s)
        self.wait(0.0)
        self._pump.join(2.0)
        self._socket.close()
        remove_shared_memory(self._shared_memory)
        self._scratch.remove()
        return sorted(left)

    def wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
            return True
        return False


class Link:
    """Keeps one host alive from `start` to `stop`."""

    def __init__(self, launch: Launch, callbacks: Callbacks) -> None:
        self._launch = launch
        self._callbacks = callbacks
        self._host: Host | None = None
        self._state = State.STARTING
        self._cause = ""
        self._deaths: deque[float] = deque()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.restarts = 0
        self.info: dict[str, Any] = {}

    @property
    def state(self) -> State:
        return self._state

    def start(self) -> dict[str, Any]:
        """Starts the host and waits until the engine is ready; returns what the host says of it.

        Raises StartError with the cause in one line; no process is left then.
        """
        outcome: list[Exception | None] = []
        began = threading.Event()
        # The host's parent-death signal follows the thread that created it: this one lives as long as the link.
        self._thread = threading.Thread(
            target=self._run, args=(outcome, began), name="voltriton-link", daemon=True
        )
        self._thread.start()
        began.wait()
        if outcome[0] is not None:
            self._thread.join()
            raise outcome[0]
        return self.info

    def send(self, frame: list[Any]) -> None:
        """Raises Unavailable where no engine is there to take it."""
        host = self._host
        if self._state is not State.READY or host is None:
            raise self.why_not()
        try:
            host.send(frame)
        except OSError:
            raise Unavailable("the engine has just died; it is started again, try again later") from None

    def why_not(self) -> Unavailable:
        """The error for a request that comes while there is no engine."""
        base = "Model is unavailable due to unhealthy vLLM engine"
        if self._state is State.RESTARTING:
            return Unavailable(f"{base}: it is being started again ({self._cause}); try again later")
        if self._state is State.FAILED:
            return Unavailable(
                f"{base}: it died too often ({self._cause}); the model must be unloaded and loaded"
            )
        return Unavailable(f"{base}: it is {self._state.value}")

    def stop(self, grace_s: float) -> None:
        """Lets open requests finish for `grace_s`, then ends the host; bounded by grace and stop time."""
        self._stopping.set()
        host = self._host
        if host is not None:
            with contextlib.suppress(OSError):
                host.send(["stop", grace_s])
            host.wait(grace_s + self._launch.stop_timeout_s)
            host.kill()
        if self._thread is not None:
            self._thread.join(self._launch.stop_timeout_s)
        self._set(State.STOPPED)

    def _set(self, state: State) -> None:
        self._state = state
        self._callbacks.on_state(state)

    def _run(self, outcome: list[Exception | None], began: threading.Event) -> None:
        try:
            self._host = self._start_host()
            outcome.append(None)
        except Exception as error:
            outcome.append(error)
            return
        finally:
            began.set()
        while True:
            self._serve(self._host)
            if self._stopping.is_set() or not self._restart():
                return

    def _start_host(self) -> Host:
        host = Host(self._launch, self._callbacks.log)
        try:
            host.set_timeout(self._launch.start_timeout_s)
            frame = host.receive()
            if frame is None or frame[0] != "ready":
                raise StartError(self._start_failure(host, frame))
        except BaseException:
            host.kill()
            raise
        host.note_shared_memory()
        host.set_timeout(self._launch.silent_timeout_s)
        self.info = frame[1]
        self._set(State.READY)
        return host

    def _start_failure(self, host: Host, frame: list[Any] | None) -> str:
        if frame is not None and frame[0] == "failed":
            message = str(frame[1])
            host.wait(2.0)
            if _NO_CAUSE.search(message) and host.causes:
                return f"the engine did not start: {host.causes[-1]}"
            return f"the engine did not start: {message}"
        if host.wait(1.0):
            status = host.process.returncode
            cause = f" ({host.causes[-1]})" if host.causes else "; its output is in the server's log"
            return f"the engine host ended with {describe(status)} while starting{cause}"
        return (
            f"the engine was not ready within start_timeout_s={self._launch.start_timeout_s:g} s; "
            "raise it in model.json under voltriton, or see the server's log for what it waits for"
        )

    def _serve(self, host: Host) -> None:
        """Hands frames on until the host is gone, then says so."""
        dying = ""
        while (frame := host.receive()) is not None:
            if frame[0] == "dying":
                dying = str(frame[1])
                break
            self._callbacks.on_frame(frame)
        self._host = None
        if self._stopping.is_set():
            self._callbacks.on_down(Unavailable("the model is being unloaded"))
            return
        self._set(State.RESTARTING)
        status = host.end_processes()
        if host.silent:
            dying = (
                "the engine host said nothing for "
                f"silent_timeout_s={self._launch.silent_timeout_s:g} s and was killed"
            )
        self._cause = dying or f"the engine host ended with {describe(status)}"
        # Answers first: what is left of the processes may take its time.
        self._callbacks.on_down(Unavailable(f"the engine died while the request was running ({self._cause})"))
        self._callbacks.log(f"[vllm] engine down: {self._cause}")
        if left := host.kill():
            self._callbacks.log(
                f"[vllm] processes {', '.join(map(str, left))} of the dead engine do not end (in the kernel?); "
                "what they hold, GPU memory included, may be missing to the next one"
            )

    def _restart(self) -> bool:
        """Starts hosts until one is ready; False when it is no use, or the link is being stopped."""
        while not self._stopping.is_set():
            now = time.monotonic()
            self._deaths.append(now)
            while self._deaths[0] < now - RESTART_WINDOW_S:
                self._deaths.popleft()
            if len(self._deaths) > self._launch.max_restarts:
                self._set(State.FAILED)
                self._callbacks.log(
                    f"[vllm] the engine died {len(self._deaths)} times within {RESTART_WINDOW_S:g} s "
                    f"(max_restarts={self._launch.max_restarts}): given up; unload and load the model"
                )
                return False
            pause_s = min(self._launch.restart_pause_s * 2.0 ** (len(self._deaths) - 1), MAX_BACKOFF_S)
            self._callbacks.log(f"[vllm] starting the engine again in {pause_s:g} s")
            if self._stopping.wait(pause_s):
                return False
            try:
                self._host = self._start_host()
            except Exception as error:
                self._cause = str(error)
                self._callbacks.log(f"[vllm] the engine did not start again: {error}")
                continue
            self.restarts += 1
            self._callbacks.log("[vllm] the engine is ready again")
            return True
        return False


def describe(status: int | None) -> str:
    """`exit status 3` or `signal SIGKILL`."""
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def host_environment(extra: dict[str, str]) -> dict[str, str]:
    """The stub's environment without what the stub's launcher added for the stub alone."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("VOLTRITON_STUB_")}
    for name in ("PATH", "LD_LIBRARY_PATH"):
        original = os.environ.get(f"VOLTRITON_STUB_{name}")
        if original is not None:
            env[name] = original
        elif name == "LD_LIBRARY_PATH":
            env.pop(name, None)
    # The embedded interpreter of the stub is ASCII only; what it starts must not be.
    env.setdefault("PYTHONUTF8", "1")
    env.update(extra)
    return env
