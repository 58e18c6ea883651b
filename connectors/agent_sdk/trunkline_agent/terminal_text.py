"""Display untrusted text on a terminal without executing its control sequences."""

from __future__ import annotations


def escaped(text: str) -> str:
    """Return the text as one line, with all unprintable characters escaped.

    These are control characters, ANSI sequences, line breaks, bidirectional and zero-width marks, and lone
    surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
