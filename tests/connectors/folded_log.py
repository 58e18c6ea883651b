"""A log folded record by record without live view, Kafka or Spark, and the view tables made of that."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION, Settled
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.control.record_macs import macs_stream
from schemas.streams.fold import STREAM_ENTRIES, VIEWS, settle
from schemas.tables.arrow_tables import VIEW_ARROW
from schemas.tables.view_progress import NO_PROGRESS, ViewProgress
from schemas.wire.record import Record
from trunkline_agent.wire.ids import parse_stream_key
from trunkline_agent.wire.verdicts import ACCEPTED

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class FoldedLog:
    """The state that the fold makes of records. Every runner should reach the same."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self.entries: dict[str, dict[str, bytes]] = {}
        self.written: dict[tuple[str, str], tuple[int, int]] = {}  # stream, entry: partition, offset
        self.rows: dict[str, dict[str, tuple[int, int, Any]]] = {name: {} for name in VIEWS}
        self.settled: dict[tuple[int, int], Settled] = {}
        self.next_offsets: dict[int, int] = {}

    def add(self, record: Record) -> Settled:
        """Settle one record."""
        stream = record.key.decode() if parse_stream_key(record.key) else None
        entries = Entries(dict(self.entries.get(stream, {})))
        of_macs = macs_stream(record.partition)
        macs = entries if stream == of_macs else Entries(self.entries.get(of_macs, {}))
        found = settle(record, entries, self._keyring, macs)
        self.settled[record.partition, record.offset] = found
        self.next_offsets[record.partition] = record.offset + 1
        writes = entries.take_writes()
        if found.verdict == ACCEPTED and stream is not None:
            for entry, value in writes.items():
                self.written.pop((stream, entry), None)
                if value is not None:
                    self.written[stream, entry] = (record.partition, record.offset)
            if entries.stored():
                self.entries[stream] = entries.stored()
        for change in found.changes:
            self.rows[change.view][change.key] = (record.partition, record.offset, change.row)
        return found

    def get(self, row_type: type[Any], key: str) -> Any:
        """Return a row, as `LiveView.get`."""
        found = self.rows[row_type.VIEW].get(key)
        return None if found is None else found[2]

    def write_entries(self, settings: Settings, offsets: dict[int, int]) -> None:
        """Write `stream_entries` with `offsets` as the commit's progress."""
        rows = []
        for (stream, entry), (partition, offset) in self.written.items():
            kind, _, name = stream.partition("/")
            value = self.entries[stream][entry]
            rows.append((kind, name, entry, value, FOLD_VERSION, partition, offset))
        _write(settings, STREAM_ENTRIES, rows, ViewProgress(offsets, 0))

    def write_rows(self, settings: Settings) -> None:
        """Write the tables of rows."""
        for name in VIEWS:
            rows = [
                (*(getattr(row, field) for field in row.__struct_fields__), partition, offset)
                for partition, offset, row in self.rows[name].values()
                if row is not None
            ]
            _write(settings, name, rows)


def _write(
    settings: Settings, table: str, rows: list[tuple[Any, ...]], progress: ViewProgress = NO_PROGRESS
) -> None:
    schema = VIEW_ARROW[table]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [
        pa.array([_cell(value, field.type) for value in column], field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    write_deltalake(
        settings.table_path(table),
        pa.Table.from_arrays(arrays, schema=schema),
        mode="overwrite",
        commit_properties=progress.commit_properties(),
    )


def _cell(value: Any, kind: pa.DataType) -> Any:
    if value is not None and pa.types.is_timestamp(kind):
        return _EPOCH + timedelta(microseconds=value)
    return value
