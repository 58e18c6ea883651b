"""The file of the master keys, changed: a new key is added, another one becomes active, none is taken out.

What is sealed under a key names it, so all keys stay for opening: the ledger is refolded with the bytes that
were sealed at the time.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from schemas.errors import NotFound, TrunklineError, UsageError
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import MASTER_KEY_VARIABLE, Settings

_KEY_BYTES: Final = 32


class MasterKey(NamedTuple):
    """One key by its id, and whether it seals."""

    key_id: str
    is_active: bool


def master_keys(settings: Settings) -> list[MasterKey]:
    """All of them, the oldest first. Raises SettingsError as `load_keyring` does."""
    keyring = load_keyring(settings)
    return [MasterKey(key_id, key_id == keyring.active) for key_id in keyring.ids]


def add_key(settings: Settings) -> str:
    """Add a new key that only opens yet; returns its id. Raises UsageError without a file to change."""
    with _changing(settings) as document:
        return _add(document)


def activate(settings: Settings, key_id: str) -> None:
    """Let this key seal from now on. Raises NotFound for one that is not there."""
    with _changing(settings) as document:
        if key_id not in document["keys"]:
            raise NotFound(f"there is no master key {key_id!r}; 'trunkline keys list' shows them")
        document["active"] = key_id


def rotate(settings: Settings) -> str:
    """Add a new key that seals from now on; returns its id."""
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
    """The file's document, written back in one step at the end; one change at a time."""
    if settings.master_key is not None:
        raise UsageError(
            f"the master keys come from {MASTER_KEY_VARIABLE}: change them there, on every machine; "
            "docs/how-to/rotate_keys.md says how"
        )
    path = settings.key_file
    load_keyring(settings)
    try:
        # The file itself is replaced, so the lock is beside it.
        with path.with_name(f".{path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            document = json.loads(path.read_text(encoding="utf-8"))
            yield document
            _replace(path, json.dumps(document))
    except OSError as error:
        raise TrunklineError(f"cannot change {path}: {error.strerror}") from error


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        # A key that has sealed something must not be lost with the power.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)
    finally:
        draft.unlink(missing_ok=True)
