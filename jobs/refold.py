"""Settles the raw bytes of the whole ledger again, and compares the results with the ledger and the views.

Each ledger row is turned back into its Kafka record and settled. The verdict, the changes and the entries must
be those in the row; results of an earlier version of the fold are taken over. The resulting rows and entries
must be those in the view tables, up to the progress of these. Memory: one window of ledger rows, and the
entries and rows of all streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
from deltalake import DeltaTable

from jobs.views.view_changes import Key, RowChange, ends_of, key_columns, row_changes, row_key
from schemas.fold.entries import Entries, Writes
from schemas.fold.settled import FOLD_VERSION, AppliedChange
from schemas.keys.sealing import Keyring, UnsealError
from schemas.settings.settings import Settings
from schemas.streams.control.record_macs import macs_stream
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES, settle
from schemas.tables.arrow_tables import VIEW_ARROW, rows_between
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LedgerRow, record_of_row
from schemas.tables.view_progress import ViewProgress, read_progress
from trunkline_agent.errors import NotFound
from trunkline_agent.wire.verdicts import ACCEPTED

_WINDOW: Final = 20_000
_SHOWN: Final = 50
_COMPARED: Final = ("verdict", "reason", "late", "status_after")
_MOMENT: Final = pa.int64()
_NONE: Final = Entries()


class CheckResult(msgspec.Struct):
    """The result of `check_views`.

    Attributes:
        records: The number of refolded records.
        adopted: How many of them were settled by an earlier version of the fold. Their stored results were not
            checked.
        different: The number of differences. 0: ledger, refold and views agree.
        differences: Texts about the first 50 differences.
        rows: How many rows of each view table were compared.
        newer: How many rows were not compared, because they are newer than the views' progress.
        offsets: The views' progress: the first offset of each Kafka partition that they lack.
    """

    records: int = 0
    adopted: int = 0
    different: int = 0
    differences: list[str] = msgspec.field(default_factory=list)
    rows: dict[str, int] = msgspec.field(default_factory=dict)
    newer: int = 0
    offsets: dict[int, int] = msgspec.field(default_factory=dict)

    def differ(self, text: str) -> None:
        """Count a difference between ledger, refold and views. Its text is kept if it is among the first 50."""
        self.different += 1
        if len(self.differences) < _SHOWN:
            self.differences.append(text)


class Refold:
    """A fold that settles the ledger's records again and compares the results with the stored rows.

    Call `settle` for each ledger row, then `finish`, then `compare_table` for each view table. Differences are
    added to `result`, and nothing is raised for them.

    Args:
        keyring: The master keys that unseal the raw bytes of masked records.
        progress: The progress of the view tables. Later records are not expected in them.
        result: Counts records and differences.
    """

    def __init__(self, keyring: Keyring, progress: ViewProgress, result: CheckResult) -> None:
        self._expected: dict[str, dict[Key, RowChange]] = {table: {} for table in VIEW_TABLES}
        self._keyring = keyring
        self._progress = progress
        self._result = result
        self._streams: dict[bytes | None, Entries] = {}
        self._changes: dict[bytes | None, dict[tuple[str, str], AppliedChange]] = {}

    def settle(self, row: LedgerRow) -> None:
        """Settle the record of one ledger row again, and compare the outcome with the row.

        Differences are added to `result`. The rows of each partition must come in the order of their offsets.
        """
        self._result.records += 1
        where = f"ledger {row.partition}:{row.offset}"
        if row.fold_version < FOLD_VERSION:
            self._adopt(where, row)
            return
        try:
            record = record_of_row(row, self._keyring)
        except (UnsealError, ValueError) as error:
            self._result.differ(f"{where}: the row cannot be turned back into a record: {error}")
            return
        # A record whose key names no stream has no earlier entries, and leaves none.
        known = self._streams.get(record.key)
        entries = Entries() if known is None else known
        of_macs = macs_stream(row.partition).encode("ascii")
        macs = entries if record.key == of_macs else self._streams.get(of_macs, _NONE)
        settled = settle(record, entries, self._keyring, macs)
        for name in _COMPARED:
            if getattr(settled, name) != getattr(row, name):
                self._result.differ(
                    f"{where}: {name} is {getattr(row, name)!r}, refolded {getattr(settled, name)!r}"
                )
        changed = self._changes.setdefault(record.key, {})
        for change in settled.changes:
            applied = AppliedChange(change.view, change.key, record.offset, change.row)
            changed[change.view, change.key] = applied
        if row.changes is not None or row.entries is not None:
            # The stream's last row of a micro-batch has the changes of the whole batch.
            self._compare_changes(where, row, list(self._changes.pop(record.key).values()))
            self._compare_entries(where, row, entries.take_writes())
        elif not changed:
            self._changes.pop(record.key)
        if settled.verdict == ACCEPTED:
            self._streams[record.key] = entries

    def _adopt(self, where: str, row: LedgerRow) -> None:
        """Take over the result of an earlier version of the fold; this version may decide otherwise."""
        self._result.adopted += 1
        if row.changes is None and row.entries is None:
            return
        if self._is_shown(row):
            for view, view_key, change in row_changes(row.partition, row.changes):
                self._expect(view, view_key, change)
        writes = dict(row.entries or ())
        self._compare_entries(where, row, writes)
        entries = self._streams.setdefault(f"{row.stream_kind}/{row.stream_id}".encode(), Entries())
        for key, value in writes.items():
            entries.delete(key) if value is None else entries.put(key, value)
        entries.keep()
        entries.take_writes()

    def finish(self) -> None:
        """Add to `result` one difference for each stream with refolded changes that no ledger row has.

        Call it once, after `settle` of the last row.
        """
        for key, changes in self._changes.items():
            name = (key or b"").decode("ascii", "replace")
            self._result.differ(f"{name}: {len(changes)} changes stand in no ledger row")

    def compare_table(self, table: str, stored: DeltaTable) -> None:
        """Compare one view table with the rows that the refold expects in it.

        Differences are added to `result`. The expected rows are removed from memory, so each table can be
        compared once. Call it after `finish`.

        Args:
            table: The name of the view table. A second call for the same table raises KeyError.
            stored: The open Delta table with that name.
        """
        names, expected, result = VIEW_ARROW[table].names, self._expected.pop(table), self._result
        keys = key_columns(table)
        count = 0
        for row in table_rows(stored, table):
            key: Key = tuple(row[name] for name in keys)
            where = f"{table} {'/'.join(key)}"
            wanted = expected.pop(key, None)
            if row["last_offset"] >= self._progress.offsets.get(row["partition"], 0):
                result.newer += 1
                continue
            count += 1
            if wanted is None or wanted.row is None:
                result.differ(f"{where}: should not be there")
                continue
            cells = {**wanted.row, "partition": wanted.partition, "last_offset": wanted.offset}
            for name in names:
                # A column that is newer than the row's version of the fold is empty.
                refolded = cells.get(name)
                if refolded != row[name]:
                    result.differ(f"{where}: {name} is {_brief(row[name])}, refolded {_brief(refolded)}")
        for key in sorted(expected):
            result.differ(f"{table} {'/'.join(key)}: is missing")
        result.rows[table] = count

    def _is_shown(self, row: LedgerRow) -> bool:
        return row.offset < self._progress.offsets.get(row.partition, 0)

    def _compare_changes(self, where: str, row: LedgerRow, changes: list[AppliedChange]) -> None:
        said = msgspec.json.decode(row.changes) if row.changes else []
        if said != msgspec.to_builtins(changes):
            self._result.differ(f"{where}: other changes than refolded")
        if self._is_shown(row):
            for change in changes:
                key = row_key(change.view, change.key)
                shown = None if change.row is None else msgspec.structs.asdict(change.row)
                self._expect(change.view, key, RowChange(row.partition, change.offset, shown))

    def _compare_entries(self, where: str, row: LedgerRow, writes: Writes) -> None:
        if dict(row.entries or ()) != writes:
            self._result.differ(f"{where}: other entries than refolded")
        if not self._is_shown(row):
            return
        for entry, value in writes.items():
            key = (row.stream_kind, row.stream_id, entry)
            cells = {**dict(zip(key_columns(STREAM_ENTRIES), key, strict=True)), "value": value}
            shown = None if value is None else {**cells, "fold_version": row.fold_version}
            self._expect(STREAM_ENTRIES, key, RowChange(row.partition, row.accepted_offset or 0, shown))

    def _expect(self, table: str, key: Key, change: RowChange) -> None:
        if change.row is None:
            self._expected[table].pop(key, None)
        else:
            self._expected[table][key] = change


def check_views(settings: Settings, ledger: DeltaTable, keyring: Keyring) -> CheckResult:
    """Refold the whole ledger, compare ledger and view tables with the results, and return the differences.

    No table is changed. The open table `ledger` is first moved to its newest version. Differences raise
    nothing: the caller checks `different` of the result.

    Raises:
        NotFound: A view table is missing.
    """
    result = CheckResult()
    tables = {}
    # The entries are opened first, so rows of the other tables beyond their progress are newer.
    for table in reversed(VIEW_TABLES):
        path = settings.table_path(table)
        if not DeltaTable.is_deltatable(path):
            raise NotFound(f"there is no table {path}: build the views with rebuild_views")
        tables[table] = DeltaTable(path)
    progress = read_progress(tables[STREAM_ENTRIES])
    result.offsets = progress.offsets
    # The views may be ahead of the ledger that the caller has loaded.
    ledger.update_incremental()
    refold = Refold(keyring, progress, result)
    for row in ordered_rows(ledger):
        refold.settle(row)
    refold.finish()
    for table in VIEW_TABLES:
        refold.compare_table(table, tables[table])
    return result


def ordered_rows(ledger: DeltaTable) -> Iterator[LedgerRow]:
    """Yield all ledger rows, ordered by partition and offset. About 20,000 rows are in memory at once."""
    dataset = dataset_of(ledger)
    for partition, end in ends_of(ledger).items():
        for first in range(0, end, _WINDOW):
            yield from rows_between(dataset, partition, first, first + _WINDOW)


def table_rows(stored: DeltaTable, table: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stored view table as dictionaries, with times as integers in microseconds.

    `table` is the name of the view, whose columns are read.
    """
    for batch in dataset_of(stored).to_batches(columns=VIEW_ARROW[table].names):
        plain = {
            name: column.cast(_MOMENT) if pa.types.is_timestamp(column.type) else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        yield from pa.table(plain).to_pylist()


def _brief(value: object) -> str:
    text = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
