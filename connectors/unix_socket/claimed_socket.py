"""A Unix socket that one process has at a time: who holds the lock beside it, `<socket>.lock`.

    claimed = ClaimedSocket(path)
    while (listener := claimed.claim()) is None: ...   another process has it

The kernel takes the lock from a process that is gone, however it went; the socket file that it has left is
replaced. An address in the file system may be 107 bytes long: a longer path is reached by way of its folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from schemas.errors import TrunklineError

_ADDRESS_BYTES: Final = 107
_OWNER_ONLY: Final = 0o700


class ClaimedSocket:
    """Claims and gives back one path. `private_below`: a folder below it that others may look into is made
    private; elsewhere such a folder is refused.
    """

    def __init__(self, path: Path, private_below: Path) -> None:
        self.path = path
        self._private_below = private_below
        self._lock: int | None = None
        self._listener: socket.socket | None = None

    def claim(self) -> socket.socket | None:
        """A bound socket that nobody can connect to yet, the same each time; None while another process has the
        path. Raises TrunklineError that says what to do about it.
        """
        if self._listener is not None:
            return self._listener
        try:
            self._listener = self._claimed()
        except OSError as error:
            raise TrunklineError(
                f"cannot listen on {self.path}: {error.strerror}; choose another xml_pump.command_socket"
            ) from None
        return self._listener

    def _claimed(self) -> socket.socket | None:
        self._make_folder()
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                return None
            raise
        try:
            listener = self._bound()
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        return listener

    def release(self) -> None:
        """Give the path back, if it is ours."""
        if self._lock is None:
            return
        with suppress(OSError):
            self.path.unlink()
        if self._listener is not None:
            self._listener.close()
        os.close(self._lock)
        self._lock = None

    def _make_folder(self) -> None:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=_OWNER_ONLY)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o077:
            if not folder.is_relative_to(self._private_below):
                raise PermissionError(errno.EACCES, "its folder is open to others (chmod 700 mends it)")
            folder.chmod(_OWNER_ONLY)

    def _bound(self) -> socket.socket:
        try:
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
            self.path.unlink()
        except FileNotFoundError:
            pass
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with address_of(self.path) as address:
                listener.bind(address)
            # Nobody can connect before it is listened on, so nobody finds it with other rights.
            self.path.chmod(0o600)
        except BaseException:
            listener.close()
            raise
        return listener


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    """What `bind` and `connect` take for a path. Raises OSError for a folder that is not there."""
    if len(os.fsencode(path)) <= _ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
