"""Dead letters: the records that the ledger has as rejected, and how one is put into the log again.

A replay appends the record as it came: the same stream, CloudEvents id, door, principal and bytes (opened by
the keyring where the ledger shows them masked). It is settled anew, by what its stream is now; what was
accepted meanwhile under the same id is a duplicate, so a replay is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import and_
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from connectors.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.log.publisher import Position
from schemas.errors import NotFound, Refused, UsageError
from schemas.keys.sealing import Keyring, UnsealError
from schemas.settings.settings import Settings
from schemas.tables.ledger import COLUMNS, LedgerRow, record_of_row
from schemas.wire.ids import parse_stream_key
from schemas.wire.record import (
    CONTROL_FOLD_SWITCHED,
    CONTROL_TOPOLOGY,
    REQUEST_REFUSED,
    OutgoingRecord,
    read_envelope,
)
from schemas.wire.verdicts import ACCEPTED, DUPLICATE, REJECTED, TOO_LARGE

_MICROS: Final = 1_000_000


@dataclass(frozen=True)
class PositionFilter(LedgerFilter):
    """One row, by its place in the log."""

    partition: int = 0
    offset: int = 0

    def expression(self) -> pc.Expression | None:
        """The filter as an Arrow expression."""
        terms = [
            pc.field("partition") == pa.scalar(self.partition, pa.int32()),
            pc.field("offset") == pa.scalar(self.offset, pa.int64()),
        ]
        more = super().expression()
        return reduce(and_, terms if more is None else [*terms, more])


def parse_position(text: str) -> Position:
    """`partition/offset`. Raises UsageError."""
    partition, slash, offset = text.partition("/")
    if not slash or not all(
        part.isascii() and part.isdigit() and len(part) < 19 for part in (partition, offset)
    ):
        raise UsageError(f"expected PARTITION/OFFSET such as 2/1042, found {text!r}")
    if int(partition) > 2**31 - 1:
        raise UsageError(f"there is no partition {partition}")
    return Position(int(partition), int(offset))


def ledger_row_at(settings: Settings, position: Position) -> dict[str, Any]:
    """All columns of the row at this place. Raises NotFound."""
    where = PositionFilter(partition=position.partition, offset=position.offset)
    found = LedgerReader(settings).rows(where).rows.to_pylist()
    if not found:
        raise NotFound(f"the ledger has no record at {position.partition}/{position.offset}")
    return dict(found[0])


def replayable(row: dict[str, Any], keyring: Keyring) -> OutgoingRecord:
    """The record of a dead letter, to be appended again. Raises Refused that says why it cannot be."""
    at = f"{row['partition']}/{row['offset']}"
    if row["verdict"] in (ACCEPTED, DUPLICATE):
        raise Refused(f"{at} was not rejected, it is {row['verdict']}: there is nothing to replay")
    if row["reason"] == TOO_LARGE:
        raise Refused(f"{at} was too large: only its first bytes travelled, the body is gone")
    if row["door"] is None or row["ce_id"] is None or row["type"] is None:
        raise Refused(f"{at} has no envelope that could be read, so nobody knows what to send")
    if row["type"] == REQUEST_REFUSED:
        raise Refused(f"{at} is the note of a request that was refused; who sent it may ask again")
    if row["type"] == CONTROL_TOPOLOGY:
        raise Refused(f"{at} describes a topic; it is written once, at the topic's beginning")
    if row["type"] == CONTROL_FOLD_SWITCHED:
        raise Refused(f"{at} says which version of the fold settles; ./trunkline fold switch says it anew")
    try:
        record = record_of_row(_as_row(row), keyring)
    except UnsealError as error:
        raise Refused(f"{at} is masked, and its bytes cannot be opened: {error}") from None
    except ValueError as error:
        raise Refused(f"{at} cannot be made a record again: {error}") from None
    if record.value is None or parse_stream_key(record.key) is None or record.key is None:
        raise Refused(f"{at} has no value, or its key is no stream's")
    try:
        envelope = read_envelope(record)
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
    """The newest `count` rejected rows that fit, oldest first. Raises NotFound when there is no ledger."""
    kind, name = stream or (None, None)
    where = LedgerFilter(
        stream_kind=kind, stream_id=name, verdict=REJECTED, reason=reason, door=door, since=since
    )
    columns = [column for column in COLUMNS if column not in ("value_sealed", "entries")]
    found: list[dict[str, Any]] = LedgerReader(settings).newest_rows(count, where, columns).rows.to_pylist()
    return found


def _as_row(row: dict[str, Any]) -> LedgerRow:
    logged_at: datetime = row["logged_at"]
    moment_us = int(logged_at.timestamp()) * _MICROS + logged_at.microsecond
    return LedgerRow(**{**row, "logged_at": moment_us, "sent_at": None, "entries": None, "changes": None})
