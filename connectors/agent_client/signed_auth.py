"""Signs each request of an HTTP client for an agent (AM-02), anew and with the time at which it goes out."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Generator
from typing import Final

import httpx2

from connectors.agent_client.agent_key import AgentKey
from schemas.errors import Refused, UsageError
from schemas.streams.agents.agent_signing import AGENT_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, sign
from schemas.wire.ids import is_name

# So far ahead of the clock a timestamp may be: well inside the server's 300 s, whatever our clocks differ.
_AHEAD_S: Final = 120
# What was signed is remembered so long behind the clock, for a clock that is put back a little.
_KEPT_S: Final = 10
_CALL: Final = b"tools/call"


class SigningTimes:
    """Gives the second under which a body is signed: now, or the first one later in which it was not yet.

    Equal calls in one second would have one signature, and the server would take the second for a replay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[bytes, int] = {}
        self._cleared_at = 0

    def next_for(self, signer: str, body: bytes, now: int) -> int:
        """The timestamp for a body. Raises Refused when the body was signed for all the seconds ahead."""
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


# One for the process: two clients of one agent must not sign the same, either.
_TIMES: Final = SigningTimes()


class SignedAuth(httpx2.Auth):
    """Adds the agent's name, the time and the signature. Raises KeyFileError when the key cannot be used, and
    Refused when one call is made too often in a second.
    """

    requires_request_body = True

    def __init__(self, agent_id: str, key: AgentKey, times: SigningTimes = _TIMES) -> None:
        if not is_name(agent_id):
            raise UsageError("an agent's name has letters, digits, dots, dashes and underscores, at most 128")
        self._agent_id = agent_id
        self._key = key
        self._times = times

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Sign the request and send it once."""
        body = request.content
        now = int(time.time())
        # A read may have the signature of another: it changes nothing, so it is no replay.
        timestamp = str(self._times.next_for(self._agent_id, body, now) if _CALL in body else now)
        request.headers[AGENT_HEADER] = self._agent_id
        request.headers[TIMESTAMP_HEADER] = timestamp
        request.headers[SIGNATURE_HEADER] = sign(self._key.current(), timestamp, body)
        yield request
