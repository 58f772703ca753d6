"""Server-sent events from bytes that may be cut anywhere: `feed` and `flush`, no network.

Follows https://html.spec.whatwg.org/multipage/server-sent-events.html: lines end with CR, LF or both, an
event's `data` lines are joined, comments and unknown fields are skipped, an event without its blank line at
the end is dropped.
"""

from __future__ import annotations

import codecs

from voltriton_client.errors import Internal

_MAX_EVENT_CHARS = 64 * 2**20


class SseDecoder:
    """Bytes in, the data of whole events out."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""
        self._data: list[str] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[str]:
        text = self._utf8.decode(piece)
        if self._at_start and text:
            text = text.removeprefix("\ufeff")
            self._at_start = False
        if self._after_cr and text:
            # The LF of a CR LF whose halves came in two pieces.
            text = text.removeprefix("\n")
            self._after_cr = False
        if text.endswith("\r"):
            self._after_cr = True
        *lines, self._line = (self._line + text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
        if len(self._line) > _MAX_EVENT_CHARS:
            raise Internal(
                f"an event's line is over {_MAX_EVENT_CHARS} characters: not what this service sends"
            )
        events = [self._take(line) for line in lines]
        return [event for event in events if event is not None]

    def flush(self) -> bool:
        """Call at the end. True when it came in the middle of an event."""
        return bool(self._utf8.decode(b"", final=True) or self._line or self._data)

    def _take(self, line: str) -> str | None:
        """Use one whole line; the event's data when it was the blank one after an event."""
        if line == "":
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None
