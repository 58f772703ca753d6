"""Everything that can go wrong with a request or a model, by cause.

    VoltritonError
    ├── InvalidArgument    the request or a file is at fault; the engine never saw it
    ├── Unavailable        overload, engine dead or restarting, draining
    ├── Cancelled          the client went away or asked for it
    ├── DeadlineExceeded   `timeout_ms` passed
    ├── StartError         the engine could not be started
    └── InternalError      a fault of ours

`code` begins the text that a client sees; `triton` names the member of `pb_utils.TritonError`
that carries the cause on the wire (Triton has no code of its own for a deadline).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class VoltritonError(Exception):
    """Base of the family; `str(error)` is the message without the code."""

    code: ClassVar[str] = "INTERNAL"
    triton: ClassVar[str] = "INTERNAL"
    # Name of the outcome in `voltriton:requests_total`.
    outcome: ClassVar[str] = "failed"

    @property
    def text(self) -> str:
        """What goes to the client."""
        return f"{self.code}: {self}"


class InvalidArgument(VoltritonError):
    """The request is at fault: field, value got and what is allowed."""

    code = "INVALID_ARGUMENT"
    triton = "INVALID_ARG"
    outcome = "refused"


class Unavailable(VoltritonError):
    """The request may be sent again later, or elsewhere."""

    code = "UNAVAILABLE"
    triton = "UNAVAILABLE"
    outcome = "unavailable"


class Cancelled(VoltritonError):
    """The client went away or cancelled."""

    code = "CANCELLED"
    triton = "CANCELLED"
    outcome = "cancelled"


class DeadlineExceeded(VoltritonError):
    """The request's own `timeout_ms` passed."""

    code = "DEADLINE_EXCEEDED"
    triton = "CANCELLED"
    outcome = "deadline"


class StartError(VoltritonError):
    """The engine could not be started; the message is the cause, in one line."""

    code = "UNAVAILABLE"
    triton = "UNAVAILABLE"


class InternalError(VoltritonError):
    """A fault of ours."""


FAMILY: dict[str, type[VoltritonError]] = {
    cls.__name__: cls
    for cls in (InvalidArgument, Unavailable, Cancelled, DeadlineExceeded, StartError, InternalError)
}


def from_name(name: str, message: str) -> VoltritonError:
    """The error that `type(error).__name__` and `str(error)` were taken from, as it crosses a process."""
    return FAMILY.get(name, InternalError)(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the empty string where nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
