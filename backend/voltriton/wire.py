"""The frames between the stub (inside Triton) and the engine host.

A frame is a little-endian 32-bit length and that many bytes of JSON: a list whose first element names
the frame. JSON because both ends have it compiled in their standard library whatever their Python is,
and because a frame can be read in a log. A frame of deltas carries all that one turn of the host's event
loop produced, for all requests, so the cost of a frame is shared.

    stub -> host   ["hello", VERSION, settings]         first frame; the host answers ready or failed
                   ["submit", generation]               Generation as a list
                   ["cancel", key]
                   ["drain"]                            refuse new requests from now on
                   ["stop", grace_s]                    let open requests finish for so long, then exit
    host -> stub   ["ready", info]
                   ["failed", message]                  the engine did not start
                   ["deltas", [delta, ...]]             Delta as a list
                   ["ended", key, error name, message]  the request failed
                   ["stats", [[name, labels, value], ...]]   values of Prometheus samples that changed
                   ["dying", message]                   the engine is dead or stuck; the host exits next
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, fields
from typing import Any

VERSION = 1
# No honest frame is larger: prompts are bounded by Triton's own 64 MiB limit on a request.
MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class Generation:
    """One Triton request. Exactly one of `prompts`, `input_ids`, `chat`, `embedding` and `lora` is set."""

    key: int
    id: str
    prompts: list[str] | None = None
    input_ids: list[int] | None = None
    chat: dict[str, Any] | None = None
    embedding: dict[str, Any] | None = None
    # {"load": NAME}, {"unload": NAME} or {}: answered by the names that are loaded then.
    lora: dict[str, Any] | None = None
    images: list[str] = field(default_factory=list)
    # Raw: names and types are the host's to check.
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    # Names of the optional outputs asked for.
    wants: list[str] = field(default_factory=list)
    priority: int = 0
    timeout_ms: int | None = None
    # Answer with the prompt's token ids instead of generating.
    render_only: bool = False

    def frame(self) -> list[Any]:
        # Not `asdict`: it copies every token id of a prompt, on the thread that Triton waits for.
        return ["submit", {name: getattr(self, name) for name in _GENERATION_FIELDS}]


_GENERATION_FIELDS = tuple(item.name for item in fields(Generation))


@dataclass(slots=True)
class Delta:
    """What is new of one sequence of a request.

    `index` counts sequences, prompt by prompt (prompt 0's `n` sequences first). `extra` is request-level:
    num_input_tokens, num_cached_tokens, prompt_logprobs (with a prompt's first delta), timing (with the last).
    `final` marks the request's last delta. `logprobs` holds one JSON text a token.
    """

    key: int
    index: int = 0
    text: str = ""
    num_tokens: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[str] | None = None
    cumulative_logprob: float | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None
    final: bool = False

    def row(self) -> list[Any]:
        """Positional, with what is absent at the end left out: most deltas are key, index, text, count."""
        row = [
            self.key, self.index, self.text, self.num_tokens, self.token_ids, self.finish_reason,
            self.stop_reason, self.logprobs, self.cumulative_logprob, self.reasoning, self.tool_calls,
            self.extra, self.final,
        ]  # fmt: skip
        while row[-1] is None or row[-1] is False:
            row.pop()
        return row


def is_counter(name: str) -> bool:
    """Whether a Prometheus sample of this name only grows (a histogram is three such series)."""
    return name.endswith(("_total", "_bucket", "_sum", "_count"))


def encode(frame: list[Any]) -> bytes:
    """A frame as bytes, its length in front. ValueError where a value is not JSON (NaN, say)."""
    body = json.dumps(frame, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into frames, however it was split."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """The frames that `data` completes. ValueError where the stream is not ours."""
        self._buffer += data
        frames = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame claims {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = position + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(self._parse(bytes(self._buffer[position + _LENGTH.size : end])))
            position = end
        del self._buffer[:position]
        return frames

    @staticmethod
    def _parse(body: bytes) -> list[Any]:
        frame = json.loads(body.decode("utf-8", "surrogatepass"))
        if not isinstance(frame, list) or not frame or not isinstance(frame[0], str):
            raise ValueError(f"not a frame: {body[:80]!r}")
        return frame
