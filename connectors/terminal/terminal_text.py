"""Text of agents on a terminal (CM-06): shown, never obeyed."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def escaped(text: str) -> str:
    """`text` with everything that is not plainly printable as an escape: control characters, ANSI sequences,
    line breaks, bidirectional and zero-width marks, lone surrogates. One line in, one line out.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def is_coloured(stream: TextIO | None = None) -> bool:
    """Whether colours are wanted on `stream` (standard output): a terminal, and NO_COLOR is not set."""
    return (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR")
