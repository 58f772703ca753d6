"""The one error of this room: a sentence that says what is wrong and what to do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

# What helps against a file that is not as its maker left it; it is the user's, so nobody is told to delete it.
FETCH_AGAIN = "fetch or copy it again"


class CheckpointError(Exception):
    """Bad input, a full disk, or no network: what a user can see and mend. Always one line."""


def run_command(name: str, action: Callable[[], None]) -> int:
    """Run a command's body; what a user or a file can cause becomes one line on stderr and status 1."""
    try:
        action()
    except CheckpointError as error:
        print(f"voltriton {name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"voltriton {name}: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def at_least(least: int) -> Callable[[str], int]:
    """Of an option: a whole number that is not smaller."""

    def whole(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"got {value}, allowed: {least} or more")
        return value

    return whole
