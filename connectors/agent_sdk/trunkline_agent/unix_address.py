"""The address of a Unix socket in the file system, which has at most 107 bytes (unix(7)).

A longer path is addressed relative to its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_ADDRESS_BYTES: Final = 107


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    """Yield the address that `bind` or `connect` needs for the path of a Unix socket, in a `with` block.

    An address has at most 107 bytes. For a longer path it names the open folder, so it is only valid in the
    block.

    Raises:
        OSError: The path is too long, and its folder does not exist.
    """
    if len(os.fsencode(path)) <= _ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
