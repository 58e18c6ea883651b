"""Text for a terminal: output that every character fits, and untrusted text without control sequences."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

from trunkline_agent.errors import UsageError

QUOTED_CHARACTERS = 60
_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def is_coloured() -> bool:
    """Return whether to use colours: standard output is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def prepare_output() -> None:
    """Let the process print any text in UTF-8, whatever the locale; lone surrogates become escapes.

    A command calls it before it takes anything, such as a message out of a mailbox. Otherwise, it could find
    afterwards that it cannot show what it has taken.

    Raises:
        UsageError: Standard output is closed, so that nothing could be shown. Python would ignore it silently.
    """
    for stream in (sys.stdout, sys.stderr):
        # A test or a program that calls a command may have put another object here.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if sys.stdout is None:
        raise UsageError("standard output is closed", advice="redirect it to a file, or to /dev/null")


def drop_output() -> None:
    """Write what standard output takes at once, and drop the rest.

    Otherwise, Python would write it at its exit, report the same error again, or wait for a reader that does
    not read.
    """
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    number = sys.stdout.fileno()
    with contextlib.suppress(OSError, ValueError):
        os.set_blocking(number, False)
        try:
            sys.stdout.flush()
        finally:
            # Other processes may share the file.
            os.set_blocking(number, True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def output_fault(error: OSError) -> str | None:
    """Return why the output could not be written; None if the error is not about the output.

    The text is empty if the reader of the output, such as `head`, has ended. Output that is not written yet is
    dropped.
    """
    is_of_output = isinstance(error, BrokenPipeError) or error.errno in _OUTPUT_ERRORS
    if error.filename is not None or not is_of_output:
        return None
    drop_output()
    return "" if isinstance(error, BrokenPipeError) else f"the output cannot be written: {error.strerror}"


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
