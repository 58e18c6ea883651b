"""Arguments of commands: types that convert and validate their text, shared ones, and the files that they name.

A type raises UsageError for a value that is not well formed; argparse passes the error on to `main`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from connectors.cli.shared.actions import Argument, argument, one_of
from connectors.cli.shared.call import Call
from trunkline_agent.errors import UsageError
from trunkline_agent.private_files import PrivateFileError, check_private, open_private
from trunkline_agent.wire.ids import is_job_id, is_name, parse_stream_key
from trunkline_agent.wire.message_fields import duration_s

_PORT_LIMIT: Final = 65535
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>\d{1,5}))?")
# The gateway takes the same as the value of a header.
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,255}").fullmatch


def name_of(what: str) -> Callable[[str], str]:
    """Return a type for argparse: a function that returns its argument if that is a valid name.

    For any other text the function raises UsageError. `what` is the named thing for the error, such as "an
    agent". A name has at most 128 letters, digits, `.`, `_` and `-`.
    """

    def checked(text: str) -> str:
        if not is_name(text):
            raise UsageError(f"not the name of {what}: {text!r}")
        return text

    return checked


def job_id(text: str) -> str:
    """Return `text` if it is a job id (8 lower-case hex digits). Raises UsageError otherwise."""
    if not is_job_id(text):
        raise UsageError(f"not a job id (8 lower-case hex digits): {text!r}")
    return text


def stream_key(text: str) -> tuple[str, str]:
    """Split the name of a stream, written as KIND/ID, in kind and id. Raises UsageError for another form."""
    found = parse_stream_key(text.encode("utf-8", "surrogateescape"))
    if found is None:
        raise UsageError(f"expected KIND/ID such as refused/mqtt: {text!r}")
    return found


def whole_seconds(text: str) -> int:
    """Convert a duration to whole seconds, at least 1. Raises UsageError for other ones."""
    seconds = duration_s(text)
    if not seconds.is_integer() or seconds < 1:
        raise UsageError(f"expected whole seconds, 1 or more, found {text!r}")
    return int(seconds)


def _request_id(text: str) -> str:
    if _REQUEST_ID(text) is None:
        raise argparse.ArgumentTypeError("expected 1 to 255 ASCII characters without spaces")
    return text


def request_id(effect: str) -> Argument:
    """Declare the option `--request-id`: a command that is repeated with the same id is the same request.

    The id is 1 to 255 ASCII characters. Without the option, the parsed value is None. `effect` is the end of
    the option's help: the text after "the same name again is".
    """
    return argument("--request-id", f"the same name again is {effect}", type=_request_id, metavar="NAME")


def duration(name: str, text: str, *older: str) -> Argument:
    """Declare an option whose value is a duration such as `5m`; the parsed value is in seconds.

    `name` is the option, such as `--timeout`, `text` its help, and `older` other spellings that it has had.
    """
    return argument(name, text, older=older, type=duration_s, metavar="TIME")


def path(name: str, text: str, metavar: str = "PATH") -> Argument:
    """Declare an argument that is the path of a file or a folder; the parsed value is a `Path`.

    The file need not exist. `name` is the argument or option, `text` its help, and `metavar` its placeholder in
    the help.
    """
    return argument(name, text, type=Path, metavar=metavar)


def limit(default: int = 50) -> Argument:
    """Declare the option `--limit`, the largest number of rows that a command lists, 50 by default."""
    return argument("--limit", f"at most (default: {default})", type=int, default=default, metavar="N")


AGENT: Final = argument("name", "the agent", type=name_of("an agent"))
JOB: Final = argument("job_id", "the job: 8 lower-case hex digits", type=job_id, metavar="ID")
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


def read_broker(call: Call) -> dict[str, Any] | None:
    """Return the job's own MQTT broker (JE-13) from `--broker` or `--broker-file`, or None without an option.

    `call` has the parsed arguments. The result has fields such as `host`, `port`, `username` and `password`.
    Raises UsageError if the file cannot be read, is no JSON object, or has a password and is readable by
    others.
    """
    name: str | None = call.broker_file
    found: dict[str, Any] | None = call.broker
    if name is None:
        return found
    try:
        if name == STANDARD_INPUT:
            found = json.load(sys.stdin)
        else:
            with os.fdopen(open_private(name), "rb") as file:
                found = json.load(file)
                if isinstance(found, dict) and "password" in found:
                    check_private(name, os.fstat(file.fileno()))
    except PrivateFileError as error:
        raise UsageError(f"--broker-file: {error}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--broker-file: cannot read {name}: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise UsageError("--broker-file: expected a JSON object with host, port, tls, …")
    return found


def broker_address(text: str) -> dict[str, Any]:
    """Return the field `host`, and `port` if it is given, of an address `HOST[:PORT]` or `[IPv6]:PORT`.

    Raises argparse.ArgumentTypeError for another text.
    """
    found = _ADDRESS.fullmatch(text)
    port = None if found is None or found["port"] is None else int(found["port"])
    if found is None or (port is not None and not 1 <= port <= _PORT_LIMIT):
        # The error does not repeat the text, which may hold a password.
        raise argparse.ArgumentTypeError(
            "expected HOST, HOST:PORT or [IPv6]:PORT; user, password and TLS go into --broker-file"
        )
    host = found["v6"] or found["name"]
    return {"host": host} if port is None else {"host": host, "port": port}


BROKER: Final = one_of(
    argument("--broker", "an MQTT broker for this job alone", type=broker_address, metavar="HOST[:PORT]"),
    argument(
        "--broker-file",
        "the same with user, password and TLS: a JSON object with host, port, tls, ca_certs, certfile, "
        "keyfile, username, password (- reads standard input)",
        metavar="FILE",
    ),
)


STANDARD_INPUT: Final = "-"


def read_given(name: str, what: str, limit_bytes: int) -> bytes:
    """Return the bytes of the file `name`, or of standard input if `name` is `-`.

    Raises UsageError if the input cannot be read or is longer than `limit_bytes`. The error's text begins with
    `what`, the name of the command's argument. Reading standard input blocks until its end.
    """
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
    """Return the UTF-8 text of the file `name`, or of standard input for `-`, without a line break at its end.

    Raises UsageError if the input cannot be read, is longer than `limit_bytes` or is not UTF-8. The error's
    text begins with `what`, the name of the command's argument.
    """
    try:
        return read_given(name, what, limit_bytes).decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise UsageError(f"{what}: not UTF-8") from None


@contextmanager
def new_private_file(path: Path | None, option: str) -> Iterator[IO[str] | None]:
    """Create a new file with mode 0600 for a secret, and yield it open for writing text.

    The file is created before the `with` block. So a block that makes a secret does not run if the secret could
    not be stored. The file is synced to the disk at the block's end, and deleted if the block raises.

    Args:
        path: The path of the file; None yields None and creates no file.
        option: The option that named the file, for errors, such as `--token-file`.

    Raises:
        UsageError: The file exists or cannot be created.
    """
    if path is None:
        yield None
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{option}: {path} exists already; it is not overwritten") from None
    except OSError as error:
        raise UsageError(f"{option}: cannot write {path}: {error.strerror}") from None
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        try:
            yield file
            file.flush()
            os.fsync(fd)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
