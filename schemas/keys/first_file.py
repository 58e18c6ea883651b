"""A private file that is made once: of several programs that start at once, one makes it and all read it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def make_first(path: Path, text: str) -> None:
    """Write `text` to a new 0600 file, whole and on the disk; a file that is there is left as it is.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        # A link does not replace: whoever comes second keeps what the first has made.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
