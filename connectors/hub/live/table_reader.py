"""Readers of the tables without Spark: settled records from the ledger, and the view tables for a local store.

Records are read from the ledger if the live view does not have them in memory.

One version of `stream_entries` is read, and its commit names the offsets up to which it has the log. The
tables of rows are opened after it and written before it, so they are at those offsets or beyond. Final messages
that the store would not keep are not loaded.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import lmdb
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from connectors.hub.live.settled_feed import SettledRecord
from connectors.log.ledger_files.ledger_reader import LedgerFilter, LedgerReader
from connectors.plumbing.network.rates import retry
from schemas.fold.settled import FOLD_VERSION
from schemas.fold.view_rows import Row
from schemas.settings.settings import Settings
from schemas.state_store import gateway_store
from schemas.state_store.gateway_store import GatewayStore, RowChange
from schemas.state_store.partition_store import EntryChange
from schemas.streams.fold import KINDS, STREAM_ENTRIES, VIEWS
from schemas.streams.mailboxes.mailbox_entries import LAST
from schemas.streams.mailboxes.message import MESSAGE_POSTED, MessageBodyRow, MessageRow
from schemas.tables.arrow_tables import LEDGER_ARROW, VIEW_ARROW
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import read_progress
from schemas.wire.record import Position
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import MAILBOX
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

    Reading stops at some 32 MiB in all. Any of the other matches are missing then, and nothing says so. The
    list is empty while there is no ledger. Raises TrunklineError if the ledger cannot be read.
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


BATCH_ROWS: Final = 16_384
_AGAIN_S: Final = 0.5
# Files disappear under a reader while the tables are being swapped for rebuilt ones.
_UNREADABLE: Final = (DeltaError, OSError, pa.ArrowException, KeyError)


class LoadedViews(msgspec.Struct):
    """The places in the log up to which loaded tables have it.

    Attributes:
        offsets: The first offset to read, by partition; empty if there are no view tables.
        ahead: The streams whose entries have records at or beyond `offsets`, with the last such offset.
        rows_until: The highest offset of a row, by partition.
    """

    offsets: dict[int, int]
    ahead: dict[str, int] = {}
    rows_until: dict[int, int] = {}


def load_views(settings: Settings, new_store: Callable[[], GatewayStore]) -> LoadedViews:
    """Load the view tables into a local store, and return up to where they have the log.

    It blocks while it reads. Unreadable tables are tried four times, half a second apart.

    Args:
        settings: The settings with the path of the tables.
        new_store: Returns an empty store without a place, for each attempt.

    Raises:
        TrunklineError: There are tables, but they cannot be read, are incomplete, or were written by a newer
            version of the fold. Then the store may be filled in part.
    """
    if not DeltaTable.is_deltatable(settings.table_path(STREAM_ENTRIES)):
        return LoadedViews({})
    try:
        return retry(lambda: _load(settings, new_store()), on=_UNREADABLE, times=4, pause_s=_AGAIN_S)
    except _UNREADABLE as error:
        raise TrunklineError(
            f"the view tables below {settings.tables_root} cannot be read: {error}; "
            "rebuild_views makes them anew from the ledger"
        ) from error


def progress_of_tables(settings: Settings) -> dict[int, int]:
    """Return the first offset that the view tables lack, by partition; empty if there are no tables.

    Raises:
        TrunklineError: There are tables, but they cannot be read.
    """
    path = settings.table_path(STREAM_ENTRIES)
    if not DeltaTable.is_deltatable(path):
        return {}
    try:
        return dict(retry(lambda: read_progress(DeltaTable(path)), _UNREADABLE, 4, _AGAIN_S).offsets)
    except _UNREADABLE as error:
        raise TrunklineError(f"the view tables below {settings.tables_root} cannot be read: {error}") from error


def _load(settings: Settings, store: GatewayStore) -> LoadedViews:
    table = DeltaTable(settings.table_path(STREAM_ENTRIES))
    loaded = LoadedViews(dict(read_progress(table).offsets), {}, {})
    kinds: set[str] = set()
    for batch in _batches(table, VIEW_ARROW[STREAM_ENTRIES].names):
        _put(store, functools.partial(_entries_in, batch, kinds, loaded), tuple)
    found: set[str] = set()
    is_dropped, kept, live = None, list[pa.Array](), set[str]()
    # The views are read in the reverse of the order of writing, so that no body is missing.
    for view in reversed(VIEWS.values()):
        path, wanted = settings.table_path(view.VIEW), None
        if DeltaTable.is_deltatable(path):
            table = DeltaTable(path)
            if view is MessageRow and (is_dropped := _too_old(table)) is not None:
                wanted = ~is_dropped
            elif view is MessageBodyRow and is_dropped is not None:
                wanted = pc.field("message_id").isin(pa.chunked_array(kept, pa.string()).combine_chunks())
                live = {key for key, _ in store.live_rows(MessageRow.VIEW)}
            columns = [*view.__struct_fields__, "partition", "last_offset"]
            for batch in _batches(table, columns, wanted):
                rows = functools.partial(_rows_in, batch, view)
                if view is MessageBodyRow and is_dropped is not None:
                    rows = functools.partial(iter, _of_kept_messages(store, live, rows()))
                _put(store, tuple, rows)
                if view is MessageRow and is_dropped is not None:
                    kept.append(batch.column("message_id"))
                _note_offsets(batch, loaded.rows_until)
                found |= {view.VIEW} if batch.num_rows else set()
    for kind in sorted(kinds & KINDS.keys()):
        views = [row_type.VIEW for row_type in KINDS[kind].row_of_each_stream]
        if views and not found.intersection(views):
            raise TrunklineError(
                f"there are entries of {kind} streams, but no rows in {' or '.join(views)} below "
                f"{settings.tables_root}; rebuild_views makes the tables anew from the ledger"
            )
    pa.default_memory_pool().release_unused()
    return loaded


def _put(
    store: GatewayStore,
    entries: Callable[[], Iterable[EntryChange]],
    rows: Callable[[], Iterable[RowChange]],
) -> None:
    """Add entries and rows to the store. Both functions may be called twice."""
    try:
        store.load(entries(), rows())
    except lmdb.MapFullError:
        store.reopen()  # with room for a larger file
        store.load(entries(), rows())


def _too_old(mailbox: DeltaTable) -> pc.Expression | None:
    """Return a condition for the final messages that a store does not keep, None if it keeps all."""
    most, newest = gateway_store.FINAL_MESSAGES_KEPT, dict[str, pa.Array]()
    oldest: dict[str, pa.Scalar] = {}
    for batch in _batches(mailbox, ["status", "ended_at"], pc.field("ended_at").is_valid()):
        for status in pc.unique(batch.column("status")).to_pylist():
            ended = batch.filter(pc.equal(batch.column("status"), status)).column("ended_at")
            both = pa.concat_arrays([newest.get(status, ended[:0]), ended])
            if len(both) > most:
                both = both.take(pc.select_k_unstable(both, most, [("", "descending")]))
                oldest[status] = both[-1]
            newest[status] = both
    parts = [(pc.field("status") == one) & (pc.field("ended_at") < moment) for one, moment in oldest.items()]
    return functools.reduce(operator.or_, parts) if parts else None


def _batches(
    table: DeltaTable, columns: list[str], wanted: pc.Expression | None = None
) -> Iterator[pa.RecordBatch]:
    # Read little ahead, so that Arrow's copy of the table does not need much memory.
    yield from dataset_of(table).to_batches(
        columns=columns, filter=wanted, batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1
    )


def _entries_in(batch: pa.RecordBatch, kinds: set[str], loaded: LoadedViews) -> Iterator[EntryChange]:
    """Yield the entries. Adds the kinds of stream that must have rows to `kinds`, and streams to `ahead`."""
    newest = pc.max(batch.column("fold_version")).as_py()
    if newest is not None and newest > FOLD_VERSION:
        raise TrunklineError(
            f"the view tables were made by fold version {newest}, this program has {FOLD_VERSION}: "
            "start the newer program"
        )
    # A mailbox may have entries of requests and gates alone, without a message that was ever posted.
    is_row = pc.or_(pc.not_equal(batch.column("stream_kind"), MAILBOX), pc.equal(batch.column("entry"), LAST))
    kinds.update(pc.unique(batch.column("stream_kind").filter(is_row)).to_pylist())
    streams = pc.binary_join_element_wise(batch.column("stream_kind"), batch.column("stream_id"), "/")
    _note_streams_ahead(batch.append_column("stream", streams), loaded.offsets, loaded.ahead)
    columns = (streams, batch.column("entry"), batch.column("value"))
    yield from zip(*(column.to_pylist() for column in columns), strict=True)


def _note_streams_ahead(batch: pa.RecordBatch, offsets: Mapping[int, int], ahead: dict[str, int]) -> None:
    """Note the offsets of streams whose entries are ahead of `offsets`, so that no record is applied twice."""
    partitions = batch.column("partition")
    for number in pc.unique(partitions).to_pylist():
        is_ahead = pc.and_(
            pc.equal(partitions, number),
            pc.greater_equal(batch.column("last_offset"), offsets.get(number, 0)),
        )
        found = batch.filter(is_ahead)
        for stream, offset in zip(
            found.column("stream").to_pylist(), found.column("last_offset").to_pylist(), strict=True
        ):
            ahead[stream] = max(offset, ahead.get(stream, -1))


def _rows_in(batch: pa.RecordBatch, view: type[Row]) -> Iterator[RowChange]:
    schema, columns = VIEW_ARROW[view.VIEW], []
    for name in view.__struct_fields__:
        column = batch.column(name)
        if pa.types.is_timestamp(schema.field(name).type):
            column = column.cast(schema.field(name).type).cast(pa.int64())
        columns.append(column.to_pylist())
    offsets = batch.column("last_offset").to_pylist()
    for row, offset in zip(map(view, *columns), offsets, strict=True):
        yield view.VIEW, row.key, (offset, row)


def _of_kept_messages(store: GatewayStore, live: set[str], bodies: Iterable[RowChange]) -> list[RowChange]:
    """Return the bodies of live messages, and of others that the store has.

    Of messages that ended at one moment, the store may have dropped some.
    """
    return [one for one in bodies if one[1] in live or store.ended(MessageRow.VIEW, one[1]) is not None]


def _note_offsets(batch: pa.RecordBatch, until: dict[int, int]) -> None:
    highest = pa.Table.from_batches([batch]).group_by("partition").aggregate([("last_offset", "max")])
    for found in highest.to_pylist():
        number, offset = found["partition"], found["last_offset_max"]
        until[number] = max(offset, until.get(number, -1))
