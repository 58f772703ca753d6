"""The stub's service: live requests between Triton and the engine host.

    execute  -> parse -> link.submit           (Triton's thread)
    deltas   -> responders -> sender pool      (the link's reader thread)
    poller: cancellation of every live request, streaming or not, queued or running
    a request with `cancel` ends another one the same way, and never gets to the engine

Nothing here knows tensors (request, responder) or the engine (host).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Any

from voltriton.errors import (
    Cancelled,
    InternalError,
    InvalidArgument,
    Unavailable,
    VoltritonError,
    from_name,
)
from voltriton.settings import ModelSettings
from voltriton.stub import metrics as names
from voltriton.stub.link import Callbacks, Launch, Link, State
from voltriton.stub.metrics import Metrics
from voltriton.stub.request import Parsed, parse, parse_cancel
from voltriton.stub.responder import Responder, SenderPool
from voltriton.wire import Delta


class Front:
    """One model instance."""

    def __init__(self, model: ModelSettings, launch: Launch, metrics: Metrics, pb_utils: Any) -> None:
        self._pb = pb_utils
        self._settings = model.settings
        self._metrics = metrics
        self._keys = itertools.count(1)
        self._live: dict[int, Responder] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._pool = SenderPool(model.settings.sender_threads, self._warn)
        self._link = Link(launch, Callbacks(self._on_frame, self._on_down, self._info, self._on_state))
        self._poller = threading.Thread(target=self._poll, name="voltriton-poll", daemon=True)

    def start(self) -> None:
        """StartError with the cause in one line; no process is left then."""
        self._link.start()
        self._poller.start()

    @property
    def ready(self) -> bool:
        return self._link.state is State.READY

    def execute(self, requests: list[Any]) -> None:
        """Never raises: a fault in one request is that request's answer."""
        for request in requests:
            sender = request.get_response_sender()
            key = next(self._keys)
            try:
                victim = parse_cancel(request, self._pb)
                if victim is not None:
                    self._cancel_by_id(sender, victim)
                else:
                    self._submit(key, sender, parse(request, key, self._pb))
            except VoltritonError as error:
                self._refuse(key, sender, error)
            except Exception as error:
                self._refuse(key, sender, InternalError(f"{type(error).__name__}: {error}"))

    def _submit(self, key: int, sender: Any, parsed: Parsed) -> None:
        if self._stopping.is_set():
            raise Unavailable("the model is being unloaded")
        responder = self._responder(key, sender, parsed)
        with self._lock:
            self._live[key] = responder
        try:
            self._link.send(parsed.generation.frame())
        except VoltritonError as error:
            self._end(key, error)
        except ValueError as error:
            self._end(key, InternalError(f"the request cannot be sent to the engine host: {error}"))

    def _responder(self, key: int, sender: Any, parsed: Parsed) -> Responder:
        generation = parsed.generation
        count = generation.sampling.get("n", 1)
        each = count if isinstance(count, int) and 0 < count <= 1024 else 1
        return Responder(
            sender,
            self._pb,
            sequences=each * max(1, len(generation.prompts or [])),
            wants=generation.wants,
            stream=generation.stream,
            prefixes=parsed.prefixes,
            parsed_chat=generation.chat is not None and self._parses_chat,
            every_token=generation.sampling.get("detokenize", True) is False,
            on_end=lambda outcome: self._ended(key, outcome),
            request_id=generation.id,
        )

    @property
    def _parses_chat(self) -> bool:
        return bool(self._settings.reasoning_parser or self._settings.tool_parser)

    def _refuse(self, key: int, sender: Any, error: VoltritonError) -> None:
        with self._lock:
            known = key in self._live
        if known:
            self._end(key, error)
            return
        responder = Responder(
            sender, self._pb, sequences=1, wants=[], stream=False, prefixes=None,
            on_end=lambda outcome: self._metrics.count(names.OUTCOMES, outcome=outcome),
        )  # fmt: skip
        if responder.fail(error):
            self._pool.queue([responder])

    def _end(self, key: int, error: VoltritonError) -> None:
        with self._lock:
            responder = self._live.get(key)
        if responder is not None and responder.fail(error):
            self._pool.queue([responder])

    def _ended(self, key: int, outcome: str) -> None:
        with self._lock:
            self._live.pop(key, None)
        self._metrics.count(names.OUTCOMES, outcome=outcome)

    def _on_frame(self, frame: list[Any]) -> None:
        if frame[0] == "deltas":
            self._on_deltas(frame[1])
        elif frame[0] == "ended":
            self._end(frame[1], from_name(frame[2], frame[3]))
        elif frame[0] == "stats":
            self._metrics.gauge(names.OPEN, float(len(self._live)))
            self._metrics.take(frame[1])

    def _on_deltas(self, rows: list[list[Any]]) -> None:
        due = []
        for row in rows:
            delta = Delta(*row)
            # Without the lock: a dict read is atomic, and this is the hottest line of the stub.
            responder = self._live.get(delta.key)
            if responder is not None and responder.push(delta):
                due.append(responder)
        self._pool.queue(due, len(rows))

    def _on_down(self, error: Unavailable) -> None:
        with self._lock:
            keys = list(self._live)
        for key in keys:
            self._end(key, error)

    def _on_state(self, state: State) -> None:
        ready = state is State.READY
        self._metrics.gauge(names.ENGINE_UP, float(ready))
        if ready and self._link.restarts:
            self._metrics.engine_restarted()
        if state is State.RESTARTING:
            self._metrics.count(names.RESTARTS)

    def _poll(self) -> None:
        """Triton tells of a cancellation only when asked, a round trip a request: so on a timer, not a token."""
        while not self._stopping.wait(self._settings.poll_interval_ms / 1000):
            with self._lock:
                live = list(self._live.items())
            for key, responder in live:
                if responder.is_cancelled():
                    self._cancel(key)

    def _cancel(self, key: int) -> None:
        # These two lines are the official backend's; its users' tools look for them.
        self._info("[vllm] Cancelling the request")
        with contextlib.suppress(VoltritonError):  # the engine may be gone, and its requests with it
            self._link.send(["cancel", key])
        self._end(key, Cancelled("Request was cancelled"))
        self._info("[vllm] Successfully cancelled the request")

    def _cancel_by_id(self, sender: Any, request_id: str) -> None:
        """In-band: for a client that cannot or should not have Triton tell (docs/contract.md says why)."""
        with self._lock:
            live = list(self._live.items())
        keys = [key for key, responder in live if responder.request_id == request_id and not responder.ended]
        if len(keys) > 1:
            raise InvalidArgument(
                f"cancel: {len(keys)} open requests have the id {request_id!r}, 1 is allowed"
            )
        for key in keys:
            self._cancel(key)
        answer = Responder(
            sender, self._pb, sequences=1, wants=["finish_reason"], stream=False, prefixes=None,
            on_end=lambda outcome: None,
        )  # fmt: skip
        answer.push(Delta(0, finish_reason="cancelled" if keys else None, final=True))
        self._pool.queue([answer])

    def stop(self) -> None:
        """Bounded: the drain's grace and the engine's stop time. Every open request is answered."""
        self._link.stop(self._settings.drain_grace_s if self._live else 0.0)
        self._stopping.set()
        self._on_down(Unavailable("the model is being unloaded"))
        deadline = time.monotonic() + 5.0
        while self._live and time.monotonic() < deadline:
            time.sleep(0.01)
        self._pool.stop(5.0)
        if self._poller.is_alive():
            self._poller.join(5.0)

    def _info(self, line: str) -> None:
        self._pb.Logger.log_info(line)

    def _warn(self, line: str) -> None:
        self._pb.Logger.log_warn(f"[vllm] {line}")
