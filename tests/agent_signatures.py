"""The headers with which an agent signs a request."""

from __future__ import annotations

import time

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from trunkline_agent.mcp import signing as agent_signing


def signed_headers(name: str, key: RSAPrivateKey, body: bytes, at: str = "") -> dict[str, str]:
    """The three headers for a body, signed now or `at` a moment (seconds since 1970)."""
    timestamp = at or str(int(time.time()))
    return {
        agent_signing.AGENT_HEADER: name,
        agent_signing.TIMESTAMP_HEADER: timestamp,
        agent_signing.SIGNATURE_HEADER: agent_signing.sign(key, timestamp, body),
    }
