"""Types of arguments for argparse, and arguments that several commands have.

A type raises UsageError for a value that is not well formed; argparse passes the error on to `main`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from connectors.cli.shared.actions import Argument, argument
from connectors.cli.shared.text_table import UNIT_S
from schemas.errors import UsageError
from schemas.wire.ids import is_job_id, is_name, parse_stream_key

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)").fullmatch
# The gateway takes the same as the value of a header.
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,255}").fullmatch


def name_of(what: str) -> Callable[[str], str]:
    """Return a type for names, which become part of an address; `what` is named in the error, "an agent"."""

    def checked(text: str) -> str:
        if not is_name(text):
            raise UsageError(f"not the name of {what}: {text!r}")
        return text

    return checked


def job_id(text: str) -> str:
    """Return `text` if it is a job id."""
    if not is_job_id(text):
        raise UsageError(f"not a job id (8 lower-case hex digits): {text!r}")
    return text


def stream_key(text: str) -> tuple[str, str]:
    """Return kind and id of a stream that is written as KIND/ID."""
    found = parse_stream_key(text.encode("utf-8", "surrogateescape"))
    if found is None:
        raise UsageError(f"expected KIND/ID such as refused/mqtt: {text!r}")
    return found


def duration_s(text: str) -> float:
    """Return the seconds of `90`, `90s`, `5m`, `2h` or `1d`."""
    found = _DURATION(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30s, 5m, 2h or 1d, found {text!r}")
    return float(found[1]) * UNIT_S[found[2]]


def _request_id(text: str) -> str:
    if _REQUEST_ID(text) is None:
        raise argparse.ArgumentTypeError("expected 1 to 255 ASCII characters without spaces")
    return text


def request_id(effect: str) -> Argument:
    """Return the option `--request-id`; `effect` says what a request with the same name is."""
    return argument("--request-id", f"the same name again is {effect}", type=_request_id, metavar="NAME")


def duration(name: str, text: str) -> Argument:
    """Return an option with a duration."""
    return argument(name, text, type=duration_s, metavar="TIME")


def path(name: str, text: str, metavar: str = "PATH") -> Argument:
    """Return an option that names a file or a folder."""
    return argument(name, text, type=Path, metavar=metavar)


def limit(default: int = 50) -> Argument:
    """Return the option `--limit` of a list."""
    return argument("--limit", f"at most (default: {default})", type=int, default=default, metavar="N")


AGENT: Final = argument("name", "the agent", type=name_of("an agent"))
JOB: Final = argument("job", "the job: 8 lower-case hex digits", type=job_id, metavar="ID")
REASON: Final = argument("--reason", "the reason, kept in the ledger", metavar="TEXT")
OVERLAP: Final = argument(
    "--overlap",
    "how long the old one stays valid, as 90s, 5m, 2h (default: 1h)",
    type=duration_s,
    default=3600.0,
)
ROTATION: Final = (
    AGENT,
    argument("file", "the agent's private key, replaced in one step", type=Path),
    OVERLAP,
)
