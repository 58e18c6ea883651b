"""Creation of a private file by the first of several programs that start at once.

One of them creates the file, and all read it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def make_first(path: Path, text: str) -> None:
    """Create a 0600 file with `text`, complete and synced to disk. Keep an existing file.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        # A link does not replace a file, so the first program's file stays.
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
