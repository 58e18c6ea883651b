"""Anchors of the audit chain: signed statements of its length, stored apart from the ledger.

A person who cuts off rows and chain together, or rewrites both, cannot make the chain match an older anchor.
Anchors are signed with Ed25519. An auditor keeps the public key.
"""

from __future__ import annotations

import base64
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from schemas.errors import UsageError
from schemas.integrity.audit_chain import ChainEntry, Number, Partition
from schemas.keys.pem import private_key_pem
from schemas.keys.private_files import make_first
from schemas.wire.strict_json import canonical_plain

_PURPOSE: Final = b"trunkline audit anchor\n"
_END: Final = b"-----END PUBLIC KEY-----"


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signed part of an anchor: the state of the chain of the Delta table with the id `table`.

    `length` is the number of its entries, `value` the value of the last one, and `ends` the first offset of
    each partition that is not in the ledger. `rows` is the number of rows that the chain covers. `time_us` is
    the time by the signer's clock, in microseconds since 1970 UTC.
    """

    table: str
    length: Number
    value: str
    ends: dict[Partition, Number]
    rows: Number
    time_us: Number


class Anchor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A statement, the id of the key that signed it, and the signature in base64."""

    statement: Statement
    key: str
    signature: str

    def text(self) -> bytes:
        """Return the anchor's line in the anchors file."""
        return canonical_plain(msgspec.to_builtins(self, str_keys=True)) + b"\n"


_parse: Final = msgspec.json.Decoder(Anchor).decode


def statement_of(entry: ChainEntry, time_us: int) -> Statement:
    """Return the statement about a chain that ends with `entry`."""
    return Statement(entry.table, entry.number + 1, entry.value(), entry.ends, entry.rows, time_us)


def sign_statement(statement: Statement, key: Ed25519PrivateKey) -> Anchor:
    """Return an anchor: `statement` with its signature by `key`."""
    signature = base64.b64encode(key.sign(_signed_bytes(statement))).decode("ascii")
    return Anchor(statement, key_id(key.public_key()), signature)


def is_signed_by(anchor: Anchor, keys: dict[str, Ed25519PublicKey]) -> bool:
    """Return whether the anchor has a valid signature by one of `keys`, which maps key ids to keys."""
    key = keys.get(anchor.key)
    if key is None:
        return False
    try:
        key.verify(base64.b64decode(anchor.signature, validate=True), _signed_bytes(anchor.statement))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed_bytes(statement: Statement) -> bytes:
    return _PURPOSE + canonical_plain(msgspec.to_builtins(statement, str_keys=True))


def read_anchors(path: Path) -> list[Anchor | None]:
    """Return the lines of an anchors file, with None for a line that cannot be read.

    A crash may leave such a line.
    """
    found: list[Anchor | None] = []
    for text in path.read_bytes().splitlines():
        try:
            found.append(_parse(text))
        except (msgspec.DecodeError, UnicodeDecodeError):
            found.append(None)
    return found


def key_id(key: Ed25519PublicKey) -> str:
    """Return the id of a public key: the first 16 hex digits of its SHA-256."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return sha256(raw).hexdigest()[:16]


def ensure_anchor_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in the 0600 file `path`. Creates the file if needed. Raises UsageError, OSError."""
    if not path.exists():
        make_first(path, private_key_pem(Ed25519PrivateKey.generate()))
    return load_anchor_key(path)


def load_anchor_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in the file `path`.

    Raises UsageError when others can read the file or when it has no Ed25519 private key, and
    FileNotFoundError.
    """
    if path.stat().st_mode & 0o077:
        raise UsageError(f"audit.key_file: {path} is readable by others; run: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"audit.key_file: {path} holds no Ed25519 private key")
    return key


def public_keys_in(path: Path) -> dict[str, Ed25519PublicKey]:
    """Return the public keys in a PEM file by their ids.

    After a change of keys the file contains several, one after the other. Raises UsageError when there is none,
    or one that is not Ed25519.
    """
    found = {}
    try:
        blocks = path.read_bytes().split(_END)[:-1]
        keys = [serialization.load_pem_public_key(block.lstrip() + _END + b"\n") for block in blocks]
    except (OSError, ValueError) as error:
        raise UsageError(f"--public-key: cannot read a key from {path}: {error}") from None
    for key in keys:
        if not isinstance(key, Ed25519PublicKey):
            raise UsageError(f"--public-key: {path} holds a key that is not Ed25519")
        found[key_id(key)] = key
    if not found:
        raise UsageError(f"--public-key: {path} holds no public key")
    return found
