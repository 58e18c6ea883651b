"""Changes the file of the master keys: adds a key, or makes another key the active one. No key is ever removed.

A sealed text names its key, and keys stay in the file to open it: the ledger is folded again from the bytes
that were sealed at the time.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from schemas.keys.sealing import load_keyring
from schemas.settings.settings import MASTER_KEY_VARIABLE, Settings
from trunkline_agent.errors import NotFound, TrunklineError, UsageError
from trunkline_agent.private_files import replace_file

_KEY_BYTES: Final = 32


class MasterKey(NamedTuple):
    """The id of a master key, and whether it is the active one, under which new secrets are sealed."""

    key_id: str
    is_active: bool


def master_keys(settings: Settings) -> list[MasterKey]:
    """Return the ids of all master keys, the oldest first.

    Raises:
        SettingsError: There is no key, or the file is invalid.
    """
    keyring = load_keyring(settings)
    return [MasterKey(key_id, key_id == keyring.active) for key_id in keyring.ids]


def add_key(settings: Settings) -> str:
    """Add a new master key to the key file and return its id. The active key stays the same.

    Use it to distribute the file to all machines before `activate`.

    Raises:
        UsageError: The keys come from the environment, so there is no file to change.
        SettingsError: There is no key, or the file is invalid.
        TrunklineError: The file cannot be written.
    """
    with _changing(settings) as document:
        return _add(document)


def activate(settings: Settings, key_id: str) -> None:
    """Make the master key `key_id` the active one in the key file: new secrets are sealed under it.

    Programs that run keep the key that they have read at their start.

    Raises:
        NotFound: The file has no such key.
        UsageError: The keys come from the environment, so there is no file to change.
        SettingsError: There is no key, or the file is invalid.
        TrunklineError: The file cannot be written.
    """
    with _changing(settings) as document:
        if key_id not in document["keys"]:
            raise NotFound(f"there is no master key {key_id!r}; 'trunkline keys list' shows all keys")
        document["active"] = key_id


def rotate(settings: Settings) -> str:
    """Add a new master key to the key file, make it the active one, and return its id.

    New secrets are sealed under the active key.

    Raises:
        UsageError: The keys come from the environment, so there is no file to change.
        SettingsError: There is no key, or the file is invalid.
        TrunklineError: The file cannot be written.
    """
    with _changing(settings) as document:
        document["active"] = _add(document)
        return str(document["active"])


def _add(document: dict[str, Any]) -> str:
    key = secrets.token_bytes(_KEY_BYTES)
    key_id = "k" + hashlib.sha256(key).hexdigest()[:8]
    document["keys"][key_id] = base64.b64encode(key).decode("ascii")
    return key_id


@contextmanager
def _changing(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the content of the file, and write it back in one step. Only one process changes it at a time."""
    if settings.master_key is not None:
        raise UsageError(
            f"the master keys come from {MASTER_KEY_VARIABLE}: change them there, on every machine; "
            "see docs/how-to/rotate_keys.md"
        )
    path = settings.key_file
    load_keyring(settings)
    try:
        # The file itself is replaced, so the lock is a file of its own.
        with path.with_name(f".{path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            document = json.loads(path.read_text(encoding="utf-8"))
            yield document
            replace_file(path, json.dumps(document).encode())
    except OSError as error:
        raise TrunklineError(f"cannot change {path}: {error.strerror}") from error
