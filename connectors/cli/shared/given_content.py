"""Content that an argument names: standard input for `-`, or a file; never more than a limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from schemas.errors import UsageError

STANDARD_INPUT: Final = "-"


def read_given(name: str, what: str, limit_bytes: int) -> bytes:
    """What `name` holds. Raises UsageError that begins with `what` when it cannot be read or is too long."""
    try:
        if name == STANDARD_INPUT:
            found = sys.stdin.buffer.read(limit_bytes + 1)
        else:
            with Path(name).open("rb") as file:
                found = file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{what}: cannot read {name!r}: {type(error).__name__}") from None
    if len(found) > limit_bytes:
        raise UsageError(f"{what}: longer than {limit_bytes} bytes")
    return found


def read_given_text(name: str, what: str, limit_bytes: int) -> str:
    """The same as UTF-8 text, without the line break at its end."""
    try:
        return read_given(name, what, limit_bytes).decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise UsageError(f"{what}: not UTF-8") from None
