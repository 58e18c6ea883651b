"""Files for secrets that a command hands out: new, 0600, and gone again when the command fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from schemas.errors import UsageError


@contextmanager
def new_private_file(path: Path | None, option: str) -> Iterator[IO[str] | None]:
    """The file, open, made before anything is asked for; None without a path. Raises UsageError that names
    `option` when it exists or cannot be made.
    """
    if path is None:
        yield None
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{option}: {path} is there already; it is not overwritten") from None
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
