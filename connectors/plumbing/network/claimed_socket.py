"""A Unix socket on which only one process at a time can listen.

    claimed = ClaimedSocket(path, private_below)
    while (listener := claimed.claim()) is None: ...   # another process listens

The kernel releases the lock of a process that has ended, and the next process replaces its socket file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from trunkline_agent.errors import TrunklineError
from trunkline_agent.unix_address import address_of

_OWNER_ONLY: Final = 0o700


class ClaimedSocket:
    """The path of a Unix socket, which one process at a time can claim by a lock on `<path>.lock`.

    Args:
        path: the path of the socket.
        private_below: a folder of Trunkline, such as the data directory. If the socket's folder is below it,
            `claim` makes that folder private. Elsewhere, `claim` refuses a folder that other users can open.
    """

    def __init__(self, path: Path, private_below: Path) -> None:
        self.path = path
        self._private_below = private_below
        self._lock: int | None = None
        self._listener: socket.socket | None = None

    def claim(self) -> socket.socket | None:
        """Lock the path for this process, and return a socket that is bound to it but does not listen yet.

        The call does not block. None means that another process has locked the path; try again later. Further
        calls return the same socket. No client can connect before the caller calls `listen` on the socket.

        Raises:
            TrunklineError: The path cannot be used. The message says what to do.
        """
        if self._listener is not None:
            return self._listener
        try:
            self._listener = self._claimed()
        except BlockingIOError:
            return None
        except OSError as error:
            raise TrunklineError(
                f"cannot listen on {self.path}: {error.strerror}; choose another xml_pump.command_socket"
            ) from None
        return self._listener

    def _claimed(self) -> socket.socket:
        self._make_folder()
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            listener = self._bound()
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        return listener

    def release(self) -> None:
        """Close the socket, delete its file, and release the lock, so that other processes can use the path.

        The call does nothing if this process has not locked the path. Do not call `claim` again afterwards;
        use a new object.
        """
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
                raise PermissionError(errno.EACCES, "its folder is open to other users (run chmod 700 on it)")
            folder.chmod(_OWNER_ONLY)

    def _bound(self) -> socket.socket:
        try:
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise FileExistsError(errno.EEXIST, "there is a file that is not a socket")
            self.path.unlink()
        except FileNotFoundError:
            pass
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with address_of(self.path) as address:
                listener.bind(address)
            # No client can connect before the listen call, so none can use the socket's first mode.
            self.path.chmod(0o600)
        except BaseException:
            listener.close()
            raise
        return listener
