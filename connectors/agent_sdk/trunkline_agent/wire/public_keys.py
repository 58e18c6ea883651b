"""Ids of public keys, from their PEM alone."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

KEY_ID_DIGITS: Final = 16
_BEGIN: Final = "-----BEGIN PUBLIC KEY-----\n"
_END: Final = "\n-----END PUBLIC KEY-----\n"


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
