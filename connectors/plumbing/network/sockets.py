"""Sockets: a Unix socket on which one process at a time can listen, and whether a TCP peer still answers.

The kernel releases the lock of a process that has ended, and the next process replaces its socket file.

A client whose machine or link is gone sends no end of its connection (DL-52). All that is sent to it is lost
then, for 15 minutes by the defaults of Linux. So the kernel probes each silent connection (RFC 9293, section
3.8.4) and ends one that does not answer, or takes nothing, for 50 s (RFC 5482). Before the gateway hands a
message out for good to a client that has waited, it lets the kernel probe at once. A proxy answers the probes
for its own clients.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import ipaddress
import os
import select
import socket
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from trunkline_agent.errors import TrunklineError
from trunkline_agent.sockets import address_of

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


# The silence before the first probe, and the time between two.
_IDLE_S: Final = 15
_INTERVAL_S: Final = 5
UNANSWERED_MS: Final = 50_000
# A client that was heard of so recently is not probed again. The kernel takes whole seconds.
_FRESH_MS: Final = 1000
_PROBE_S: Final = 2.0
_FIRST_LOOK_S: Final = 0.001
# Of `struct tcp_info`: the milliseconds since data, and since an acknowledgement, came last.
_TCP_INFO: Final = struct.Struct("=52xII")


def probe_silent_peers(listener: socket.socket) -> None:
    """Let the kernel probe the silent connections of a TCP listener, and end those that do not answer.

    Linux hands the options on to each connection that the listener accepts.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)


async def peer_answers(connection: Any) -> bool:
    """Return whether the peer of a TCP connection was heard of within a second, or answers a probe within 2 s.

    `connection` is a socket, or asyncio's stand-in for one. The result is False for a peer that has ended the
    connection, even if nobody has read that yet. Else it is True for peers on this machine, whose end the
    kernel always tells, and for other kinds of sockets. Only 2 s pass without an answer.
    """
    if has_left(connection):
        return False
    if is_near(connection):
        return True
    with suppress(OSError):
        if (before_ms := silent_ms(connection)) <= _FRESH_MS:
            return True
        # The connection has been silent for longer than this, so the kernel probes at once.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        try:
            deadline, look_s = time.monotonic() + _PROBE_S, _FIRST_LOOK_S
            while time.monotonic() < deadline:
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, 0.1)
                if silent_ms(connection) < before_ms:
                    return True
        finally:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    return False


def is_heard(connection: Any, *, is_near: bool) -> bool:
    """Return whether `peer_answers` would return True at once. `is_near`: as the function of this name."""
    if has_left(connection):
        return False
    with suppress(OSError):
        return is_near or silent_ms(connection) <= _FRESH_MS
    return False


def is_near(connection: Any) -> bool:
    """Return whether the kernel always tells the end of a socket's peer: it is on this machine, or no TCP."""
    with suppress(OSError):
        return connection.family not in (socket.AF_INET, socket.AF_INET6) or _is_local(connection)
    return False


def has_left(connection: Any) -> bool:
    """Return whether the peer has ended the connection of a socket, even if nobody has read that yet."""
    if connection.fileno() < 0:
        return True
    end = select.poll()
    end.register(connection, select.POLLRDHUP)
    return bool(end.poll(0))


def _is_local(connection: Any) -> bool:
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    return bool(here == there or ipaddress.ip_address(there).is_loopback)


def silent_ms(connection: Any) -> int:
    """Return the milliseconds since anything came from the peer of a TCP connection."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    since_data, since_answer = _TCP_INFO.unpack(info)
    return int(min(since_data, since_answer))
