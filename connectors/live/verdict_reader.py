"""Reads from the ledger what the live view has forgotten or never saw: verdicts, the newest of a type, ids."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from connectors.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.live.settled_feed import SettledRecord
from connectors.log.publisher import Position
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.tables.ledger_arrow import LEDGER_ARROW
from schemas.wire.record import MESSAGE_POSTED

_COLUMNS: Final = [
    "partition",
    "offset",
    "stream_kind",
    "stream_id",
    "type",
    "ce_id",
    "door",
    "principal",
    "verdict",
    "reason",
    "why",
    "late",
    "status_after",
    "seq",
    "logged_at",
    "value",
]


def verdict_in_ledger(settings: Settings, position: Position) -> SettledRecord | None:
    """The settled record at `position`, None while the ledger does not have it. Raises TrunklineError."""
    where = (pc.field("partition") == position.partition) & (pc.field("offset") == position.offset)
    found = _settled(_rows(settings, where, _COLUMNS))
    return found[0] if found else None


def settled_where(settings: Settings, where: pc.Expression) -> list[SettledRecord]:
    """The settled records that `where` wants, in no order; none without a ledger. Raises TrunklineError."""
    return _settled(_rows(settings, where, _COLUMNS))


def newest_settled(settings: Settings, record_type: str, count: int) -> list[SettledRecord]:
    """The newest `count` records of a type, oldest first; none without a ledger. Raises TrunklineError."""
    return newest_where(settings, LedgerFilter(type=record_type), count)


def newest_where(settings: Settings, where: LedgerFilter, count: int) -> list[SettledRecord]:
    """The newest `count` records that `where` wants, as `newest_settled`."""
    reader = LedgerReader(settings)
    if not reader.exists():
        return []
    return _settled(reader.newest_rows(count, where, _COLUMNS).rows)


def _settled(found: pa.Table) -> list[SettledRecord]:
    moments = found.column("logged_at").cast(LEDGER_ARROW.field("logged_at").type).cast(pa.int64()).to_pylist()
    rows = found.drop_columns(["logged_at"]).to_pylist()
    return [_record_of(row, logged_at_us) for row, logged_at_us in zip(rows, moments, strict=True)]


def _record_of(row: dict[str, Any], logged_at_us: int) -> SettledRecord:
    return SettledRecord(
        Position(row["partition"], row["offset"]),
        f"{row['stream_kind']}/{row['stream_id']}",
        row["type"],
        row["ce_id"],
        None if row["door"] is None else f"{row['door']}/{row['principal']}",
        row["verdict"],
        row["reason"],
        row["why"],
        row["late"],
        row["status_after"],
        row["seq"],
        logged_at_us,
        row["value"],
    )


def ids_by_door(settings: Settings, door: str, since_s: float) -> set[str]:
    """The CloudEvents ids of what `door` has put into the ledger since a moment of Kafka's clock (seconds since
    1970). Raises TrunklineError.
    """
    since = pa.scalar(int(since_s * 1e6), LEDGER_ARROW.field("logged_at").type)
    found = _rows(settings, (pc.field("logged_at") >= since) & (pc.field("door") == door), ["ce_id"])
    return {ce_id for ce_id in found.column("ce_id").to_pylist() if ce_id is not None}


def postings_by_door(settings: Settings, door: str, since_s: float) -> set[tuple[str, str]]:
    """Stream and id of each message that `door` has posted since then, as the ledger has them. As
    `ids_by_door`.
    """
    since = pa.scalar(int(since_s * 1e6), LEDGER_ARROW.field("logged_at").type)
    where = (pc.field("logged_at") >= since) & (pc.field("door") == door) & (pc.field("type") == MESSAGE_POSTED)
    found = _rows(settings, where, ["stream_kind", "stream_id", "ce_id"]).to_pylist()
    return {(f"{row['stream_kind']}/{row['stream_id']}", row["ce_id"]) for row in found}


def _rows(settings: Settings, where: pc.Expression, columns: list[str]) -> pa.Table:
    path = settings.table_path(LEDGER)
    try:
        if not DeltaTable.is_deltatable(path):
            return LEDGER_ARROW.empty_table().select(columns)
        # The files' statistics leave out nearly all of them when a position is asked for.
        return dataset_of(DeltaTable(path)).to_table(filter=where, columns=columns)
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise TrunklineError(f"the ledger at {path} cannot be read: {error}") from error
