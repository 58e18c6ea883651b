"""The lock that lets one process at a time write the view tables on this machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.settings.settings import Settings
from trunkline_agent.errors import Refused


@contextmanager
def views_lock(settings: Settings) -> Iterator[None]:
    """Hold the lock of the view tables in a `with` block.

    The lock is on the file `run/views.lock` of the data directory. The kernel releases it if the process dies.

    Raises:
        Refused: Another process holds the lock. The message has its pid. The function does not wait.
    """
    path = settings.data_path / "run" / "views.lock"  # with the pid of its last holder
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise Refused(
                f"process {holder} is writing the view tables; stop it first (./trunkline down)"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
