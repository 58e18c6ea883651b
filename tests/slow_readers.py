"""Clients that open event streams over real sockets and do not read them, and what these cost the gateway."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit


@contextmanager
def slow_readers(url: str, path: str, tokens: list[str], count: int) -> Iterator[list[socket.socket]]:
    """Open event streams whose answers are not read: `count` for each of the principals with these tokens."""
    address = urlsplit(url)
    with ExitStack() as opened:
        found = []
        for token in tokens:
            for _ in range(count):
                found.append(opened.enter_context(socket.socket()))
                # Bytes that the client's kernel keeps would cost no memory of the gateway.
                found[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                found[-1].settimeout(20)
                found[-1].connect((address.hostname, address.port))
                request = (
                    f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n"
                )
                found[-1].sendall(request.encode())
        yield found


def memory_of(pid: int) -> int:
    """The resident memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def seconds_of(calls: int, call: Callable[[], object]) -> list[float]:
    """The durations of so many calls, shortest first."""
    found = []
    for _ in range(calls):
        begun = time.monotonic()
        call()
        found.append(time.monotonic() - begun)
    return sorted(found)


def percentile(sorted_values: list[float], percent: int) -> float:
    """A percentile of at least two values."""
    return statistics.quantiles(sorted_values, n=100, method="inclusive")[percent - 1]
