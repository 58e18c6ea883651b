"""The signature of an agent's HTTP requests (AM-02), and the private key that makes it.

Each request is signed when it is sent, with the time at which it is sent.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

import httpx2
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from schemas.streams.agents.agent_signing import (
    AGENT_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    load_private_key,
    sign,
)
from trunkline_agent.errors import Refused, UsageError
from trunkline_agent.wire.ids import is_name

# No key is longer. The limit also ends the reading of an endless file.
_FILE_LIMIT: Final = 65536


class KeyFileError(UsageError):
    """The file of the agent's private key cannot be used. The text says why, without the file's content."""


class AgentKey:
    """An agent's private key in a file that only its owner may read. Thread-safe.

    The file is read again when it has changed. To rotate the key, replace the file (`os.replace`). A file that
    is written in place may be read half written, and is refused at that moment.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._key: RSAPrivateKey | None = None

    def __repr__(self) -> str:
        return f"AgentKey({str(self._path)!r})"

    def current(self) -> RSAPrivateKey:
        """Return the key that is in the file now.

        Raises KeyFileError if the file is missing, is readable by others or has no valid key. This also holds
        for a file that was usable before, because the owner may have withdrawn the key.
        """
        with self._lock:
            try:
                # O_NONBLOCK, because opening a pipe would wait for a writer.
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else "no path"
                raise KeyFileError(f"cannot read the key file {self._path}: {why}") from None
            try:
                return self._read(fd)
            finally:
                os.close(fd)

    def _read(self, fd: int) -> RSAPrivateKey:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise KeyFileError(f"the key file {self._path} is not a regular file")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise KeyFileError(
                f"the key file {self._path} is readable by others ({mode:04o}); run: chmod 600 {self._path}"
            )
        seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if self._key is None or seen != self._seen:
            self._key = None
            try:
                self._key = load_private_key(os.read(fd, _FILE_LIMIT))
            except (OSError, ValueError) as error:
                raise KeyFileError(f"the key file {self._path} holds no usable key: {error}") from None
            self._seen = seen
        return self._key


# The most seconds that a timestamp may be ahead of the clock: well inside the 300 s that the server accepts.
_AHEAD_S: Final = 120
# How long signed bodies are remembered, for a clock that is set back a little.
_KEPT_S: Final = 10
_CALL: Final = b"tools/call"


class SigningTimes:
    """The timestamps of signatures, chosen so that no two equal requests have the same one. Thread-safe.

    Equal calls with the same timestamp would have the same signature, and the server would refuse the second
    one as a replay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[bytes, int] = {}
        self._cleared_at = 0

    def next_for(self, signer: str, body: bytes, now: int) -> int:
        """Return the timestamp for the signature of a request, in seconds since 1970 UTC.

        The timestamp is `now`, or the next second that was not returned before for the same signer and body. It
        does not block.

        Args:
            signer: The name of the agent.
            body: The body of the request.
            now: The current time in seconds since 1970 UTC.

        Raises:
            Refused: The timestamp would be more than two minutes ahead of `now`.
        """
        digest = hashlib.sha256(signer.encode("utf-8") + b"\0" + body).digest()
        with self._lock:
            if abs(now - self._cleared_at) >= 1:
                self._last = {key: at for key, at in self._last.items() if at >= now - _KEPT_S}
                self._cleared_at = now
            at = max(now, self._last.get(digest, -1) + 1)
            if at > now + _AHEAD_S:
                raise Refused(f"the same call {_AHEAD_S} times within a second: give each an idempotencyKey")
            self._last[digest] = at
            return at


# One for the process, because two clients of one agent must not make equal signatures either.
_TIMES: Final = SigningTimes()


class SignedAuth(httpx2.Auth):
    """The authentication of an agent for httpx2: it adds name, time and signature to each request's headers.

    A request raises KeyFileError when the key cannot be used, and Refused when the same call is made more than
    120 times within a second.

    Args:
        agent_id: The agent's registered name. UsageError is raised for an invalid one.
        key: The agent's private key.
        times: The source of timestamps, by default one for the whole process.
    """

    requires_request_body = True

    def __init__(self, agent_id: str, key: AgentKey, times: SigningTimes = _TIMES) -> None:
        if not is_name(agent_id):
            raise UsageError("an agent's name has letters, digits, dots, dashes and underscores, at most 128")
        self._agent_id = agent_id
        self._key = key
        self._times = times

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Add the signature's headers to a request and yield it once. httpx2 calls this for each request.

        Raises KeyFileError when the key cannot be used, and Refused when the same call is made more than 120
        times within a second.
        """
        body = request.content
        now = int(time.time())
        # Two reads may have the same signature: they change nothing, so they are no replay.
        timestamp = str(self._times.next_for(self._agent_id, body, now) if _CALL in body else now)
        request.headers[AGENT_HEADER] = self._agent_id
        request.headers[TIMESTAMP_HEADER] = timestamp
        request.headers[SIGNATURE_HEADER] = sign(self._key.current(), timestamp, body)
        yield request
