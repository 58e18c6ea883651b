"""An index of the registered public keys of agents, against which the agent MCP server checks each request."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from connectors.hub.live.row_lists import RowIndex
from schemas.streams.agents.agent_registry import AgentKeyRow
from schemas.streams.principal.principals import ACTIVE
from trunkline_agent.mcp.signing import WINDOW_S, signature_bytes, timestamp_seconds

# The least number of keys that are tried before a signature is refused. An agent that changes its key has two,
# so the time of the check does not reveal which agents exist.
_TRIES: Final = 2
_PARSED: Final = 4096
_EXPONENT: Final = 65537
_DIGEST: Final = Prehashed(hashes.SHA256())


class AgentKeys(RowIndex[AgentKeyRow]):
    """An index of the valid public keys of all agents (AM-02, AM-03), kept up to date by the live view.

    Thread-safe for one thread that calls `changed` and any number of readers. `clock` returns seconds since
    1970 UTC.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(AgentKeyRow)
        self._clock = clock
        self._keys: dict[str, dict[str, AgentKeyRow]] = {}
        self._on_removed: list[Callable[[str], None]] = []

    def _add(self, row: AgentKeyRow) -> None:
        keys = self._keys.setdefault(row.agent_name, {})
        if row.status == ACTIVE:
            keys[row.key_id] = row
        else:
            keys.pop(row.key_id, None)
            if not keys:
                del self._keys[row.agent_name]
                for callback in self._on_removed:
                    callback(row.agent_name)

    def on_removed(self, callback: Callable[[str], None]) -> None:
        """Register a callback that gets the name of each agent whose last key was removed.

        The live view's thread calls it. It must not block and must not call this index.
        """
        self._on_removed.append(callback)

    def is_registered(self, agent_name: str) -> bool:
        """Return whether an agent has at least one registered key.

        Otherwise each request of the agent is refused, and its SSE connections end.
        """
        with self._lock:
            return agent_name in self._keys

    def verify_signature(self, agent_name: str, timestamp: str, body: bytes, signature: str) -> str | None:
        """Return None if a request has a valid signature of this agent, otherwise the reason for refusing.

        For an unknown agent the reason and the time of the check are the same as for a wrong signature. So
        neither reveals which agents exist. The method raises nothing.

        Args:
            agent_name: The name of the agent that the request claims to come from.
            timestamp: Seconds since 1970 UTC in decimal, from a header. It may differ from this clock by
                `WINDOW_S` at most.
            body: The raw body of the request. The signature covers the timestamp and the body.
            signature: The RSA signature in base64, from a header.
        """
        now = self._clock()
        seconds = timestamp_seconds(timestamp)
        if seconds is None:
            return "the timestamp is not seconds since 1970 in decimal"
        if abs(now - seconds) > WINDOW_S:
            return f"the timestamp is not within {WINDOW_S} s of this clock"
        given = signature_bytes(signature)
        if given is None:
            return "the signature is not the base64 of an RSA signature"
        with self._lock:
            rows = list(self._keys.get(agent_name, {}).values())
        rows.sort(key=lambda row: row.registered_at, reverse=True)
        good = [row for row in rows if row.valid_until is None or row.valid_until > now * 1e6]
        number = int.from_bytes(given)
        fitting = [key for row in good if (key := _fitting(row.public_key, len(given), number)) is not None]
        digest = hashlib.sha256(timestamp.encode("ascii") + body).digest()
        for key in fitting:
            if _fits(key, digest, given):
                return None
        for _ in range(_TRIES - len(fitting)):
            _fits(_nobodys(len(given)), digest, given)
        return "no such agent, or not its signature"


def _fitting(public_key: str, length: int, number: int) -> rsa.RSAPublicKey | None:
    """Return the key if a signature of this length and value can be one of its signatures, else None.

    Other keys are not tried. They would refuse the signature faster than the right key, and the time would
    reveal the key.
    """
    key, modulus = _parsed(public_key)
    return key if (modulus.bit_length() + 7) // 8 == length and number < modulus else None


@lru_cache(maxsize=_PARSED)
def _parsed(public_key: str) -> tuple[rsa.RSAPublicKey | None, int]:
    """Return a key and its modulus. The modulus 0, which fits no signature, stands for an unusable key."""
    try:
        key = serialization.load_pem_public_key(public_key.encode("ascii"))
    except ValueError:
        return None, 0
    return (key, key.public_numbers().n) if isinstance(key, rsa.RSAPublicKey) else (None, 0)


@lru_cache(maxsize=1024)
def _nobodys(length: int) -> rsa.RSAPublicKey:
    """Return a public key for signatures of this length whose private half nobody has.

    Its modulus begins with ones, so that hardly any signature is too large for it. A check takes as long as
    with a real key.
    """
    bits = 8 * length
    return rsa.RSAPublicNumbers(_EXPONENT, (1 << bits) - 1 - (secrets.randbits(bits - 64) & ~1)).public_key()


def _fits(key: rsa.RSAPublicKey, digest: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, digest, padding.PKCS1v15(), _DIGEST)
    except InvalidSignature:
        return False
    return True
