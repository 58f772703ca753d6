from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from voltriton.wire import MAX_FRAME_BYTES, Decoder, Delta, Generation, encode

FRAMES = [["ready", {"a": "聪明 👩‍🔬"}], ["deltas", [[1, 0, "x", 1]]], ["stop", 1.5]]


@given(st.lists(st.integers(1, 40), max_size=30))
def test_frames_are_the_same_however_the_bytes_are_cut(sizes: list[int]) -> None:
    data = b"".join(map(encode, FRAMES))
    decoder, found, position = Decoder(), [], 0
    for size in [*sizes, len(data)]:
        found += decoder.feed(data[position : position + size])
        position += size
    assert found == FRAMES


def test_a_length_that_no_honest_frame_has_is_refused() -> None:
    with pytest.raises(ValueError, match="claims"):
        Decoder().feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("body", [b"{}", b"[]", b"[1]"])
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a frame"):
        Decoder().feed(struct.pack("<I", len(body)) + body)


def test_not_a_number_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(["stats", [float("nan")]])


@pytest.mark.parametrize(
    "delta",
    [
        Delta(1),
        Delta(1, 2, "x", 3),
        Delta(1, stop_reason=0),
        Delta(1, cumulative_logprob=0.0),
        Delta(1, token_ids=[], final=True),
        Delta(1, reasoning="", tool_calls=[]),
        Delta(1, 0, "x", 1, [5], "stop", "end", ["{}"], -0.5, "why", [{"index": 0}], {"timing": {}}, True),
    ],
)
def test_a_delta_survives_its_short_form(delta: Delta) -> None:
    row = json.loads(json.dumps(delta.row()))
    assert Delta(*row) == delta


def test_a_usual_delta_is_short() -> None:
    assert Delta(7, 0, "x", 1).row() == [7, 0, "x", 1]


def test_a_generation_survives_the_wire() -> None:
    generation = Generation(1, "id", prompts=["聪\ud83d"], sampling={"n": 2}, wants=["timing"], timeout_ms=5)
    (frame,) = Decoder().feed(encode(generation.frame()))
    assert Generation(**frame[1]) == generation
