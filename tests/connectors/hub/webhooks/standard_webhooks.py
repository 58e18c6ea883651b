"""A verification of calls as the Standard Webhooks specification says, apart from the product's code."""

from __future__ import annotations

import hashlib
import time
from base64 import b64decode, b64encode

BLOCK = 64


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """HMAC as RFC 2104 defines it, by hand."""
    key = key if len(key) <= BLOCK else hashlib.sha256(key).digest()
    key = key.ljust(BLOCK, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).digest()


def verify(secret: str, headers: dict[str, str], body: bytes) -> None:
    """Fail unless one of the signatures of a call is right, and its time is now."""
    message_id, timestamp = headers["webhook-id"], headers["webhook-timestamp"]
    assert abs(time.time() - int(timestamp)) < 60
    assert secret.startswith("whsec_")
    signed = message_id.encode() + b"." + timestamp.encode() + b"." + body
    right = b64encode(hmac_sha256(b64decode(secret[6:]), signed)).decode()
    given = [one.split(",", 1) for one in headers["webhook-signature"].split(" ")]
    assert right in [text for version, text in given if version == "v1"]
