"""Signatures of job events (JE-05), HMAC-SHA256 over canonical JSON, and ids of public keys, from their PEM.

Test vectors are in docs/how-to/publish_from_another_language.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Any, Final

from trunkline_agent.wire.strict_json import canonical

SIGNATURE_FIELD: Final = "hmac_sig"
_DIGITS: Final = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))
_BLOCK = 64
KEY_ID_DIGITS: Final = 16
_BEGIN: Final = "-----BEGIN PUBLIC KEY-----\n"
_END: Final = "\n-----END PUBLIC KEY-----\n"


def new_secret() -> str:
    """Return a new secret with which a job's agent signs its events: 32 random bytes as URL-safe base64."""
    return secrets.token_urlsafe(32)


class KeyedHash:
    """HMAC-SHA256 (RFC 2104) with one key.

    The results equal those of `hmac.digest(key, data, "sha256")`, at less than half the cost: the constructor
    prepares the key once. For short data, other threads of Python do not run meanwhile.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        if len(key) > _BLOCK:
            key = hashlib.sha256(key).digest()
        key = key.ljust(_BLOCK, b"\0")
        self._inner = hashlib.sha256(key.translate(_INNER))
        self._outer = hashlib.sha256(key.translate(_OUTER))

    def digest(self, data: bytes) -> bytes:
        """Return the HMAC of `data`, 32 bytes."""
        inner = self._inner.copy()
        inner.update(data)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()


class Signer(KeyedHash):
    """A signer and verifier with one secret by HMAC-SHA256."""

    __slots__ = ()

    def __init__(self, secret: str) -> None:
        super().__init__(secret.encode("utf-8"))

    def hexdigest(self, data: bytes) -> str:
        """Return the signature (HMAC-SHA256) of `data` as 64 lower-case hex digits."""
        return self.digest(data).hex()

    def verifies(self, data: bytes, signature: object) -> bool:
        """Return whether `signature` is the signature of `data` under this secret.

        The comparison takes constant time. Anything but 64 ASCII characters is invalid.
        """
        if type(signature) is not str or len(signature) != _DIGITS or not signature.isascii():
            return False
        return hmac.compare_digest(self.hexdigest(data), signature)


def base64_bytes(text: str) -> bytes | None:
    """Decode a base64 text. Return `None` if the text is invalid or not in canonical form.

    The canonical form is the text that Python's `b64encode` returns for the bytes. Only one text is thus
    accepted for the same bytes. Otherwise a replayed request could use another text for the same signature and
    look like a new request.
    """
    try:
        given = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return given if base64.b64encode(given).decode("ascii") == text else None


def signed_bytes(event: dict[str, Any]) -> bytes:
    """Return the bytes of a job event that are signed: its canonical JSON without `data.hmac_sig`.

    `event` is the decoded event and does not change.
    """
    data = event.get("data")
    if isinstance(data, dict) and SIGNATURE_FIELD in data:
        event = {**event, "data": {k: v for k, v in data.items() if k != SIGNATURE_FIELD}}
    return canonical(event)


def sign_event(event: dict[str, Any], secret: str) -> dict[str, Any]:
    """Return a copy of the job event `event` with its signature in `data.hmac_sig`.

    `secret` is the secret of the job. `event["data"]` must be an object. An old signature in it is replaced.
    """
    signature = Signer(secret).hexdigest(signed_bytes(event))
    return {**event, "data": {**event["data"], SIGNATURE_FIELD: signature}}


def public_key_der(pem: str) -> bytes:
    """Return the DER bytes of a public key in PEM (SubjectPublicKeyInfo). The key itself is not checked.

    Raises:
        ValueError: `pem` is another text, or its lines do not have 64 characters.
    """
    if not pem.startswith(_BEGIN) or not pem.endswith(_END):
        raise ValueError("not a public key in PEM form")
    lines = pem[len(_BEGIN) : -len(_END)].split("\n")
    if any(len(line) != 64 for line in lines[:-1]) or not 0 < len(lines[-1]) <= 64:
        raise ValueError("not a public key in PEM form: lines have 64 characters")
    return base64.b64decode("".join(lines), validate=True)


def key_id_of(public_key: str) -> str:
    """Return the id of a public key in PEM: the first 16 hex digits of the SHA-256 of its DER form.

    Type and size of the key are not checked.

    Raises:
        ValueError: `public_key` is not a public key in PEM.
    """
    return hashlib.sha256(public_key_der(public_key)).hexdigest()[:KEY_ID_DIGITS]
