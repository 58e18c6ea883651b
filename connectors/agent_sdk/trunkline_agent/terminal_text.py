"""Display untrusted text on a terminal without executing its control sequences."""

from __future__ import annotations

QUOTED_CHARACTERS = 60


def escaped(text: str) -> str:
    """Return the text as one line, with all unprintable characters escaped.

    These are control characters, ANSI sequences, line breaks, bidirectional and zero-width marks, and lone
    surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def quoted(text: str, limit: int = QUOTED_CHARACTERS) -> str:
    """Return text from the input for use in an error text: unprintable characters escaped.

    A longer text is cut to `limit` characters, the last of which is then an ellipsis.
    """
    shown = escaped(text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
