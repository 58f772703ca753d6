"""API keys and rate limits."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from voltriton_client.errors import InvalidArgument

# So many callers are remembered; the one not seen for longest goes first.
_MAX_CALLERS = 65536
_MIN_KEY_CHARS = 16


class Keys:
    """The keys of a file: one a line, `KEY` or `NAME KEY`; `#` begins a comment. A name may have several keys."""

    def __init__(self, keys: list[tuple[str, str]]) -> None:
        """`keys`: pairs of name and key."""
        self._digests = [(name, _digest(key)) for name, key in keys]

    @classmethod
    def load(cls, path: str) -> Keys:
        """InvalidArgument: no file, no key in it, or a key that is too short."""
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"--api-keys {path}: {error}") from error
        keys: list[tuple[str, str]] = []
        for number, line in enumerate(lines, 1):
            words = line.split("#", 1)[0].split()
            if not words:
                continue
            if len(words) > 2 or len(words[-1]) < _MIN_KEY_CHARS:
                raise InvalidArgument(
                    f"--api-keys {path}, line {number}: allowed: `KEY` or `NAME KEY`, a key of {_MIN_KEY_CHARS} "
                    "characters or more"
                )
            keys.append((words[0] if len(words) == 2 else f"key{number}", words[-1]))
        if not keys:
            raise InvalidArgument(f"--api-keys {path}: holds no key")
        return cls(keys)

    def name_of(self, key: str) -> str | None:
        """The key's name, or None. All keys are compared, each in constant time."""
        given, found = _digest(key), None
        for name, digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = name
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="replace")).digest()


class RateLimit:
    """A bucket for each caller that fills evenly: a minute's requests may come at once, then one after another."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = per_minute
        self._per_s = per_minute / 60
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> float:
        """Count a request: 0 when it may go on, else the seconds until one may."""
        now = self._clock()
        level, since = self._buckets.pop(caller, (float(self._size), now))
        level = min(self._size, level + (now - since) * self._per_s)
        allowed = level >= 1
        self._buckets[caller] = (level - 1 if allowed else level, now)
        if len(self._buckets) > _MAX_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - level) / self._per_s
