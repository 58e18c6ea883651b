"""Display untrusted text on a terminal without executing its control sequences (CM-06)."""

from __future__ import annotations

import os
import sys


def escaped(text: str) -> str:
    """Return the text as one line, with all unprintable characters escaped.

    These are control characters, ANSI sequences, line breaks, bidirectional and zero-width marks, and lone
    surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def is_coloured() -> bool:
    """Return whether to use colours: standard output is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
