"""Anchors of the audit chain: signed statements of its length, stored apart from the ledger.

A person who cuts off rows and chain together, or rewrites both, cannot make the chain match an older anchor.
Anchors are signed with Ed25519. An auditor keeps the public key.
"""

from __future__ import annotations

import base64
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from schemas.integrity.audit_chain import ChainEntry, Number, Partition
from schemas.integrity.line_objects import LinePlace, ObjectLines, lines_at
from schemas.settings.settings import Settings
from trunkline_agent.errors import UsageError
from trunkline_agent.mcp.signing import private_key_pem
from trunkline_agent.private_files import PrivateFileError, make_first, read_private
from trunkline_agent.wire.strict_json import canonical_plain

ANCHORS: Final = "anchors.ndjson"
_PURPOSE: Final = b"trunkline audit anchor\n"
_END: Final = b"-----END PUBLIC KEY-----"


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The signed part of an anchor: the state of the audit chain at one time.

    Attributes:
        table: the id of the Delta table `ledger` whose chain it is.
        length: the number of entries of the chain.
        value: the hash of the last entry, in hex (`ChainEntry.value`).
        ends: for each partition the first offset that is not in the ledger.
        rows: the number of ledger rows that the chain covers.
        time_us: the time by the signer's clock, in microseconds since 1970 UTC.
    """

    table: str
    length: Number
    value: str
    ends: dict[Partition, Number]
    rows: Number
    time_us: Number


class Anchor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signed statement: `key` is the id of the key that signed it, `signature` is in base64."""

    statement: Statement
    key: str
    signature: str

    def text(self) -> bytes:
        """Return the anchor as a line of the anchors file: canonical JSON in UTF-8, with the line end."""
        return canonical_plain(msgspec.to_builtins(self, str_keys=True)) + b"\n"


_parse: Final = msgspec.json.Decoder(Anchor).decode


def statement_of(entry: ChainEntry, time_us: int) -> Statement:
    """Return the statement, not yet signed, about a chain whose last entry is `entry`.

    `time_us` is the present time in microseconds since 1970 UTC.
    """
    return Statement(entry.table, entry.number + 1, entry.value(), entry.ends, entry.rows, time_us)


def sign_statement(statement: Statement, key: Ed25519PrivateKey) -> Anchor:
    """Sign `statement` with the private key `key` and return it as an anchor."""
    signature = base64.b64encode(key.sign(_signed_bytes(statement))).decode("ascii")
    return Anchor(statement, key_id(key.public_key()), signature)


def is_signed_by(anchor: Anchor, keys: dict[str, Ed25519PublicKey]) -> bool:
    """Verify an anchor. Return whether one of `keys` made its signature.

    `keys` maps key ids to public keys, as `public_keys_in` returns them. The result is False for an unknown key
    id, a wrong signature and a signature that is not base64.
    """
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


def read_anchors(path: LinePlace) -> list[Anchor | None]:
    """Read an anchors file and return one anchor for each line, or None for a line that cannot be parsed.

    A crash while a line was written may leave such a line. Signatures are not verified. Raises OSError if the
    file does not exist or cannot be read, and TrunklineError for an object store that does not answer.
    """
    texts = path.lines() if isinstance(path, ObjectLines) else path.read_bytes().splitlines()
    return [_parsed(text) for text in texts]


def newest_anchor(path: LinePlace) -> Anchor | None:
    """Return the last anchor of a file or object store that can be parsed, or None if there is none.

    Raises what `read_anchors` raises. Of an object store, only the newest objects are read.
    """
    if not isinstance(path, ObjectLines):
        return next((anchor for anchor in reversed(read_anchors(path)) if anchor is not None), None)
    return next((anchor for text in path.from_end() if (anchor := _parsed(text)) is not None), None)


def _parsed(text: bytes) -> Anchor | None:
    try:
        return _parse(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def key_id(key: Ed25519PublicKey) -> str:
    """Return the id of a public key: the first 16 hex digits of the SHA-256 of its raw bytes."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return sha256(raw).hexdigest()[:16]


def ensure_anchor_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key that signs anchors. Create the file `path` with a new key if it does not exist.

    Only the owner can read the new file (mode 0600).

    Raises:
        UsageError: other users can read the file, or it has no Ed25519 private key.
        OSError: the file cannot be created or read.
    """
    if not path.exists():
        make_first(path, private_key_pem(Ed25519PrivateKey.generate()))
    return load_anchor_key(path)


def load_anchor_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key that signs anchors, from the file `path`.

    Raises:
        UsageError: other users can read the file, or it has no Ed25519 private key.
        OSError: the file does not exist (FileNotFoundError) or cannot be read.
    """
    try:
        key = serialization.load_pem_private_key(read_private(path), None)
    except PrivateFileError as error:
        raise UsageError(f"audit.key_file: {error}") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"audit.key_file: {path} holds no Ed25519 private key")
    return key


def public_keys_in(path: Path) -> dict[str, Ed25519PublicKey]:
    """Return the public keys in a PEM file, mapped from their key ids, to verify anchors.

    After a change of keys the file contains several keys, one after the other.

    Raises:
        UsageError: the file cannot be read, has no key, or has a key that is not Ed25519.
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


def chain_file(settings: Settings, table: str) -> LinePlace:
    """Return the place of the audit chain's file for the ledger with the Delta table id `table`.

    The file may not exist yet. A ledger that is created anew has another id, and so a chain file of its own.
    """
    return lines_at(settings.audit.chain_dir or settings.data_path / "audit", f"chain-{table}.ndjson")


def anchors_file(settings: Settings) -> LinePlace:
    """Return the place of the file with the signed anchors of the audit chain. The file may not exist yet."""
    return lines_at(settings.audit.anchors_dir or settings.data_path / "anchors", ANCHORS)


def is_beside_the_ledger(settings: Settings, anchors: LinePlace) -> bool:
    """Return whether the anchors are stored inside `data_dir`, the folder or the bucket of the tables.

    `anchors` is their file or place. Callers warn about such a place: a person who can truncate the ledger
    there can truncate the anchors as well.
    """
    if isinstance(anchors, ObjectLines):
        return urlsplit(str(anchors))[:2] == urlsplit(settings.tables_root)[:2]
    folders = [settings.data_path]
    if "://" not in settings.tables_root:
        folders.append(Path(settings.tables_root))
    return any(anchors.resolve().is_relative_to(folder.resolve()) for folder in folders)


def anchor_key_file(settings: Settings) -> Path:
    """Return the path of the file (mode 0600) with the private key that signs anchors. It may not exist yet."""
    return settings.audit.key_file or settings.data_path / "keys" / "audit.pem"


def anchor_public_key_file(settings: Settings) -> Path:
    """Return the path of the file with the public key that verifies anchors. It is beside the private key.

    The public key is no secret. The file may not exist yet.
    """
    return anchor_key_file(settings).with_suffix(".pub")
