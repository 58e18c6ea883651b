"""Finds dead letters, the rejected records of the ledger, and makes the records that replay them.

A replay appends the record as it came, with the same stream, CloudEvents id, door, principal and bytes. Bytes
that the ledger shows masked are opened by the keyring. The record is settled again, by the current state of its
stream. If it was accepted meanwhile under the same id, the replay is a duplicate and does no harm.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final

from connectors.log.ledger_files.ledger_export import JSON_COLUMNS
from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from schemas.keys.record_macs import SIGNED_BY_AUTHOR
from schemas.keys.sealing import Keyring, UnsealError
from schemas.settings.settings import Settings
from schemas.streams.control.control_fold import CONTROL_FOLD_SWITCHED, CONTROL_TOPOLOGY
from schemas.streams.control.record_macs import MAC_MODELS
from schemas.streams.fold import has_valid_mac
from schemas.streams.refused.refusal import REQUEST_REFUSED
from schemas.tables.ledger import LedgerRow, record_of_row
from schemas.wire.record import OutgoingRecord, Position, read_envelope
from trunkline_agent.errors import NotFound, Refused, UsageError
from trunkline_agent.wire.ids import parse_stream_key
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED, TOO_LARGE, UNAUTHENTICATED_RECORD

_MICROS: Final = 1_000_000
_POSITION: Final = re.compile("([0-9]{1,18})/([0-9]{1,18})")


def parse_position(text: str) -> Position:
    """Parse a position such as `2/1042`, which names a partition and an offset.

    Raises:
        UsageError: The text has another form, or the partition is too large.
    """
    found = _POSITION.fullmatch(text)
    if found is None:
        raise UsageError(f"expected PARTITION/OFFSET such as 2/1042, found {text!r}")
    partition, offset = int(found[1]), int(found[2])
    if partition > 2**31 - 1:
        raise UsageError(f"there is no partition {partition}")
    return Position(partition, offset)


def ledger_row_at(settings: Settings, position: Position) -> dict[str, Any]:
    """Return the ledger row of the record at a partition and offset of Kafka, as a dictionary of all columns.

    Raises:
        NotFound: There is no ledger, or no such row in it.
    """
    where = LedgerFilter(partition=position.partition, offset=position.offset)
    found = LedgerReader(settings).rows(where).rows.to_pylist()
    if not found:
        raise NotFound(f"the ledger has no record at {position.partition}/{position.offset}")
    return dict(found[0])


def replayable(row: dict[str, Any], keyring: Keyring) -> OutgoingRecord:
    """Return the record to append in order to replay a dead letter. Nothing is appended.

    The returned record has the same stream, CloudEvents id, door, principal and bytes as the rejected one.

    Args:
        row: The ledger row, with all columns, as `ledger_row_at` returns it.
        keyring: The master keys, by which masked bytes are unsealed.

    Raises:
        Refused: The row was not rejected, or its record cannot or must not be sent again. The message says why.
    """
    at = f"{row['partition']}/{row['offset']}"
    if row["verdict"] in (ACCEPTED, DUPLICATE):
        raise Refused(f"{at} was not rejected, it is {row['verdict']}: there is nothing to replay")
    if row["reason"] == TOO_LARGE:
        raise Refused(f"{at} was too large: the ledger has only the first bytes of its body")
    if row["door"] is None or row["ce_id"] is None or row["type"] is None:
        raise Refused(f"{at} has no envelope that could be read, so it cannot be sent again")
    if row["type"] == REQUEST_REFUSED:
        raise Refused(f"{at} records a refused request; its sender may send the request again")
    if row["reason"] == UNAUTHENTICATED_RECORD:
        raise Refused(f"{at} has no valid MAC: nobody knows who appended it, so it is not appended again")
    if row["type"] in MAC_MODELS:
        raise Refused(f"{at} is about MACs; use ./trunkline keys instead")
    if row["type"] == CONTROL_TOPOLOGY:
        raise Refused(f"{at} describes a topic; it is written once, at the topic's beginning")
    if row["type"] == CONTROL_FOLD_SWITCHED:
        raise Refused(f"{at} names the version of the fold; use ./trunkline fold switch instead")
    try:
        record = record_of_row(_as_row(row), keyring)
    except UnsealError as error:
        raise Refused(f"{at} is masked, and its bytes cannot be opened: {error}") from None
    except ValueError as error:
        raise Refused(f"{at} cannot be turned into a record again: {error}") from None
    if record.value is None or parse_stream_key(record.key) is None or record.key is None:
        raise Refused(f"{at} has no value, or its key names no stream")
    try:
        envelope = read_envelope(record)
        # A new MAC must not vouch for a record of which nobody knows who appended it.
        if envelope.type not in SIGNED_BY_AUTHOR and not has_valid_mac(record, envelope, keyring):
            raise Refused(
                f"{at} was logged without a valid MAC: nobody knows who appended it; send it again by its door"
            )
        headers = dict(zip(record.header_names, record.header_values, strict=True))
        traceparent = (headers.get("traceparent") or b"").decode("ascii")
    except ValueError as error:
        raise Refused(f"{at} has headers that cannot be sent again: {error}") from None
    return OutgoingRecord(
        stream=record.key.decode("ascii"),
        ce_id=envelope.ce_id,
        door=envelope.door,
        principal=envelope.principal,
        type=envelope.type,
        value=record.value,
        traceparent=traceparent or None,
    )


def dead_letters(
    settings: Settings,
    count: int,
    *,
    reason: str | None = None,
    door: str | None = None,
    stream: tuple[str, str] | None = None,
    since: datetime | None = None,
) -> list[dict[str, Any]]:
    """Return the newest rejected ledger rows that match all conditions, oldest first.

    Args:
        settings: The settings with the tables.
        count: Return at most this many rows.
        reason: The reason of the rejection. None: any.
        door: The door of the record. None: any.
        stream: The kind and the name of the stream. None: any.
        since: Only records with this Kafka time or a later one. None: any time.

    Raises:
        NotFound: There is no ledger.
    """
    kind, name = stream or (None, None)
    where = LedgerFilter(
        stream_kind=kind, stream_id=name, verdict=REJECTED, reason=reason, door=door, since=since
    )
    found: list[dict[str, Any]] = (
        LedgerReader(settings).newest_rows(count, where, JSON_COLUMNS).rows.to_pylist()
    )
    return found


def _as_row(row: dict[str, Any]) -> LedgerRow:
    logged_at: datetime = row["logged_at"]
    moment_us = int(logged_at.timestamp()) * _MICROS + logged_at.microsecond
    return LedgerRow(**{**row, "logged_at": moment_us, "sent_at": None, "entries": None, "changes": None})
