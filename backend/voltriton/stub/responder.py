"""The only sender of responses: for each request zero or more responses, then exactly one final.

Deltas come from the link's reader thread; a small pool of threads sends. A request has one response
outstanding at a time, and what comes meanwhile rides the next one, so a slow send delays nobody's tokens
by more than its own time and a queue is never longer than the number of requests (the measurements behind
this are in the design notes: one response a token caps a model at a few thousand tokens a second).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from voltriton.errors import VoltritonError
from voltriton.wire import Delta

Outcome = Callable[[str], None]


class Sequence:
    """What is not yet sent of one sequence, and what the next response says of it."""

    __slots__ = (
        "cumulative_logprob", "finish_reason", "logprobs", "num_tokens", "reasoning", "stop_reason", "text",
        "token_ids", "tool_calls",
    )  # fmt: skip

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob: float | None = None
        self.clear()

    def clear(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: list[str] | None = None
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.num_tokens += delta.num_tokens
        if delta.token_ids:
            self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.reasoning:
            self.reasoning += delta.reasoning
        if delta.tool_calls:
            self.tool_calls += delta.tool_calls
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    @property
    def shows(self) -> bool:
        """Whether a client would see something new."""
        return bool(self.text or self.reasoning or self.tool_calls)


class Responder:
    """One request's state machine. `push` and `fail` may be called from any thread."""

    def __init__(
        self,
        sender: Any,
        pb_utils: Any,
        *,
        sequences: int,
        wants: list[str],
        stream: bool,
        prefixes: list[str] | None,
        parsed_chat: bool = False,
        every_token: bool = False,
        on_end: Outcome,
        request_id: str = "",
    ) -> None:
        self.request_id = request_id
        self._sender = sender
        self._pb = pb_utils
        self._stream = stream
        self._wants = frozenset(wants)
        self._prefixes = prefixes
        self._parsed_chat = parsed_chat
        # Token ids without text (detokenize false): each is worth a response.
        self._every_token = every_token
        self._on_end = on_end
        self._lock = threading.Lock()
        # Held in calls to Triton: after the final response the sender's other end is freed there.
        self._calling = threading.Lock()
        self._sequences = [Sequence() for _ in range(sequences)]
        self._extra: dict[str, Any] = {}
        self._final = False
        self._error: VoltritonError | None = None
        self._queued = False
        self._closed = False
        self._responses = 0
        # Deltas that the next response will take with it.
        self.waiting = 0

    @property
    def urgent(self) -> bool:
        """First and last responses go ahead of the rest."""
        return self._responses == 0 or self._final or self._error is not None

    @property
    def ended(self) -> bool:
        return self._closed or self._final or self._error is not None

    def is_cancelled(self) -> bool:
        """Asks Triton, a round trip; never at the same time as a send, nor once the request has ended."""
        with self._calling:
            return not self.ended and bool(self._sender.is_cancelled())

    def push(self, delta: Delta) -> bool:
        """Takes a delta; True where the request must now be queued for a sender."""
        with self._lock:
            if self.ended:
                return False
            if delta.index >= len(self._sequences):
                self._sequences += [Sequence() for _ in range(delta.index + 1 - len(self._sequences))]
            self._sequences[delta.index].add(delta)
            self.waiting += 1
            if delta.extra:
                self._merge_extra(delta.extra)
            self._final = delta.final
            return self._wake()

    def fail(self, error: VoltritonError) -> bool:
        """Ends the request with an error, after the text so far; True where it must now be queued."""
        with self._lock:
            if self.ended:
                return False
            self._error = error
            return self._wake()

    def _wake(self) -> bool:
        due = self._final or self._error is not None or (self._stream and self._has_news())
        if not due or self._queued:
            return False
        self._queued = True
        return True

    def _has_news(self) -> bool:
        # A token whose text is held back (half a character, the beginning of a stop string) waits for it.
        return any(s.shows or (self._every_token and s.num_tokens) for s in self._sequences)

    def _merge_extra(self, extra: dict[str, Any]) -> None:
        for name, value in extra.items():
            if isinstance(value, list) and name in self._extra:
                self._extra[name] = [
                    new if new is not None else old for old, new in zip(self._extra[name], value, strict=True)
                ]
            else:
                self._extra[name] = value

    def send(self) -> bool:
        """Sends what is pending, once; True where more came meanwhile and it must be queued again."""
        with self._lock:
            if self._closed:
                self._queued = False
                return False
            steps, last = self._take()
        with self._calling:
            for response, flags in steps:
                self._sender.send(response, flags)
        self._responses += 1
        with self._lock:
            self._queued = False
            if last:
                self._closed = True
                outcome = self._outcome()
            else:
                return self._wake()
        self._on_end(outcome)
        return False

    def abandon(self) -> None:
        """A send failed: close the request all the same, or Triton would keep it for ever."""
        with self._lock:
            already, self._closed, self._queued = self._closed, True, False
        if already:
            return
        with contextlib.suppress(Exception):
            self._sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self._on_end("failed")

    def _outcome(self) -> str:
        if self._error is not None:
            return self._error.outcome
        return self._sequences[0].finish_reason or "stop"

    def _take(self) -> tuple[list[tuple[Any, int]], bool]:
        final_flag = self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.waiting = 0
        if self._error is None:
            return [(self._response(), final_flag if self._final else 0)], self._final
        steps: list[tuple[Any, int]] = []
        if self._stream and self._has_news():
            steps.append((self._response(), 0))
        code = getattr(self._pb.TritonError, self._error.triton)
        failure = self._pb.InferenceResponse(error=self._pb.TritonError(self._error.text, code))
        return [*steps, (failure, final_flag)], True

    def _response(self) -> Any:
        tensors = [self._bytes("text_output", self._texts())]
        for name, build in _OPTIONAL.items():
            if name in self._wants:
                tensors.append(build(self, name))
        if self._parsed_chat:
            tensors.append(self._bytes("reasoning_output", [s.reasoning for s in self._sequences]))
            tensors.append(self._bytes("tool_calls", [dump(s.tool_calls) for s in self._sequences]))
        if "timing" in self._wants and self._final:
            tensors.append(self._bytes("timing", [dump(self._extra.get("timing"))]))
        if "prompt_logprobs" in self._wants and self._extra.get("prompt_logprobs") is not None:
            # Once: with the first response.
            tensors.append(
                self._bytes("prompt_logprobs", [dump(p) for p in self._extra.pop("prompt_logprobs")])
            )
        for sequence in self._sequences:
            sequence.clear()
        return self._pb.InferenceResponse(output_tensors=tensors)

    def _texts(self) -> list[str]:
        texts = [s.text for s in self._sequences]
        if self._prefixes is None:
            return texts
        each = len(texts) // len(self._prefixes)
        return [self._prefixes[i // each] + text for i, text in enumerate(texts)]

    def _bytes(self, name: str, values: list[str]) -> Any:
        return self._pb.Tensor(
            name, np.array([v.encode("utf-8", "replace") for v in values], dtype=np.object_)
        )

    def _finish_reasons(self, name: str) -> Any:
        return self._bytes(name, [str(s.finish_reason) for s in self._sequences])

    def _stop_reasons(self, name: str) -> Any:
        return self._bytes(name, [dump(s.stop_reason) for s in self._sequences])

    def _logprobs(self, name: str) -> Any:
        return self._bytes(
            name, ["null" if s.logprobs is None else f"[{', '.join(s.logprobs)}]" for s in self._sequences]
        )

    def _cumulative(self, name: str) -> Any:
        values = [
            float("nan") if s.cumulative_logprob is None else s.cumulative_logprob for s in self._sequences
        ]
        return self._pb.Tensor(name, np.array(values, dtype=np.float32))

    def _output_counts(self, name: str) -> Any:
        return self._pb.Tensor(name, np.array([s.num_tokens for s in self._sequences], dtype=np.uint32))

    def _token_ids(self, name: str) -> Any:
        ids = [i for s in self._sequences for i in s.token_ids]
        return self._pb.Tensor(name, np.array(ids, dtype=np.int32))

    def _request_counts(self, name: str) -> Any:
        values = [v or 0 for v in self._extra.get(name) or [0]]
        return self._pb.Tensor(name, np.array(values, dtype=np.uint32))


_OPTIONAL: dict[str, Callable[[Responder, str], Any]] = {
    "finish_reason": Responder._finish_reasons,
    "cumulative_logprob": Responder._cumulative,
    "logprobs": Responder._logprobs,
    "num_input_tokens": Responder._request_counts,
    "num_output_tokens": Responder._output_counts,
    "token_ids": Responder._token_ids,
    "stop_reason": Responder._stop_reasons,
    "num_cached_tokens": Responder._request_counts,
}


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class SenderPool:
    """Threads that send; a request is in the queue at most once, urgent ones first.

    A response costs the same however many tokens it holds. Once one for every delta would keep the senders busy
    for more than `BUSY` of the time, each but the urgent ones waits for a second delta (`HOLD_S` at most), until
    the load is below `CALM`.
    """

    BUSY = 0.85
    CALM = 0.4
    HOLD_S = 0.02
    # The load is looked at so often.
    WINDOW_S = 0.1

    def __init__(self, threads: int, on_fault: Callable[[str], None]) -> None:
        self._urgent: deque[Responder] = deque()
        self._usual: deque[Responder] = deque()
        self._held: deque[Responder] = deque()
        self._ready = threading.Condition()
        self._stopping = False
        self._on_fault = on_fault
        self._deltas_a_response = 1
        # Wall time of a send, smoothed.
        self._send_s = 0.0
        self._deltas = 0
        self._window_began = time.monotonic()
        self._threads = [
            threading.Thread(target=self._run, name=f"voltriton-send-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def queue(self, responders: list[Responder], deltas: int = 0) -> None:
        """Each of them said that it must be queued; `deltas` is how many have come."""
        if not responders and not deltas:
            return
        with self._ready:
            self._watch(deltas)
            due = self._sort(self._take_held()) + self._sort(responders)
            # One thread at least where something is held: a sleeping one does not look at the clock.
            self._ready.notify(min(max(due, len(self._held) > 0), len(self._threads)))

    def _watch(self, deltas: int) -> None:
        self._deltas += deltas
        now = time.monotonic()
        window = now - self._window_began
        if window < self.WINDOW_S:
            return
        busy = self._deltas * self._send_s / len(self._threads) / window
        limit = self.BUSY if self._deltas_a_response == 1 else self.CALM
        self._deltas_a_response = 2 if busy > limit else 1
        self._deltas, self._window_began = 0, now

    def _take_held(self) -> deque[Responder]:
        held, self._held = self._held, deque()
        return held

    def _sort(self, responders: Iterable[Responder], hold: bool = True) -> int:
        """Into the queues; returns how many can be sent."""
        due = 0
        for responder in responders:
            if responder.urgent:
                self._urgent.append(responder)
            elif hold and responder.waiting < self._deltas_a_response:
                self._held.append(responder)
                continue
            else:
                self._usual.append(responder)
            due += 1
        return due

    def stop(self, timeout_s: float) -> None:
        """Sends what is queued, then ends the threads."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _next(self) -> Responder | None:
        with self._ready:
            while not self._urgent and not self._usual:
                if self._held:
                    if self._stopping or not self._ready.wait(self.HOLD_S):
                        self._sort(self._take_held(), hold=False)
                elif self._stopping:
                    return None
                else:
                    self._ready.wait()
            return (self._urgent or self._usual).popleft()

    def _run(self) -> None:
        while (responder := self._next()) is not None:
            began = time.monotonic()
            try:
                again = responder.send()
            except Exception as error:
                self._on_fault(f"a response could not be sent: {error}")
                responder.abandon()
                again = False
            self._send_s += 0.02 * (time.monotonic() - began - self._send_s)
            if again:
                self.queue([responder])
