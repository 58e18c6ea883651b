"""Loading of the view tables into the live view's memory, without Spark: entries first, then the rows.

One version of `stream_entries` is read, and its commit names the offsets up to which it has the log. The
tables of rows are opened after it and written before it, so they are at those offsets or beyond.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from connectors.live.live_state import FINAL_MESSAGES, LiveState
from connectors.retry.backoff import retry
from schemas.errors import TrunklineError
from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.fold.view_rows import Row
from schemas.settings.settings import Settings
from schemas.streams.kinds import KINDS, STREAM_ENTRIES, VIEWS
from schemas.streams.mailboxes.mailbox_entries import LAST
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_BODIES, MessageRow
from schemas.tables.delta_files import dataset_of
from schemas.tables.view_arrow import VIEW_ARROW
from schemas.tables.view_progress import read_progress
from schemas.wire.ids import MAILBOX

BATCH_ROWS: Final = 16_384
_AGAIN_S: Final = 0.5
# Files disappear under a reader while the tables are being swapped for rebuilt ones.
_UNREADABLE: Final = (DeltaError, OSError, pa.ArrowException, KeyError)


def load_views(settings: Settings, state: LiveState) -> dict[int, int]:
    """Load the view tables into `state`, and return the offsets from which to read the log after that.

    It blocks while it reads. Unreadable tables are tried four times, half a second apart.

    Returns:
        The first offset to read, by partition; empty if there are no view tables, so that `state` is unchanged.

    Raises:
        TrunklineError: There are tables, but they cannot be read, are incomplete, or were written by a newer
            version of the fold. Then `state` may be filled in part.
    """
    if not DeltaTable.is_deltatable(settings.table_path(STREAM_ENTRIES)):
        return {}
    try:
        return retry(lambda: _load(settings, state), on=_UNREADABLE, times=4, pause_s=_AGAIN_S)
    except _UNREADABLE as error:
        raise TrunklineError(
            f"the view tables below {settings.tables_root} cannot be read: {error}; "
            "rebuild_views makes them anew from the ledger"
        ) from error


def _load(settings: Settings, state: LiveState) -> dict[int, int]:
    state.clear()
    path = settings.table_path(STREAM_ENTRIES)
    table = DeltaTable(path)
    offsets = dict(read_progress(table).offsets)
    kinds = _load_entries(_batches(table, VIEW_ARROW[STREAM_ENTRIES].names), offsets, state)
    # `mailbox` before `message_bodies`, the reverse of the order of writing, so that no body is missing.
    for view in reversed(VIEWS.values()):
        path = settings.table_path(view.VIEW)
        if DeltaTable.is_deltatable(path):
            columns = [*view.__struct_fields__, "last_offset"]
            table = DeltaTable(path)
            _load_rows(_batches(table, columns, _wanted(view.VIEW, table, state)), view, state)
    state.note_final()
    for kind in sorted(kinds & KINDS.keys()):
        views = [row_type.VIEW for row_type in KINDS[kind].row_of_each_stream]
        if views and not any(state.rows_by_view[view] for view in views):
            raise TrunklineError(
                f"there are entries of {kind} streams, but no rows in {' or '.join(views)} below "
                f"{settings.tables_root}; rebuild_views makes the tables anew from the ledger"
            )
    pa.default_memory_pool().release_unused()
    return offsets


def _wanted(view: str, table: DeltaTable, state: LiveState) -> pc.Expression | None:
    """Return a filter of the rows to load, None for all: of messages in a final status only the newest.

    `mailbox` is loaded before `message_bodies`.
    """
    if view == MAILBOX_VIEW:
        ended = dataset_of(table).to_table(columns=["ended_at"], filter=pc.field("ended_at").is_valid())
        if ended.num_rows <= FINAL_MESSAGES:
            return None
        newest = pc.select_k_unstable(ended, k=FINAL_MESSAGES, sort_keys=[("ended_at", "descending")])
        oldest_kept = ended["ended_at"][newest[-1].as_py()]
        return pc.field("ended_at").is_null() | (pc.field("ended_at") >= oldest_kept)
    if view == MESSAGE_BODIES:
        rows = state.rows_by_view[MAILBOX_VIEW].values()
        kept = [row.message_id for row in rows if isinstance(row, MessageRow)]
        return pc.field("message_id").isin(pa.array(kept, pa.string()))
    return None


def _batches(
    table: DeltaTable, columns: list[str], wanted: pc.Expression | None = None
) -> Iterator[pa.RecordBatch]:
    # Read little ahead, so that Arrow's copy of the table does not double the memory.
    yield from dataset_of(table).to_batches(
        columns=columns, filter=wanted, batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1
    )


def _load_entries(batches: Iterator[pa.RecordBatch], offsets: Mapping[int, int], state: LiveState) -> set[str]:
    """Load the entries, and return the kinds of stream that have entries and so must have rows."""
    entries_by_stream, kinds, names = state.entries_by_stream, set(), _Shared()
    for batch in batches:
        newest = pc.max(batch.column("fold_version")).as_py()
        if newest is not None and newest > FOLD_VERSION:
            raise TrunklineError(
                f"the view tables were made by fold version {newest}, this program has {FOLD_VERSION}: "
                "start the newer program"
            )
        # A mailbox may have entries of requests and gates alone, without a message that was ever posted.
        is_row = pc.or_(
            pc.not_equal(batch.column("stream_kind"), MAILBOX), pc.equal(batch.column("entry"), LAST)
        )
        kinds.update(pc.unique(batch.column("stream_kind").filter(is_row)).to_pylist())
        streams = pc.binary_join_element_wise(batch.column("stream_kind"), batch.column("stream_id"), "/")
        keys = names.of(batch.column("entry"))
        for stream, key, value in zip(
            streams.to_pylist(), keys, batch.column("value").to_pylist(), strict=True
        ):
            entries = entries_by_stream.get(stream)
            if entries is None:
                entries = entries_by_stream[stream] = Entries()
            entries.load(key, value)
        _note_streams_ahead(batch.append_column("stream", streams), offsets, state)
    return kinds


def _note_streams_ahead(batch: pa.RecordBatch, offsets: Mapping[int, int], state: LiveState) -> None:
    """Note the offsets of streams whose entries are ahead of `offsets`, so that no record is applied twice."""
    partitions = batch.column("partition")
    for number in pc.unique(partitions).to_pylist():
        ahead = pc.and_(
            pc.equal(partitions, number),
            pc.greater_equal(batch.column("last_offset"), offsets.get(number, 0)),
        )
        found = batch.filter(ahead)
        for stream, offset in zip(
            found.column("stream").to_pylist(), found.column("last_offset").to_pylist(), strict=True
        ):
            state.applied_beyond[stream] = max(offset, state.applied_beyond.get(stream, -1))


def _load_rows(batches: Iterator[pa.RecordBatch], view: type[Row], state: LiveState) -> None:
    rows_by_key, offset_by_key = state.rows_by_view[view.VIEW], state.offsets_by_view[view.VIEW]
    schema, shared = VIEW_ARROW[view.VIEW], {name: _Shared() for name in view.__struct_fields__}
    for batch in batches:
        columns = {}
        for name, values in shared.items():
            column = batch.column(name)
            if pa.types.is_timestamp(schema.field(name).type):
                columns[name] = column.cast(schema.field(name).type).cast(pa.int64()).to_pylist()
            elif pa.types.is_string(column.type):
                columns[name] = values.of(column)
            else:
                columns[name] = column.to_pylist()
        rows: list[Row] = list(map(view, *columns.values()))
        keys = columns[view.KEY[0]] if len(view.KEY) == 1 else [row.key for row in rows]
        rows_by_key.update(zip(keys, rows, strict=True))
        offset_by_key.update(zip(keys, batch.column("last_offset").to_pylist(), strict=True))


class _Shared:
    """The values of one column, where equal values become one object if they repeat a lot."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, column: pa.Array) -> list[Any]:
        """Return the values of `column` as a list of Python objects. Empty cells become None."""
        values: list[Any] = column.to_pylist()
        if pc.count_distinct(column).as_py() * 8 > len(values):
            return values
        share = self._known.setdefault
        return [share(value, value) for value in values]
