"""Files that arguments name: read up to a limit, or made new for the owner alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from schemas.errors import UsageError

STANDARD_INPUT: Final = "-"


def read_given(name: str, what: str, limit_bytes: int) -> bytes:
    """Return the content of the file `name`, or of standard input for `-`.

    Raises UsageError that begins with `what` when it cannot be read or is longer than `limit_bytes`.
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
    """Return the same as UTF-8 text, without the line break at its end."""
    try:
        return read_given(name, what, limit_bytes).decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise UsageError(f"{what}: not UTF-8") from None


@contextmanager
def new_private_file(path: Path | None, option: str) -> Iterator[IO[str] | None]:
    """Make a new file with mode 0600 for a secret; remove it again when the block fails.

    The file is made before the block, so that no secret is created that cannot be stored. It is on the disk
    when the block has ended. Yields None without a path. Raises UsageError that names `option` when the file
    exists or cannot be made.
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
