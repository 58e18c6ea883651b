"""Sockets of a client: a TCP connection to a host with several addresses, and the address of a Unix socket.

RFC 8305 says how the addresses of a host are tried. The address of a Unix socket in the file system has at most
107 bytes (unix(7)); a longer path is addressed relative to its folder.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINPROGRESS
from pathlib import Path
from typing import Any, Final

ATTEMPT_DELAY_S: Final = 0.25
"""After this time without an answer the next address is tried, beside those before it (RFC 8305, section 5)."""
_ADDRESS_BYTES: Final = 107


def connected(host: str, port: int, until: float) -> socket.socket:
    """Return a socket that is connected before a moment of the monotonic clock.

    Raises:
        OSError: The error of the last address. TimeoutError: the moment has passed.
    """
    waiting = _in_turns(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    poll = select.poll()
    under_way: dict[int, socket.socket] = {}
    fault: OSError = TimeoutError("timed out")
    next_at = 0.0
    try:
        while waiting or under_way:
            now = time.monotonic()
            if now >= until:
                raise TimeoutError("timed out")
            if waiting and (not under_way or now >= next_at):
                try:
                    begun = _begun(*waiting.pop(0))
                except OSError as error:
                    fault = error
                    continue
                under_way[begun.fileno()] = begun
                poll.register(begun, select.POLLOUT)
                next_at = now + ATTEMPT_DELAY_S
            wait_until = min(until, next_at) if waiting else until
            for fd, _ in poll.poll(max(0.0, wait_until - time.monotonic()) * 1000):
                found = under_way.pop(fd)
                if not (code := found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    found.setblocking(True)
                    return found
                poll.unregister(fd)
                found.close()
                fault = OSError(code, os.strerror(code))
        raise fault
    finally:
        for other in under_way.values():
            other.close()


def _in_turns(found: list[Any]) -> list[Any]:
    """Return addresses with the two families in turns, the preferred one of this machine first."""
    first = [one for one in found if one[0] == found[0][0]]
    others = [one for one in found if one[0] != found[0][0]]
    turns = [one for pair in zip(first, others, strict=False) for one in pair]
    return turns + first[len(others) :] + others[len(first) :]


def _begun(family: int, kind: int, protocol: int, _: str, address: Any) -> socket.socket:
    begun = socket.socket(family, kind, protocol)
    begun.setblocking(False)
    code = begun.connect_ex(address)
    if code not in (0, EINPROGRESS):
        begun.close()
        raise OSError(code, os.strerror(code))
    return begun


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
