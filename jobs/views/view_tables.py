"""Writes the view tables: merges changed rows into them, at a cost that does not grow with the table.

A table is partitioned by `shelf`. New and changed rows go to the current shelf, which is closed when it has
SHELF_ROWS rows. A row that changes leaves its shelf for the current one. The writer knows the shelf of each
key, by an index on disk (key_index.py). So a MERGE reads and rewrites only the shelves of the changed rows, and
unchanged rows are not touched (decisions 0009 and 0030). The library delta-rs writes; Spark never writes these
tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import TableNotFoundError
from pyarrow.fs import FileSelector

from jobs.driver.programs import name_of, writer_of
from jobs.views.key_index import SHELF, Held, KeyIndex
from jobs.views.view_changes import Key, RowChange, key_columns
from schemas.settings.settings import Settings
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from schemas.tables.arrow_tables import VIEW_ARROW, VIEW_ROWS, Position, with_comments
from schemas.tables.delta_files import dataset_of, is_table, table_storage
from schemas.tables.view_progress import NO_PROGRESS, ViewProgress, read_progress
from trunkline_agent.errors import Refused, TrunklineError

# A shelf of entries is then below 1 MB, which a micro-batch rewrites at most for each changed shelf.
SHELF_ROWS: Final = 2048
# Unchanged shelves are joined until they have so many rows.
_RESTING_ROWS: Final = 16_384
# The number of appends to the current shelf, with a file each, before its files are joined.
_LOOSE_FILES: Final = 32
# A rebuild builds the new tables in a folder whose name begins so, beside the old ones.
REBUILD: Final = "_rebuild-"


class WrongViewTable(TrunklineError):
    """A stored view table has other columns than this version writes. The views must be rebuilt."""


def table_schema(table: str) -> pa.Schema:
    """Return the Arrow schema of the stored view table `table`.

    The schema has the columns of the view, and `shelf`, the group of rows that are stored in the same files.
    """
    comment = {"comment": "Group of rows that are stored in the same files."}
    return VIEW_ARROW[table].append(pa.field(SHELF, pa.int32(), nullable=False, metadata=comment))


def create_table(path: str, table: str, keep_h: float) -> DeltaTable:
    """Create an empty view table and return it.

    Args:
        path: The path of the new table. If there is a table, delta-rs raises DeltaError.
        table: The name of the view table.
        keep_h: For how many hours replaced files are kept for readers of older versions.
    """
    return DeltaTable.create(
        path,
        with_comments(table_schema(table), VIEW_ROWS[table], Position),
        mode="error",
        name=table,
        partition_by=[SHELF],
        configuration=table_properties(table, keep_h),
    )


def table_properties(table: str, keep_h: float) -> dict[str, str]:
    """Return the properties of the view table `table` for Delta. `keep_h` is as for `create_table`."""
    return {
        "delta.checkpointInterval": "100",
        # With tens of thousands of files in the log, each commit is slow.
        "delta.logRetentionDuration": "interval 1 hours",
        "delta.deletedFileRetentionDuration": f"interval {max(1, round(keep_h))} hours",
        "delta.dataSkippingStatsColumns": ",".join((*key_columns(table), "last_offset")),
    }


def open_table(path: str, table: str, keep_h: float) -> DeltaTable:
    """Open the view table at `path`, or create an empty one if it is missing.

    Args:
        path: The path or URI of the table.
        table: The name of the view table.
        keep_h: For how many hours a new table keeps replaced files.

    Raises:
        WrongViewTable: The table has other columns than this version writes.
    """
    try:
        found = DeltaTable(path)
    except TableNotFoundError:
        return create_table(path, table, keep_h)
    names = [field.name for field in found.schema().fields]
    if sorted(names) != sorted(table_schema(table).names):
        raise WrongViewTable(f"{path} has other columns than this version writes: run jobs/rebuild_views.py")
    return found


class ViewTable:
    """One view table, opened for writing. Not thread-safe, and only one object may write a table at a time.

    The constructor creates the table if it is missing, and brings the index of its keys to the table's version.

    Args:
        path: The path or URI of the table.
        table: The name of the view table.
        index: The folder of the index, on a local disk.
        keep_h: For how many hours a new table keeps replaced files.

    Attributes:
        name: The name of the view table.
        delta: The open Delta table.
        progress: The progress of all view tables, if this is `stream_entries`. Otherwise NO_PROGRESS.
    """

    def __init__(self, path: str, table: str, index: Path, keep_h: float = 24.0) -> None:
        self.name = table
        self.delta = open_table(path, table, keep_h)
        self._path = path
        self._writer = writer_of(self.delta)
        self._keys = key_columns(table)
        self._schema = table_schema(table)
        self._index = KeyIndex(index, path, table)
        self._index.bring_to(self.delta)
        self._sizes = _rows_by_shelf(self.delta)
        self._loose: Counter[int] = Counter()
        self._touched: set[int] = set()
        self.progress = read_progress(self.delta) if table == STREAM_ENTRIES else NO_PROGRESS

    def __len__(self) -> int:
        return self._sizes.total()

    def close(self) -> None:
        """Close the index, so that another object can open the table for writing."""
        self._index.close()

    def apply(self, changes: Mapping[Key, RowChange], progress: ViewProgress | None = None) -> bool:
        """Write the changes that are newer than the table's rows, and return whether there was a commit.

        All changes are written in one commit. A change whose offset is not above the row's `last_offset` is
        skipped, so the same changes applied again have no effect.

        Args:
            changes: The last change of each row, by key.
            progress: Recorded in the same commit, for `stream_entries` only. If no row changes, a commit with
                the progress alone is written. None: the progress stays the same.
        """
        known = self._index.held(self.delta, changes)
        fresh = {key: change for key, change in changes.items() if _is_news(known.get(key), change)}
        if not fresh:
            if progress is not None:
                self.note(progress)
            return progress is not None
        held = {key: known[key] for key in fresh if key in known}
        placed = self._place((key for key, change in fresh.items() if change.row is not None), held)
        source = self._source(fresh, placed)
        commit = self._commit(progress)
        if held:
            self._merge(source, {one.shelf for one in held.values()}, commit)
        else:
            self._append(source, commit)
        self._set_progress(progress)
        self._remember(fresh, placed, held)
        self._gather(placed.values())
        return True

    def note(self, progress: ViewProgress) -> None:
        """Record `progress` in a commit that changes no row. Call it only for the table `stream_entries`."""
        self.delta.create_write_transaction(
            [],
            mode="append",
            schema=self.delta.schema(),
            partition_by=[SHELF],
            commit_properties=self._commit(progress),
        )
        self._set_progress(progress)
        self.delta.update_incremental()
        self._index.advance(self.delta, {})

    def _commit(self, progress: ViewProgress | None = None) -> CommitProperties:
        """Return the properties of a commit. Each commit has the progress, so that the newest one has it.

        Raises Refused if another process has claimed the table since it was opened. Delta refuses the commit
        itself only if the table was not read again after the claim.
        """
        if (writer := writer_of(self.delta)) != self._writer:
            raise Refused(f"another process has taken over ({name_of(writer)})")
        its = self.progress if progress is None else progress
        properties = its.commit_properties() if self.name == STREAM_ENTRIES else CommitProperties()
        # A commit of another program may have written the same keys. Then delta-rs must not try again.
        properties.max_commit_retries = 0
        return properties

    def _set_progress(self, progress: ViewProgress | None) -> None:
        # Set only after the commit: after a failed write, commits of maintenance must have the old progress.
        if progress is not None:
            self.progress = progress

    def _place(self, keys: Iterable[Key], known: Mapping[Key, Held]) -> dict[Key, int]:
        """Return the shelf for each row to write. `known` has the rows that are stored."""
        current = max(self._sizes, default=0)
        size = self._sizes[current]
        placed = {}
        for key in keys:
            held = known.get(key)
            if held is None or held.shelf != current:
                if size >= SHELF_ROWS:
                    current, size = current + 1, 0
                size += 1
            placed[key] = current
        return placed

    def _source(self, fresh: Mapping[Key, RowChange], placed: Mapping[Key, int]) -> pa.Table:
        rows: list[dict[str, Any]] = []
        for key, change in fresh.items():
            position = {"partition": change.partition, "last_offset": change.offset, SHELF: placed.get(key)}
            named = dict(zip(self._keys, key, strict=True)) if change.row is None else change.row
            rows.append({**named, **position, "removed": change.row is None})
        # A removed row has only its key.
        fields = [field.with_nullable(True) for field in self._schema]
        return pa.Table.from_pylist(rows, pa.schema([*fields, pa.field("removed", pa.bool_())]))

    def _append(self, source: pa.Table, commit: CommitProperties) -> None:
        rows = source.drop_columns(["removed"]).cast(self._schema)
        write_deltalake(self.delta, rows, mode="append", commit_properties=commit)
        self.delta.update_incremental()

    def _merge(self, source: pa.Table, shelves: set[int], commit: CommitProperties) -> None:
        same = " AND ".join(f"t.{name} = s.{name}" for name in self._keys)
        where = f"t.{SHELF} IN ({', '.join(map(str, sorted(shelves)))})"
        columns = {name: f"s.{name}" for name in self._schema.names}
        merger = self.delta.merge(
            source,
            predicate=f"{where} AND {same}",
            source_alias="s",
            target_alias="t",
            commit_properties=commit,
        )
        if any(source["removed"].to_pylist()):
            merger = merger.when_matched_delete("s.removed AND s.last_offset > t.last_offset")
        merger = merger.when_matched_update(columns, "NOT s.removed AND s.last_offset > t.last_offset")
        merger.when_not_matched_insert(columns, "NOT s.removed").execute()

    def _remember(
        self, fresh: Mapping[Key, RowChange], placed: Mapping[Key, int], known: Mapping[Key, Held]
    ) -> None:
        for held in known.values():
            self._sizes[held.shelf] -= 1
            self._touched.add(held.shelf)
        self._sizes.update(placed.values())
        self._index.advance(
            self.delta,
            {key: Held(placed[key], one.offset) if key in placed else None for key, one in fresh.items()},
        )

    def _gather(self, touched: Iterable[int]) -> None:
        """Join the files of a shelf if it has many; each append adds one."""
        for shelf in set(touched):
            self._touched.add(shelf)
            self._loose[shelf] += 1
            if self._loose[shelf] >= _LOOSE_FILES:
                self.compact_shelf(shelf)

    def compact_shelf(self, shelf: int) -> None:
        """Join the data files of one shelf, a group of rows that are stored together, in one commit.

        No row is changed.
        """
        self._loose[shelf] = 0
        self.delta.optimize.compact(
            partition_filters=[(SHELF, "=", str(shelf))], commit_properties=self._commit()
        )
        self._index.bring_to(self.delta)

    def tidy(self, keep_h: float) -> None:
        """Compact the table, delete unused files, and shorten the Delta log. No row is changed.

        Small groups of rows (shelves) without changes since the last call are joined.

        Args:
            keep_h: Replaced files are deleted after this number of hours.
        """
        current = max(self._sizes, default=0)
        resting = [
            shelf
            for shelf, size in sorted(self._sizes.items())
            if shelf not in self._touched and shelf < current and 0 < size < _RESTING_ROWS // 2
        ]
        self._touched.clear()
        for group in _groups(resting, self._sizes):
            self._put_together(group)
        for shelf in [shelf for shelf, count in self._loose.items() if count > 1]:
            self.compact_shelf(shelf)
        self.delta.vacuum(
            retention_hours=round(keep_h),
            dry_run=False,
            enforce_retention_duration=False,
            full=True,
            commit_properties=self._commit(),
        )
        self.delta.update_incremental()
        self._index.bring_to(self.delta)
        self.delta.create_checkpoint()
        self.delta.cleanup_metadata()

    def _put_together(self, shelves: list[int]) -> None:
        """Move the rows of some shelves to the first of them, in one commit."""
        target = shelves[0]
        wanted = ", ".join(map(str, shelves))
        rows = dataset_of(self.delta).to_table(filter=pc.field(SHELF).isin(shelves))
        moved = rows.filter(pc.field(SHELF) != target).select([*self._keys, "last_offset"]).to_pylist()
        at = rows.schema.get_field_index(SHELF)
        rows = rows.set_column(at, SHELF, pa.array([target] * rows.num_rows, pa.int32()))
        write_deltalake(
            self.delta,
            rows.cast(self._schema),
            mode="overwrite",
            predicate=f"{SHELF} IN ({wanted})",
            commit_properties=self._commit(),
        )
        self.delta.update_incremental()
        for shelf in shelves[1:]:
            self._sizes[target] += self._sizes.pop(shelf)
        self._index.advance(
            self.delta,
            {tuple(row[name] for name in self._keys): Held(target, row["last_offset"]) for row in moved},
        )


def _is_news(held: Held | None, change: RowChange) -> bool:
    """Return whether a change is newer than the stored row. None: no row is stored."""
    return change.row is not None if held is None else held.offset < change.offset


def _rows_by_shelf(delta: DeltaTable) -> Counter[int]:
    """Count the rows of each shelf, by the statistics of the files."""
    files = pa.table(delta.get_add_actions(flatten=True))
    found: Counter[int] = Counter()
    for shelf, rows in zip(
        files[f"partition.{SHELF}"].to_pylist(), files["num_records"].to_pylist(), strict=True
    ):
        found[shelf] += rows
    return found


def _groups(shelves: Iterable[int], sizes: Mapping[int, int]) -> list[list[int]]:
    """Return groups of at least two neighbouring shelves that fit into one unchanged shelf."""
    groups: list[list[int]] = []
    filled = _RESTING_ROWS
    for shelf in shelves:
        if filled + sizes[shelf] > _RESTING_ROWS:
            groups.append([])
            filled = 0
        groups[-1].append(shelf)
        filled += sizes[shelf]
    return [group for group in groups if len(group) > 1]


def index_path(settings: Settings, table: str) -> Path:
    """Return the folder of the index of the view table `table`."""
    return settings.state_path / "views" / table


def rebuild_folders(settings: Settings) -> list[str]:
    """Return the names of the folders in which rebuilds of the views run or were killed."""
    found = table_storage(settings.tables_root).get_file_info(FileSelector("", allow_not_found=True))
    return [one.base_name for one in found if one.base_name.startswith(REBUILD)]


def are_complete(settings: Settings) -> bool:
    """Return whether all view tables exist, `stream_entries` has a progress, and no rebuild was killed."""
    if not all(is_table(settings.table_path(name)) for name in VIEW_TABLES) or rebuild_folders(settings):
        return False
    return read_progress(DeltaTable(settings.table_path(STREAM_ENTRIES))) != NO_PROGRESS


def open_tables(settings: Settings) -> dict[str, ViewTable]:
    """Open all view tables for writing, creating missing ones, and return them by name in the order of writing.

    Raises:
        WrongViewTable: A table has other columns than this version writes.
    """
    keep_h, path = settings.views.keep_old_files_h, settings.table_path
    return {name: ViewTable(path(name), name, index_path(settings, name), keep_h) for name in VIEW_TABLES}
