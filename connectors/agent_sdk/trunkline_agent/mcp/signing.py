"""Signatures of agents' requests: RSASSA-PKCS1-v1_5 with SHA-256 over timestamp and body (AM-02, RFC 8017).

Test vectors are in docs/how-to/sign_agent_requests.md. Keys, signatures and timestamps come from clients, so
`verify` returns `False` for invalid ones and never raises. Public keys in PEM are SubjectPublicKeyInfo, private
ones PKCS#8 without a password.
"""

from __future__ import annotations

import base64
import re
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from trunkline_agent.wire.signing import base64_bytes, key_id_of

AGENT_HEADER: Final = "X-Agent-ID"
TIMESTAMP_HEADER: Final = "X-Timestamp"
SIGNATURE_HEADER: Final = "X-Signature"
# How far a request's timestamp may be from the server's clock, in either direction.
WINDOW_S: Final = 300
# A smaller modulus is weak; a larger one, like a large exponent, makes each check slow.
KEY_BITS: Final = (2048, 8192)
_EXPONENTS: Final = (65537, 2**64)
_PEM_LIMIT: Final = 16384
_SIGNATURE_LIMIT: Final = 4 * -(-KEY_BITS[1] // 8 // 3) + 4
# Some clients send a fraction. `\d` would also match digits that are not ASCII.
_TIMESTAMP: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


def public_key_pem(key: PublicKeyTypes) -> str:
    """Return a public key as PEM text (SubjectPublicKeyInfo)."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")


def private_key_pem(key: PrivateKeyTypes) -> str:
    """Return a private key as PEM text (PKCS#8) that is not encrypted, so the text is a secret."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")


def new_key_pair() -> tuple[bytes, str]:
    """Return a new RSA key pair of 2048 bits: the private key and the public key, both in PEM.

    The private key (PKCS#8) is not encrypted.
    """
    private_key = rsa.generate_private_key(public_exponent=_EXPONENTS[0], key_size=KEY_BITS[0])
    return private_key_pem(private_key).encode("ascii"), public_pem(private_key)


def load_private_key(pem: bytes) -> rsa.RSAPrivateKey:
    """Parse an RSA private key in PEM, with which an agent signs its requests.

    Raises:
        ValueError: `pem` is not an unencrypted RSA key of 2048 to 8192 bits with an odd exponent of at least
            65537 and at most 64 bits. The message does not quote the key.
    """
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError("no private key in PEM, or one with a password") from None
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ValueError("not an RSA key")
    _check_numbers(key.public_key())
    return key


def public_pem(private_key: rsa.RSAPrivateKey) -> str:
    """Return the public key of `private_key` as PEM (SubjectPublicKeyInfo), the form that agents register."""
    return public_key_pem(private_key.public_key())


def checked_public_key(pem: str) -> str:
    """Check an RSA public key and return it in a normal form: PEM as SubjectPublicKeyInfo.

    Different texts for the same key give the same result.

    Raises:
        ValueError: `pem` is no RSA key of 2048 to 8192 bits with an odd exponent of at least 65537 and at most
            64 bits.
    """
    return public_key_pem(_public_key(pem))


def key_id(public_key_pem: str) -> str:
    """Return the id of a public key in PEM: the first 16 hex digits of the SHA-256 of its DER form.

    Raises:
        ValueError: `public_key_pem` is no RSA key of 2048 to 8192 bits with an odd exponent of at least 65537
            and at most 64 bits.
    """
    return key_id_of(checked_public_key(public_key_pem))


def sign(private_key: rsa.RSAPrivateKey, timestamp: str, body: bytes) -> str:
    """Sign a request. Return the signature over timestamp and body in base64, for the header `X-Signature`.

    Args:
        private_key: the agent's key.
        timestamp: the text of the header `X-Timestamp`: seconds since 1970 UTC in decimal.
        body: the body of the request.

    Raises:
        ValueError: `timestamp` is not a decimal number of seconds.
    """
    if timestamp_seconds(timestamp) is None:
        raise ValueError("a timestamp is seconds since 1970 in decimal")
    signature = private_key.sign(timestamp.encode("ascii") + body, padding.PKCS1v15(), hashes.SHA256())
    return base64.b64encode(signature).decode("ascii")


def verify(public_key_pem: str, timestamp: str, body: bytes, signature: str) -> bool:
    """Return whether `signature` over timestamp and body was made with the private key of `public_key_pem`.

    Never raises: an invalid key, timestamp or signature gives `False`. The caller must also check that the
    timestamp is within 300 s of the present time and that the signature was not used before.

    Args:
        public_key_pem: the agent's public key in PEM.
        timestamp: the text of the header `X-Timestamp`: seconds since 1970 UTC in decimal.
        body: the body of the request.
        signature: the text of the header `X-Signature`, in base64.
    """
    given = signature_bytes(signature)
    if given is None or timestamp_seconds(timestamp) is None or not isinstance(body, bytes):
        return False
    try:
        key = _public_key(public_key_pem)
        key.verify(given, timestamp.encode("ascii") + body, padding.PKCS1v15(), hashes.SHA256())
    except (ValueError, InvalidSignature):
        return False
    return True


def signature_bytes(signature: str) -> bytes | None:
    """Decode a signature in base64. Return `None` if it is invalid.

    A valid text is canonical base64, and its length is that of signatures by keys of 2048 to 8192 bits.
    """
    if not isinstance(signature, str) or len(signature) > _SIGNATURE_LIMIT:
        return None
    given = base64_bytes(signature)
    is_of_a_key = given is not None and KEY_BITS[0] // 8 <= len(given) <= KEY_BITS[1] // 8
    return given if is_of_a_key else None


def timestamp_seconds(timestamp: str) -> float | None:
    """Parse the timestamp of a signed request: decimal seconds since 1970 UTC, with or without a fraction.

    Returns `None` if the text has another form.
    """
    if not isinstance(timestamp, str) or _TIMESTAMP.fullmatch(timestamp) is None:
        return None
    return float(timestamp)


def _public_key(pem: str) -> rsa.RSAPublicKey:
    if not isinstance(pem, str) or len(pem) > _PEM_LIMIT:
        raise ValueError("a public key is text in PEM")
    try:
        key = serialization.load_pem_public_key(pem.encode("utf-8"))
    except (ValueError, UnsupportedAlgorithm):
        # A text with a lone surrogate raises UnicodeEncodeError, which is a ValueError.
        raise ValueError("no public key in PEM") from None
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError("not an RSA key")
    _check_numbers(key)
    return key


def _check_numbers(key: rsa.RSAPublicKey) -> None:
    if not KEY_BITS[0] <= key.key_size <= KEY_BITS[1]:
        raise ValueError(f"an RSA key has {KEY_BITS[0]} to {KEY_BITS[1]} bits, not {key.key_size}")
    exponent = key.public_numbers().e
    if not _EXPONENTS[0] <= exponent < _EXPONENTS[1] or exponent % 2 == 0:
        raise ValueError("an RSA key's exponent is odd, at least 65537 and of at most 64 bits")
