"""The signature of an agent's HTTP requests (AM-02).

Each request is signed when it is sent, with the time at which it is sent.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Generator
from typing import Final

import httpx2

from trunkline_agent.errors import Refused, UsageError
from trunkline_agent.mcp.private_keys import KeySource
from trunkline_agent.mcp.signing import (
    AGENT_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    sign,
)
from trunkline_agent.wire.ids import is_name

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
SIGNING_TIMES: Final = SigningTimes()


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

    def __init__(self, agent_id: str, key: KeySource, times: SigningTimes = SIGNING_TIMES) -> None:
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
