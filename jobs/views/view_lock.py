"""The lock for one writer of the view tables on this machine; the kernel releases it with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import Refused
from schemas.settings.settings import Settings


@contextmanager
def views_lock(settings: Settings) -> Iterator[None]:
    """Hold the lock. Raises Refused, with the pid of the holder, if another process holds it."""
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
