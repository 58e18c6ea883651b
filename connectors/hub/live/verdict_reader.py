"""Functions that read settled records from the ledger, for records that the live view has not in memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from connectors.hub.live.settled_feed import SettledRecord
from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import MESSAGE_POSTED
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.tables.ledger_arrow import LEDGER_ARROW
from schemas.wire.partitions import Position
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.verdicts import REJECTED

# A number of records bounds no memory, because a value may have a MiB.
READ_BYTES_MOST: Final = 32 * 1024 * 1024
_BATCH_ROWS: Final = 64
# Columns whose values are shown as they are.
_SAME: Final = ("type", "ce_id", "verdict", "reason", "why", "late", "status_after", "seq", "value")
_COLUMNS: Final = [*_SAME, "partition", "offset", "stream_kind", "stream_id", "door", "principal", "logged_at"]


def verdict_in_ledger(settings: Settings, position: Position) -> SettledRecord | None:
    """Return the record at `position` with its verdict, or None if the ledger does not have the record.

    None means that the record is not in the ledger yet, that there is no such offset, or that there is no
    ledger. Raises TrunklineError if the ledger cannot be read.
    """
    where = (pc.field("partition") == position.partition) & (pc.field("offset") == position.offset)
    return next(iter(settled_where(settings, where)), None)


def settled_where(settings: Settings, where: pc.Expression) -> list[SettledRecord]:
    """Return the ledger's records that match `where`, an expression over its columns, in no order.

    Records beyond some 32 MiB are left out. The list is empty while there is no ledger. Raises TrunklineError
    if the ledger cannot be read.
    """
    return _settled(ledger_rows(settings, where, _COLUMNS, READ_BYTES_MOST))


def newest_settled(settings: Settings, record_type: str, count: int) -> list[SettledRecord]:
    """Return the newest `count` records of the type `record_type` from the ledger, oldest first.

    There are fewer if they have more than 32 MiB. The list is empty while there is no ledger. Raises
    TrunklineError if the ledger cannot be read.
    """
    return newest_where(settings, LedgerFilter(type=record_type), count)


def newest_where(settings: Settings, where: LedgerFilter, count: int) -> list[SettledRecord]:
    """Return the newest `count` records that match `where` from the ledger, oldest first.

    `LedgerFilter(...)` names the wanted values of columns. There are fewer if they have more than 32 MiB. The
    list is empty while there is no ledger. Raises TrunklineError if the ledger cannot be read.
    """
    reader = LedgerReader(settings)
    if not reader.exists():
        return []
    return _settled(reader.newest_rows(count, where, _COLUMNS, bytes_most=READ_BYTES_MOST).rows)


def _settled(found: pa.Table) -> list[SettledRecord]:
    moments = found.column("logged_at").cast(LEDGER_ARROW.field("logged_at").type).cast(pa.int64()).to_pylist()
    rows = found.drop_columns(["logged_at"]).to_pylist()
    return [_record_of(row, logged_at_us) for row, logged_at_us in zip(rows, moments, strict=True)]


def _record_of(row: dict[str, Any], logged_at_us: int) -> SettledRecord:
    return SettledRecord(
        position=Position(row["partition"], row["offset"]),
        stream=f"{row['stream_kind']}/{row['stream_id']}",
        principal=None if row["door"] is None else f"{row['door']}/{row['principal']}",
        logged_at_us=logged_at_us,
        **{name: row[name] for name in _SAME},
    )


def ids_by_door(settings: Settings, door: str, since_s: float) -> set[str]:
    """Return the CloudEvents ids of the ledger's records that `door` appended at `since_s` or later.

    `door` is the name of a door in the records' headers, such as `reactor`. `since_s` is in seconds since 1970
    UTC and is compared with Kafka's append time. The set is empty while there is no ledger. Raises
    TrunklineError if the ledger cannot be read.
    """
    found = ledger_rows(settings, _by_door(door, since_s), ["ce_id"])
    return {ce_id for ce_id in found.column("ce_id").to_pylist() if ce_id is not None}


def postings_by_door(settings: Settings, door: str, since_s: float) -> set[tuple[str, str]]:
    """Return stream and CloudEvents id of each message that `door` posted at `since_s` or later.

    `door` is the name of a door in the records' headers, such as `mqtt`. `since_s` is in seconds since 1970 UTC
    and is compared with Kafka's append time. The set is empty while there is no ledger. Raises TrunklineError
    if the ledger cannot be read.
    """
    where = _by_door(door, since_s) & (pc.field("type") == MESSAGE_POSTED)
    found = ledger_rows(settings, where, ["stream_kind", "stream_id", "ce_id"]).to_pylist()
    return {(f"{row['stream_kind']}/{row['stream_id']}", row["ce_id"]) for row in found}


def refusals_among(
    settings: Settings, door: str, since_s: float, ce_ids: Collection[str]
) -> dict[str, str | None]:
    """Return those of the CloudEvents ids `ce_ids` that `door` has appended at `since_s` or later.

    Each has the reason of its rejection, and None if one of its records was accepted. For the other arguments,
    and the errors, see `ids_by_door`. At most `ce_ids` are in memory.
    """
    where = _by_door(door, since_s) & pc.field("ce_id").isin(list(ce_ids))
    found: dict[str, str | None] = {}
    for row in ledger_rows(settings, where, ["ce_id", "verdict", "reason"]).to_pylist():
        reason = (row["reason"] or REJECTED) if row["verdict"] == REJECTED else None
        found[row["ce_id"]] = None if found.get(row["ce_id"], reason) is None else reason
    return found


def _by_door(door: str, since_s: float) -> pc.Expression:
    since = pa.scalar(int(since_s * 1e6), LEDGER_ARROW.field("logged_at").type)
    return (pc.field("logged_at") >= since) & (pc.field("door") == door)


def ledger_rows(
    settings: Settings, where: pc.Expression, columns: list[str], bytes_most: int | None = None
) -> pa.Table:
    """Return these columns of the ledger's rows that match `where`, of so many bytes at most, in no order.

    The table is empty while there is no ledger. Raises TrunklineError if the ledger cannot be read.
    """
    path = settings.table_path(LEDGER)
    try:
        if not DeltaTable.is_deltatable(path):
            return LEDGER_ARROW.empty_table().select(columns)
        # By their statistics, nearly all files are skipped in a search for one position.
        rows = dataset_of(DeltaTable(path))
        if bytes_most is None:
            return rows.to_table(filter=where, columns=columns)
        found: list[pa.RecordBatch] = []
        ahead = {"batch_size": _BATCH_ROWS, "batch_readahead": 1, "fragment_readahead": 1}
        for batch in rows.to_batches(columns, where, **ahead):
            if found and bytes_most < batch.nbytes:
                break
            found.append(batch)
            bytes_most -= batch.nbytes
        return pa.Table.from_batches(found, LEDGER_ARROW.empty_table().select(columns).schema)
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise TrunklineError(f"the ledger at {path} cannot be read: {error}") from error
