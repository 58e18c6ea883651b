"""Loading of the view tables into the gateway's local store, without Spark: entries first, then the rows.

One version of `stream_entries` is read, and its commit names the offsets up to which it has the log. The
tables of rows are opened after it and written before it, so they are at those offsets or beyond. Final messages
that the store would not keep are not loaded.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import lmdb
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from connectors.plumbing.network.rates import retry
from schemas.fold.settled import FOLD_VERSION
from schemas.fold.view_rows import Row
from schemas.settings.settings import Settings
from schemas.state_store import gateway_store
from schemas.state_store.gateway_store import GatewayStore, RowChange
from schemas.state_store.partition_store import EntryChange
from schemas.streams.kinds import KINDS, STREAM_ENTRIES, VIEWS
from schemas.streams.mailboxes.mailbox_entries import LAST
from schemas.streams.mailboxes.message import MessageBodyRow, MessageRow
from schemas.tables.delta_files import dataset_of
from schemas.tables.view_arrow import VIEW_ARROW
from schemas.tables.view_progress import read_progress
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import MAILBOX

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
