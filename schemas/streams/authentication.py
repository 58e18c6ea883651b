"""The check that a process of this installation appended a record: by its MAC, and by its partition."""

from __future__ import annotations

from typing import Final

from schemas.fold.entries import Entries
from schemas.fold.settled import Outcome, rejected
from schemas.keys.record_macs import FILE_BRIDGE, GATEWAY, MQTT_BRIDGE, SIGNED_BY_AUTHOR, is_mac_of
from schemas.keys.sealing import Keyring, MissingKeyError
from schemas.streams.control.record_macs import MAC_MODELS, rules_of
from schemas.streams.mailboxes.mailbox_bodies import MESSAGE_CLAIMED
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.streams.refused.refusal import REQUEST_REFUSED
from schemas.wire.partitions import partition_for
from schemas.wire.record import Envelope, Record, record_mac_input
from trunkline_agent.wire.verdicts import UNAUTHENTICATED_RECORD

# The doors and record types for which a signer's key counts. The processes that have the gateway's key have the
# master keys, too, so a limit would not bind them.
_LIMITS: Final = {
    MQTT_BRIDGE: frozenset({("mqtt", MESSAGE_CLAIMED), ("mqtt", REQUEST_REFUSED)}),
    FILE_BRIDGE: frozenset({("file", MESSAGE_POSTED), ("file", MESSAGE_CLAIMED)}),
}


def authentication_fault(
    record: Record, envelope: Envelope, is_of_stream: bool, macs: Entries, keyring: Keyring
) -> Outcome | None:
    """Check by its MAC that a process of this installation appended a record, and that its partition is right.

    Args:
        record: the record.
        envelope: its headers.
        is_of_stream: whether its key is that of a stream.
        macs: the state of the stream `macs_stream(record.partition)`. Without rules, only the records that set
            them need a MAC.
        keyring: the master keys.

    Returns:
        The rejection, or `None` if there is no fault.

    Raises:
        MissingKeyError: the MAC is under a master key that this process lacks.
    """
    rules = rules_of(macs)
    if envelope.type not in SIGNED_BY_AUTHOR and (rules is not None or envelope.type in MAC_MODELS):
        why = _mac_fault(record, envelope, () if rules is None else rules.ended, keyring)
        if why is not None:
            return rejected(UNAUTHENTICATED_RECORD, why)
    if rules is None or not is_of_stream or record.key is None or envelope.type in MAC_MODELS:
        return None
    # A copy in another partition would be a second stream of the same name.
    if partition_for(record.key, rules.partitions) != record.partition:
        return rejected(UNAUTHENTICATED_RECORD, "the stream belongs to another partition")
    return None


def has_valid_mac(record: Record, envelope: Envelope, keyring: Keyring) -> bool:
    """Return whether a record has a valid MAC under one of the master keys, ended or not."""
    try:
        return _mac_fault(record, envelope, (), keyring) is None
    except MissingKeyError:
        return False


def _mac_fault(record: Record, envelope: Envelope, ended: tuple[str, ...], keyring: Keyring) -> str | None:
    if envelope.mac is None or envelope.mac_key is None:
        return "the record has no MAC"
    key = keyring.known_mac_key(envelope.mac_key, ended)
    if key is None:
        return "the MAC is under an unknown key"
    if key.master in ended:
        return "the MAC is under a key that has ended"
    if key.signer != GATEWAY and (envelope.door, envelope.type) not in _LIMITS.get(key.signer, ()):
        return "the key of the MAC is not for this door and type"
    if not is_mac_of(key, record_mac_input(record), envelope.mac):
        return "the MAC does not belong to the content"
    return None
