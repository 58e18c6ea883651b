"""The name of a pump process: its own as long as it lives, and its successor's after it.

When a pump starts, the gateway gives back what an earlier one of the same name held; so no two living pumps
may have one name. Each holds a lock on a file below the data directory, the first that is free, and the name
is in it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import IO, Final

from schemas.errors import TrunklineError
from schemas.wire.ids import is_name

_PUMPS_MOST: Final = 1000


def take_name(folder: Path) -> tuple[str, IO[bytes]]:
    """A name that no living pump has, and the file whose lock keeps it ours until it is closed.

    Raises OSError, TrunklineError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(1, _PUMPS_MOST + 1):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.fdopen(os.open(folder / f"{number}.name", flags, 0o600), "r+b", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        name = lock.read(200).decode("ascii", "replace").strip()
        if not is_name(name) or "." in name:
            # Other machines number theirs, too.
            name = f"pump-{number}-{secrets.token_hex(4)}"
            lock.seek(0)
            lock.truncate()
            lock.write(name.encode("ascii"))
        return name, lock
    raise TrunklineError(f"{_PUMPS_MOST} pumps run already below {folder}")
