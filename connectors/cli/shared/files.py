"""Functions that read a file which an argument names, or create one for a secret."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from trunkline_agent.errors import UsageError

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
