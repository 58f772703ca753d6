from __future__ import annotations

import threading
import time
from typing import Any

import fake_pb as pb
import pytest
from voltriton.errors import Cancelled, Unavailable
from voltriton.stub.responder import Responder, SenderPool
from voltriton.wire import Delta


def make(sender: pb.Sender, ended: list[str] | None = None, **options: Any) -> Responder:
    defaults: dict[str, Any] = {"sequences": 1, "wants": [], "stream": True, "prefixes": None}
    note = ended.append if ended is not None else lambda outcome: None
    return Responder(sender, pb, **{**defaults, **options}, on_end=note)


def texts(sender: pb.Sender) -> list[list[str]]:
    return [
        [t.decode() for t in r.outputs["text_output"]]
        for r, _ in sender.sent
        if r is not None and r.error is None
    ]


def test_deltas_that_come_while_one_is_sent_ride_the_next() -> None:
    sender, ended = pb.Sender(), []
    responder = make(sender, ended, wants=["num_output_tokens"])
    assert responder.push(Delta(1, text="a", num_tokens=1))
    assert not responder.push(Delta(1, text="b", num_tokens=1))
    assert not responder.push(Delta(1, text="c", num_tokens=1))
    assert not responder.send()
    assert responder.push(Delta(1, text="d", num_tokens=1, finish_reason="stop", final=True))
    assert not responder.send()
    assert texts(sender) == [["abc"], ["d"]]
    assert [r.outputs["num_output_tokens"] for r, _ in sender.sent if r] == [[3], [1]]
    assert ([flags for _, flags in sender.sent], ended) == ([0, 1], ["stop"])


def test_what_comes_during_a_send_is_queued_again() -> None:
    class Slow(pb.Sender):
        def send(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
            if not self.sent:
                assert not responder.push(Delta(1, text="b", num_tokens=1))
            super().send(response, flags)

    sender = Slow()
    responder = make(sender)
    assert responder.push(Delta(1, text="a", num_tokens=1))
    assert responder.send()
    assert not responder.send()
    assert texts(sender) == [["a"], ["b"]]


def test_text_so_far_goes_before_an_error() -> None:
    sender, ended = pb.Sender(), []
    responder = make(sender, ended)
    responder.push(Delta(1, text="half", num_tokens=1))
    assert not responder.fail(Unavailable("gone"))
    responder.send()
    assert texts(sender) == [["half"]]
    last, flags = sender.sent[-1]
    assert last is not None and last.error is not None
    assert (str(last.error), last.error.code, flags) == ("UNAVAILABLE: gone", "unavailable", 1)
    assert ended == ["unavailable"]


def test_nothing_is_sent_after_the_end() -> None:
    sender, ended = pb.Sender(), []
    responder = make(sender, ended)
    responder.push(Delta(1, text="x", finish_reason="length", final=True))
    responder.send()
    assert not responder.push(Delta(1, text="late"))
    assert not responder.fail(Cancelled("late"))
    assert not responder.send()
    assert (len(sender.sent), ended) == (1, ["length"])


def test_whole_answers_wait_for_the_end() -> None:
    sender = pb.Sender()
    responder = make(sender, stream=False, prefixes=["> "])
    assert not responder.push(Delta(1, text="a"))
    assert responder.push(Delta(1, text="b", finish_reason="stop", final=True))
    responder.send()
    assert texts(sender) == [["> ab"]]


def test_failed_whole_answer_sends_no_half_text() -> None:
    sender = pb.Sender()
    responder = make(sender, stream=False)
    responder.push(Delta(1, text="a"))
    assert responder.fail(Cancelled("gone"))
    responder.send()
    assert texts(sender) == []


def test_a_send_that_fails_closes_the_request() -> None:
    sender, ended = pb.Sender(), []
    faults: list[str] = []
    responder = make(sender, ended)
    pool = SenderPool(1, faults.append)
    sender.fail = True
    responder.push(Delta(1, text="a"))
    pool.queue([responder])
    pool.stop(5)
    assert (ended, len(faults)) == (["failed"], 1)
    assert sender.sent == [(None, 1)]
    assert not responder.push(Delta(1, text="b"))


def test_request_level_values_of_several_prompts_are_merged() -> None:
    sender = pb.Sender()
    responder = make(
        sender, sequences=2, stream=False, wants=["num_cached_tokens", "num_input_tokens", "timing"]
    )
    responder.push(Delta(1, 0, "a", extra={"num_input_tokens": [2, 3], "num_cached_tokens": [1, None]}))
    responder.push(Delta(1, 1, "b", extra={"num_cached_tokens": [None, 4]}, finish_reason="stop"))
    responder.push(Delta(1, 0, "c", finish_reason="stop", extra={"timing": {"total_ms": 1}}, final=True))
    responder.send()
    ((response, _),) = sender.sent
    assert response is not None
    assert response.outputs["num_cached_tokens"] == [1, 4]
    assert response.outputs["num_input_tokens"] == [2, 3]
    assert response.outputs["timing"] == [b'{"total_ms": 1}']
    assert texts(sender) == [["ac", "b"]]


@pytest.mark.parametrize("threads", [1, 4])
def test_each_request_keeps_its_order_and_gets_one_end(threads: int) -> None:
    pool = SenderPool(threads, lambda fault: pytest.fail(fault))
    senders = [pb.Sender() for _ in range(20)]
    ended: list[str] = []
    responders = [make(s, ended) for s in senders]

    def feed(part: list[Responder]) -> None:
        for i in range(200):
            final = i == 199
            due = [
                r
                for r in part
                if r.push(Delta(1, text=f"{i},", finish_reason="stop" if final else None, final=final))
            ]
            pool.queue(due)

    feeders = [threading.Thread(target=feed, args=(responders[i::4],)) for i in range(4)]
    for thread in feeders:
        thread.start()
    for thread in feeders:
        thread.join()
    pool.stop(20)
    for sender in senders:
        assert "".join(t for row in texts(sender) for t in row) == "".join(f"{i}," for i in range(200))
        assert [flags for _, flags in sender.sent].count(1) == 1
    assert len(ended) == 20


class SlowSender(pb.Sender):
    """A send that takes as long as Triton's on a busy machine."""

    def send(self, response: pb.InferenceResponse | None = None, flags: int = 0) -> None:
        time.sleep(0.002)
        super().send(response, flags)


def one_sender() -> tuple[SenderPool, SlowSender, Responder]:
    sender = SlowSender()
    pool = SenderPool(1, lambda fault: pytest.fail(fault))
    return pool, sender, make(sender, wants=["num_output_tokens"])


def stream(responder: Responder, pool: SenderPool, deltas: int, pause_s: float) -> None:
    for i in range(deltas):
        pool.queue([responder] if responder.push(Delta(1, text=f"{i},", num_tokens=1)) else [], 1)
        time.sleep(pause_s)


def counts(sender: pb.Sender) -> list[int]:
    return [r.outputs["num_output_tokens"][0] for r, _ in sender.sent if r is not None]


def test_busy_senders_take_two_tokens_a_response_and_lose_none() -> None:
    pool, sender, responder = one_sender()
    # One response for each delta would keep the sender busy for 2 of 2.2 ms.
    stream(responder, pool, 300, 0.0022)
    pool.stop(5)
    sent = counts(sender)
    assert sent[0] == 1
    assert sum(sent[-40:]) > 1.3 * 40
    assert sum(sent) == 300


def test_senders_at_ease_send_each_token_at_once() -> None:
    pool, sender, responder = one_sender()
    stream(responder, pool, 40, 0.02)
    pool.stop(5)
    assert counts(sender).count(1) >= 20


def test_a_held_token_does_not_wait_for_a_second_one_for_long() -> None:
    pool, sender, responder = one_sender()
    stream(responder, pool, 200, 0.0022)
    time.sleep(SenderPool.HOLD_S * 2)
    stream(responder, pool, 1, 0)
    deadline = time.monotonic() + 5
    while sum(counts(sender)) < 201 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sum(counts(sender)) == 201
    pool.stop(5)
