"""Sealed values (CM-05): AES-256-GCM under a master key, stored with the id of the key.

Sealing is deterministic: the nonce is a MAC of purpose and plaintext under a key of its own. The fold therefore
stays a pure function, and a replayed micro-batch writes the same bytes. The price is that equal values with the
same purpose have equal sealed texts. The purpose names the record, so this reveals nothing new.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from schemas.keys.private_files import make_first
from schemas.settings.settings import Settings, SettingsError
from schemas.wire.ids import is_name
from schemas.wire.signing import Signer

_NONCE_BYTES: Final = 12
_KEY_BYTES: Final = 32
_SIGNER_CACHE: Final = 50_000


class UnsealError(Exception):
    """A sealed value cannot be opened: the key id is unknown, the purpose differs, or bytes were changed."""


class Keyring:
    """The master keys by id, one of which is active and seals. The only configuration of the fold.

    `keys` maps an id (a name by CM-01) to 32 bytes. Raises ValueError for any other id or key.
    """

    def __init__(self, keys: Mapping[str, bytes], active: str) -> None:
        if active not in keys or not all(is_name(i) and len(k) == _KEY_BYTES for i, k in keys.items()):
            raise ValueError("a keyring needs keys of 32 bytes with names as ids, one of them active")
        self.active = active
        self._ciphers = {i: AESGCM(key) for i, key in keys.items()}
        self._nonce_keys = {i: hmac.digest(key, b"trunkline nonce", "sha256") for i, key in keys.items()}
        self._derive_keys = {i: hmac.digest(key, b"trunkline derive", "sha256") for i, key in keys.items()}
        self._signers: dict[str, tuple[str, Signer]] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all keys, the oldest first."""
        return tuple(self._ciphers)

    def under(self, key_id: str) -> Keyring:
        """Return this keyring with another key active. Raises UnsealError for an unknown key id."""
        if key_id not in self._ciphers:
            raise UnsealError(f"no master key with the id {key_id[:32]!r}")
        found = copy.copy(self)
        found.active = key_id
        return found

    def each(self) -> Iterator[Keyring]:
        """Yield this keyring, and then this keyring with each of the other keys active, the newest first."""
        yield self
        yield from (self.under(key_id) for key_id in reversed(self._ciphers) if key_id != self.active)

    @property
    def oldest(self) -> Keyring:
        """This keyring with the first of the keys active, which no rotation changes."""
        return self.under(next(iter(self._ciphers)))

    def seal(self, plaintext: bytes, purpose: str) -> str:
        """Return `plaintext` sealed for `purpose`, as `<key id>:<base64 of nonce and ciphertext>`."""
        aad = purpose.encode("utf-8")
        material = len(aad).to_bytes(4, "big") + aad + plaintext
        nonce = hmac.digest(self._nonce_keys[self.active], material, "sha256")[:_NONCE_BYTES]
        sealed = nonce + self._ciphers[self.active].encrypt(nonce, plaintext, aad)
        return f"{self.active}:{base64.b64encode(sealed).decode('ascii')}"

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes that are derived from the active key and `purpose`.

        They are the same each time, and as secret as the key.
        """
        return hmac.digest(self._derive_keys[self.active], purpose.encode("utf-8"), "sha256")

    def open(self, sealed: str, purpose: str) -> bytes:
        """Return the plaintext of a text that `seal` made for the same purpose. Raises UnsealError."""
        key_id, _, text = sealed.partition(":")
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise UnsealError(f"no master key with the id {key_id[:32]!r}")
        try:
            raw = base64.b64decode(text, validate=True)
            return cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], purpose.encode("utf-8"))
        except (ValueError, InvalidTag) as error:
            raise UnsealError("sealed for something else, or changed") from error

    def job_signer(self, sealed: str, job_id: str) -> Signer:
        """Return the Signer of a job's sealed secret. Raises UnsealError."""
        return self.signer(sealed, job_secret_purpose(job_id))

    def signer(self, sealed: str, purpose: str) -> Signer:
        """Return the Signer of a sealed secret. Up to 50,000 signers are cached. Raises UnsealError."""
        known = self._signers.get(sealed)
        # Compare the purpose as well: another registration may contain a copy of the sealed text.
        if known is not None and known[0] == purpose:
            return known[1]
        secret = self.open(sealed, purpose).decode("utf-8")
        if len(self._signers) >= _SIGNER_CACHE:
            self._signers.clear()
        signer = Signer(secret)
        self._signers[sealed] = (purpose, signer)
        return signer


def sealed_by(sealed: str) -> str:
    """Return the id of the master key under which a text is sealed."""
    return sealed.partition(":")[0]


def job_secret_purpose(job_id: str) -> str:
    """Return the purpose for which a job secret is sealed."""
    return f"job-secret/{job_id}"


def mqtt_agent_secret_purpose(agent_name: str) -> str:
    """Return the purpose for which the secret of an agent over MQTT is sealed."""
    return f"mqtt-agent-secret/{agent_name}"


def broker_password_purpose(host: str | None, port: int | None, username: str | None) -> str:
    """Return the purpose for which the password of a per-job broker is sealed.

    It contains the broker's own fields, empty where a field is unset. A copy of the sealed text for another
    host cannot be opened.
    """
    return f"broker-password/{host or ''}:{port or ''}/{username or ''}"


def value_purpose(topic: str, partition: int, offset: int) -> str:
    """Return the purpose for which the bytes of a masked ledger value are sealed."""
    return f"value/{topic}/{partition}/{offset}"


def _parse_keys(text: str) -> Keyring:
    document = json.loads(text)
    keys = {i: base64.b64decode(k, validate=True) for i, k in document["keys"].items()}
    return Keyring(keys, document["active"])


def load_keyring(settings: Settings) -> Keyring:
    """Return the keyring from `master_key` (environment) or the 0600 file `key_file`.

    Raises SettingsError that says how to fix it when the file is missing, readable by others or not a keyring.
    """
    try:
        if settings.master_key is not None:
            return _parse_keys(settings.master_key.get_secret_value())
        path = settings.key_file
        mode = path.stat().st_mode
        if mode & 0o077:
            raise SettingsError(f"master_key_file: {path} is readable by others; run: chmod 600 {path}")
        return _parse_keys(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"master_key_file: {settings.key_file} is missing; './trunkline up' makes it, "
            "or set TRUNKLINE__MASTER_KEY"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SettingsError("master_key: not a keyring; see docs/how-to/rotate_keys.md") from None


def ensure_keyring(settings: Settings) -> Keyring:
    """Return the keyring as `load_keyring` does.

    Creates a 0600 file with a new key when there is neither a file nor a key in the environment.
    """
    path: Path = settings.key_file
    if settings.master_key is None and not path.exists():
        key = secrets.token_bytes(_KEY_BYTES)
        key_id = "k" + hashlib.sha256(key).hexdigest()[:8]
        document = {"active": key_id, "keys": {key_id: base64.b64encode(key).decode("ascii")}}
        make_first(path, json.dumps(document))
    return load_keyring(settings)
