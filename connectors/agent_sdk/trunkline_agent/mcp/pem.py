"""Keys in PEM: public ones as SubjectPublicKeyInfo, private ones as PKCS#8 without a password."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def public_key_pem(key: PublicKeyTypes) -> str:
    """Return a public key as PEM text (SubjectPublicKeyInfo)."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")


def private_key_pem(key: PrivateKeyTypes) -> str:
    """Return a private key as PEM text (PKCS#8) that is not encrypted, so the text is a secret."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")
