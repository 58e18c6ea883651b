"""MACs of the records in the log: made by the process that appends a record, checked by the fold.

A record's MAC is HMAC-SHA256 (RFC 2104) over its key, `ce_id`, `ce_source`, `ce_type`, the headers of a
shortened body, and its value; of the result, the first 16 bytes. So somebody who can only write to Kafka cannot
append a record that counts. `job.event`, `agent.said` and `agent.confirmed` have no MAC, because their authors
sign them.

Each group of processes that trust each other is one signer, with a key of its own, derived from the master key.
A process without the master keys, such as a bridge on another machine, has the key of its signer in a file.
"""

from __future__ import annotations

import base64
import hmac
import json
from functools import lru_cache
from pathlib import Path
from typing import Final

from schemas.keys.sealing import Keyring, MacKey, load_keyring
from schemas.settings.settings import Settings, SettingsError
from schemas.wire.record import OutgoingRecord
from trunkline_agent.private_files import PrivateFileError, read_private, replace_file
from trunkline_agent.wire.signing import KeyedHash

# The programs that have the master keys: the gateway with its doors, reactor and launcher, and the commands.
GATEWAY: Final = "gateway"
MQTT_BRIDGE: Final = "mqtt"
FILE_BRIDGE: Final = "file"
SIGNERS: Final = (GATEWAY, MQTT_BRIDGE, FILE_BRIDGE)

# Their authors sign these types of records, so a MAC would prove nothing more.
SIGNED_BY_AUTHOR: Final = frozenset({"job.event", "agent.said", "agent.confirmed"})
_MAC_BYTES: Final = 16


# A process sees records of a few signers.
_hash_with: Final = lru_cache(64)(KeyedHash)


def mac_of(key: MacKey, data: bytes) -> str:
    """Return the MAC of `data`, the input that `mac_input` makes of a record, as 32 lower-case hex digits."""
    return _hash_with(key.key).digest(data)[:_MAC_BYTES].hex()


def is_mac_of(key: MacKey, data: bytes, mac: str) -> bool:
    """Return whether `mac` is the MAC of `data` under `key`. The comparison takes constant time."""
    return hmac.compare_digest(mac_of(key, data), mac)


def mac_headers(record: OutgoingRecord, key: MacKey) -> tuple[str, str] | None:
    """Return the two headers of a record's MAC, the name of the key and the MAC. `None`: it needs no MAC."""
    return None if record.type in SIGNED_BY_AUTHOR else (key.name, mac_of(key, record.mac_input))


def load_mac_key(settings: Settings, signer: str) -> MacKey:
    """Return the key with which this process makes the MACs of its records.

    It is read from the file `mac_key_file`, if that is set, and otherwise derived from the master keys.

    Args:
        settings: the settings with the place of the key.
        signer: one of `SIGNERS`.

    Raises:
        SettingsError: the file is missing, readable by other users, or has the key of another signer; or there
            are no master keys. The message says how to fix it.
    """
    path = settings.mac_key_file
    if path is None:
        return load_keyring(settings).mac_key(signer)
    try:
        document = json.loads(read_private(path))
        key = MacKey(**{**document, "key": base64.b64decode(document["key"], validate=True)})
    except PrivateFileError as error:
        raise SettingsError(f"mac_key_file: {error}") from None
    except OSError as error:
        raise SettingsError(f"mac_key_file: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise SettingsError(
            f"mac_key_file: {path} is not a key; make it again: ./trunkline keys mac {signer} FILE"
        ) from None
    if key.signer != signer:
        raise SettingsError(
            f"mac_key_file: {path} has the key of {key.signer!r}, this program needs {signer!r}"
        )
    return key


def write_mac_key(keyring: Keyring, signer: str, path: Path) -> MacKey:
    """Write a signer's key to the file `path` (mode 0600), for a process without the master keys.

    Returns the key. Raises OSError, also if the folder does not exist.
    """
    key = keyring.mac_key(signer)
    document = {**key._asdict(), "key": base64.b64encode(key.key).decode("ascii")}
    replace_file(path, json.dumps(document).encode())
    return key
