"""Sealed values: secrets encrypted by AES-256-GCM under a master key, stored with the id of the key (CM-05).

Sealing is deterministic: the nonce is a MAC of purpose and plaintext under a key of its own. The fold therefore
stays a pure function, and a replayed micro-batch writes the same bytes. The price is that equal values with the
same purpose have equal sealed texts. The purpose names the record, so this reveals nothing new.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from schemas.settings.settings import Settings, SettingsError
from trunkline_agent.errors import TrunklineError
from trunkline_agent.private_files import PrivateFileError, make_first, read_private
from trunkline_agent.wire.ids import is_name
from trunkline_agent.wire.signing import KeyedHash, Signer

_NONCE_BYTES: Final = 12
_KEY_BYTES: Final = 32
_SIGNER_CACHE: Final = 50_000
_MAC_KEY: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,127}):((?:[0-9a-f]{16})*)/([a-z]{1,16})")
# Of the master keys that are older than the one in a name of a MAC key, so many newest prove that it exists.
_PROOFS_MOST: Final = 6
_PROOF_BYTES: Final = 8
# Hostile records have many names.
_MAC_KEYS_CACHE: Final = 1_000


class UnsealError(Exception):
    """A sealed value cannot be opened: the key id is unknown, the purpose differs, or bytes were changed."""


class MissingKeyError(TrunklineError):
    """A record of the log has a MAC under a master key that this process does not have. It must stop."""


class MacKey(NamedTuple):
    """A key for the MACs of records.

    Attributes:
        name: its name in the header `ce_mackey`, `<id of the master key>:<proofs>/<signer>`.
        master: the id of the master key from which it is derived.
        signer: the process, or group of processes, that has the key (`schemas.keys.record_macs`).
        key: its 32 bytes.
    """

    name: str
    master: str
    signer: str
    key: bytes


class Keyring:
    """The master keys, which seal and open secrets. New secrets are sealed under the active key.

    Opening a secret uses the key under which it was sealed. The keyring is the only configuration of the fold.

    Args:
        keys: maps the id of each master key (1 to 128 letters, digits, dots, underscores and hyphens) to its 32
            bytes, oldest first.
        active: the id of the active key.
        reload: reads the keys again, from where these were read. `None`: nothing can be read again.

    Raises:
        ValueError: an id or a key has the wrong form, or `active` is not in `keys`.
    """

    def __init__(
        self, keys: Mapping[str, bytes], active: str, reload: Callable[[], Keyring] | None = None
    ) -> None:
        if active not in keys or not all(is_name(i) and len(k) == _KEY_BYTES for i, k in keys.items()):
            raise ValueError("a keyring needs keys of 32 bytes with names as ids, one of them active")
        self.active = active
        self._ciphers = {i: AESGCM(key) for i, key in keys.items()}
        self._nonce_keys = {i: hmac.digest(key, b"trunkline nonce", "sha256") for i, key in keys.items()}
        self._derivers = {
            i: KeyedHash(hmac.digest(key, b"trunkline derive", "sha256")) for i, key in keys.items()
        }
        # By the sealed text, and the job or the purpose that it is for: another may have a copy of it.
        self._signers: dict[tuple[str, str], Signer] = {}
        self._mac_keys: dict[str, MacKey] = {}
        self._reload = reload
        self._oldest: Keyring | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all master keys, the oldest first."""
        return tuple(self._ciphers)

    def under(self, key_id: str) -> Keyring:
        """Return a copy of this keyring in which the key `key_id` is the active one.

        Raises UnsealError if there is no key with this id.
        """
        if key_id not in self._ciphers:
            raise UnsealError(f"no master key with the id {key_id[:32]!r}")
        found = copy.copy(self)
        found.active = key_id
        return found

    def each(self) -> Iterator[Keyring]:
        """Yield this keyring, then copies of it in which each other key is active, the newest key first.

        Use it to find the master key under which a value was derived earlier: call `derive` on each keyring and
        compare the result with the value or its hash.
        """
        yield self
        yield from (self.under(key_id) for key_id in reversed(self._ciphers) if key_id != self.active)

    @property
    def oldest(self) -> Keyring:
        """A copy of this keyring in which the oldest key is active.

        A rotation adds keys and activates one of them. The oldest key stays, so `derive` of this copy returns
        the same bytes after a rotation.
        """
        key_id = next(iter(self._ciphers))
        if self._oldest is None or self._oldest.active != key_id:
            self._oldest = self.under(key_id)
        return self._oldest

    def seal(self, plaintext: bytes, purpose: str) -> str:
        """Encrypt `plaintext` under the active key and return `<key id>:<base64 of nonce and ciphertext>`.

        `purpose` says where the secret belongs, such as `job-secret/<job id>`. `open` needs the same purpose,
        so a copy of the sealed text in another place cannot be opened. Equal calls return equal texts.
        """
        aad = purpose.encode("utf-8")
        material = len(aad).to_bytes(4, "big") + aad + plaintext
        nonce = hmac.digest(self._nonce_keys[self.active], material, "sha256")[:_NONCE_BYTES]
        sealed = nonce + self._ciphers[self.active].encrypt(nonce, plaintext, aad)
        return f"{self.active}:{base64.b64encode(sealed).decode('ascii')}"

    def derive(self, purpose: str) -> bytes:
        """Return a key of 32 bytes derived from the active key and `purpose`.

        `purpose` is any text that names the use of the result, such as `task-token/<task id>`. Equal calls
        return equal bytes. They are as secret as the master key.
        """
        return self._derivers[self.active].digest(purpose.encode("utf-8"))

    def mac_key(self, signer: str) -> MacKey:
        """Return the key for the MACs of records that `signer` appends, derived from the active key."""
        older = list(itertools.takewhile(lambda key_id: key_id != self.active, self._ciphers))
        proofs = "".join(self._proof(self.active, by).hex() for by in older[-_PROOFS_MOST:])
        return self._mac_key(f"{self.active}:{proofs}/{signer}", self.active, signer)

    def known_mac_key(self, name: str, ended: Collection[str] = ()) -> MacKey | None:
        """Return the key with the name `name`, or `None` if the master key in it is not proven to exist.

        A name has proofs, each made with an older master key, that the master key in it exists. So a forged
        name is told from the name of a key that was added after this process read its keys. In the latter case,
        the keys are read again.

        Args:
            name: the name, as `mac_key` makes it.
            ended: the master keys that may be in the hands of others. Their proofs do not count.

        Raises:
            MissingKeyError: the master key exists, and is not even among the keys that were read again.
        """
        known = self._mac_keys.get(name)
        if known is not None:
            return known
        parts = _MAC_KEY.fullmatch(name)
        if parts is None:
            return None
        master, proofs, signer = parts.groups()
        if master not in self._ciphers:
            if not self._is_proven(master, bytes.fromhex(proofs), ended):
                return None
            self._read_again(master)
        if len(self._mac_keys) >= _MAC_KEYS_CACHE:
            self._mac_keys.clear()
        key = self._mac_keys[name] = self._mac_key(name, master, signer)
        return key

    def _mac_key(self, name: str, master: str, signer: str) -> MacKey:
        return MacKey(name, master, signer, self.under(master).derive(f"record-mac/{signer}"))

    def _proof(self, master: str, by: str) -> bytes:
        """Return the proof, made with the key `by`, that the master key with the id `master` exists."""
        return self.under(by).derive(f"master-key/{master}")[:_PROOF_BYTES]

    def _is_proven(self, master: str, proofs: bytes, ended: Collection[str]) -> bool:
        given = [proofs[at : at + _PROOF_BYTES] for at in range(0, len(proofs), _PROOF_BYTES)]
        right = [self._proof(master, by) for by in self._ciphers if by not in ended]
        return any(hmac.compare_digest(one, other) for one in given for other in right)

    def _read_again(self, master: str) -> None:
        lacks = f"the log has records under the master key {master}, which this process does not have"
        try:
            found = None if self._reload is None else self._reload()
        except (SettingsError, OSError) as error:
            raise MissingKeyError(f"{lacks}, and the keys cannot be read again: {error}") from error
        if found is None or master not in found._ciphers:
            raise MissingKeyError(f"{lacks}: copy the file of the master keys to this machine, and start again")
        self._ciphers, self._nonce_keys, self._derivers = found._ciphers, found._nonce_keys, found._derivers
        self._oldest = None

    def open(self, sealed: str, purpose: str) -> bytes:
        """Decrypt a text that `seal` made for the same purpose, and return the plaintext.

        The text names the master key under which it is sealed. This may be any key of the keyring.

        Raises:
            UnsealError: the keyring lacks that key, the purpose is another, or the text was changed.
        """
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
        """Open a job's sealed secret and return a `Signer` that signs and verifies the job's events with it.

        `sealed` is the text that `seal` made of the secret for this job. Up to 50,000 signers are cached.

        Raises:
            UnsealError: the keyring lacks the key, or the text was sealed for another job or changed.
        """
        known = self._signers.get((sealed, job_id))
        return known or self._opened_signer(sealed, job_secret_purpose(job_id), job_id)

    def signer(self, sealed: str, purpose: str) -> Signer:
        """Open a secret sealed for `purpose` and return a `Signer` that signs and verifies with it.

        `sealed` is the text that `seal` made of the secret. Up to 50,000 signers are cached.

        Raises:
            UnsealError: the keyring lacks the key, or the text was sealed for another purpose or changed.
        """
        known = self._signers.get((sealed, purpose))
        return known or self._opened_signer(sealed, purpose, purpose)

    def _opened_signer(self, sealed: str, purpose: str, known_by: str) -> Signer:
        secret = self.open(sealed, purpose).decode("utf-8")
        if len(self._signers) >= _SIGNER_CACHE:
            self._signers.clear()
        signer = self._signers[sealed, known_by] = Signer(secret)
        return signer


def sealed_by(sealed: str) -> str:
    """Return the id of the master key under which the text `sealed`, made by `Keyring.seal`, is sealed.

    The text is neither decrypted nor checked, and the keyring may lack the key.
    """
    return sealed.partition(":")[0]


def job_secret_purpose(job_id: str) -> str:
    """Return the `purpose` to pass to `Keyring.seal` and `Keyring.open` for the secret of a job.

    The job's agent signs events with this secret.
    """
    return f"job-secret/{job_id}"


def mqtt_agent_secret_purpose(agent_name: str) -> str:
    """Return the `purpose` to pass to `Keyring.seal` and `Keyring.open` for the secret of an agent on MQTT."""
    return f"mqtt-agent-secret/{agent_name}"


def webhook_secret_purpose(name: str) -> str:
    """Return the `purpose` to pass to `Keyring.seal` and `Keyring.open` for the secret of a webhook."""
    return f"webhook-secret/{name}"


def broker_password_purpose(host: str | None, port: int | None, username: str | None) -> str:
    """Return the `purpose` to pass to `Keyring.seal` and `Keyring.open` for the password of a per-job broker.

    It contains the broker's host, port and user name, empty where one is None (unset for this job). A copy of
    the sealed password in a record with another host therefore cannot be opened.
    """
    return f"broker-password/{host or ''}:{port or ''}/{username or ''}"


def value_purpose(topic: str, partition: int, offset: int) -> str:
    """Return the `purpose` to pass to `Keyring.seal` and `Keyring.open` for the original of a masked value.

    The ledger stores the masked value and the sealed original. The three arguments are the position of the
    record in Kafka.
    """
    return f"value/{topic}/{partition}/{offset}"


def _parse_keys(text: str, settings: Settings) -> Keyring:
    document = json.loads(text)
    keys = {i: base64.b64decode(k, validate=True) for i, k in document["keys"].items()}
    return Keyring(keys, document["active"], lambda: load_keyring(settings))


def load_keyring(settings: Settings) -> Keyring:
    """Read the master keys from the environment (`TRUNKLINE__MASTER_KEY`) or else from the file `key_file`.

    Raises:
        SettingsError: the file is missing or readable by other users, or the content is not a keyring. The
            message says how to fix it.
    """
    try:
        if settings.master_key is not None:
            return _parse_keys(settings.master_key.get_secret_value(), settings)
        path = settings.key_file
        return _parse_keys(read_private(path).decode("utf-8"), settings)
    except PrivateFileError as error:
        raise SettingsError(f"master_key_file: {error}") from None
    except FileNotFoundError:
        raise SettingsError(
            f"master_key_file: {settings.key_file} is missing; './trunkline up' makes it, "
            "or set TRUNKLINE__MASTER_KEY"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SettingsError("master_key: not a keyring; see docs/how-to/rotate_keys.md") from None


def ensure_keyring(settings: Settings) -> Keyring:
    """Read the master keys of this installation. Create them first if there are none.

    If there is neither a key in the environment (`TRUNKLINE__MASTER_KEY`) nor the file `key_file`, the file is
    created (mode 0600) with one new random key.

    Raises:
        SettingsError: the file is readable by other users, or the content is not a keyring.
        OSError: the file cannot be created or read.
    """
    path: Path = settings.key_file
    if settings.master_key is None and not path.exists():
        key = secrets.token_bytes(_KEY_BYTES)
        key_id = "k" + hashlib.sha256(key).hexdigest()[:8]
        document = {"active": key_id, "keys": {key_id: base64.b64encode(key).decode("ascii")}}
        make_first(path, json.dumps(document))
    return load_keyring(settings)
