"""Checks that the statistics in Delta's log and in the files' footers match the ledger's rows.

Readers skip files and row groups by their statistics, and some answer counts and bounds from them alone. So the
audit reads each row group as a whole, whatever its statistics are, and then compares. Older files have no
statistics; then every reader reads the rows, and that is no finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from connectors.tools.audit.chain_check import Fault, Finding
from schemas.tables.arrow_tables import LEDGER_ARROW

# The log's times are cut to milliseconds ("Per-file Statistics" in Delta's protocol).
_LOG_TIMES_LOSE_US: Final = 999


class Bounds(NamedTuple):
    """The number of nulls in a column, its least and its greatest value. None: the value is not known."""

    nulls: int | None
    least: Any
    greatest: Any


_NO_ROWS: Final = Bounds(0, None, None)


@dataclass
class Said:
    """Stored statistics of a file or a row group: the number of rows, and the bounds of columns.

    `rows` is None if it is not stored. Actual times may be greater than the bounds by `times_lose_us`
    microseconds.
    """

    rows: int | None
    bounds: dict[str, Bounds]
    times_lose_us: int = 0


@dataclass
class Seen:
    """Statistics that were counted from the rows: their number, and the bounds of the columns in `bounds`."""

    rows: int
    bounds: dict[str, Bounds]

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the rows of `batch` in these statistics, and widen the bounds."""
        self.rows += batch.num_rows
        for name in self.bounds:
            column = comparable(batch.column(name))
            found = pc.min_max(column).as_py()
            self._widen(name, Bounds(column.null_count, found["min"], found["max"]))

    def merge(self, other: Seen) -> None:
        """Add the statistics of another row group of the same file to these.

        `other` must have the same columns or more.
        """
        self.rows += other.rows
        for name in self.bounds:
            self._widen(name, other.bounds[name])

    def _widen(self, name: str, by: Bounds) -> None:
        known = self.bounds[name]
        least = [value for value in (known.least, by.least) if value is not None]
        greatest = [value for value in (known.greatest, by.greatest) if value is not None]
        nulls = (known.nulls or 0) + (by.nulls or 0)
        self.bounds[name] = Bounds(nulls, min(least, default=None), max(greatest, default=None))


class RowGroup(NamedTuple):
    """One row group of a Parquet file: its number, the file's number of row groups, statistics, and a scanner.

    `said` are the statistics in the file's footer. The scanner reads the rows.
    """

    number: int
    parts: int
    said: Said
    scanner: pa.dataset.Scanner


def comparable(column: pa.Array) -> pa.Array:
    """Return the column in the form in which statistics are compared: times as microseconds, texts as bytes."""
    if pa.types.is_timestamp(column.type):
        return column.cast(LEDGER_ARROW.field("logged_at").type).cast(pa.int64())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.binary())
    return column


def said_by_footer(metadata: parquet.RowGroupMetaData) -> Said:
    """Return the statistics that a Parquet file's footer has of one row group, for the ledger's columns."""
    bounds = {}
    for number in range(metadata.num_columns):
        column = metadata.column(number)
        statistics = column.statistics if column.path_in_schema in LEDGER_ARROW.names else None
        if statistics is not None:
            nulls = statistics.null_count if statistics.has_null_count else None
            ends = (statistics.min_raw, statistics.max_raw) if statistics.has_min_max else (None, None)
            bounds[column.path_in_schema] = Bounds(nulls, *ends)
    return Said(metadata.num_rows, bounds)


def said_by_log(actions: pa.Table) -> dict[str, Said]:
    """Return the statistics that Delta's log has of each file, by the file's path in the log.

    `actions` is the result of `get_add_actions(flatten=True)` of the open ledger (a DeltaTable), as an Arrow
    table.
    """
    columns = {name: actions.column(name) for name in actions.column_names}
    names = [name for name in LEDGER_ARROW.names if f"null_count.{name}" in columns or f"min.{name}" in columns]
    rows = columns["num_records"].to_pylist()

    def values(kind: str, name: str) -> list[Any]:
        column = columns.get(f"{kind}.{name}")
        return [None] * len(rows) if column is None else comparable(column).to_pylist()

    kinds = ("null_count", "min", "max")
    known = {name: list(zip(*(values(kind, name) for kind in kinds), strict=True)) for name in names}
    return {
        path: Said(rows[at], {name: Bounds(*known[name][at]) for name in names}, _LOG_TIMES_LOSE_US)
        for at, path in enumerate(columns["path"].to_pylist())
    }


def contradiction(said: Said, seen: Seen) -> str | None:
    """Return a text about the first difference between stored and counted statistics, or None if they agree.

    The numbers of rows and nulls, and the bounds of numbers, must be equal. Writers shorten the bounds of texts
    and times, so there all values must be within the bounds. Statistics that are not stored agree with any
    rows.
    """
    if said.rows is not None and said.rows != seen.rows:
        return f"{said.rows} rows, and there are {seen.rows}"
    for name, bounds in said.bounds.items():
        there = seen.bounds[name]
        if bounds.nulls is not None and bounds.nulls != there.nulls:
            return f"{bounds.nulls} rows without {name}, and there are {there.nulls}"
        if there.least is not None and not _fits(name, bounds, there, said.times_lose_us):
            return f"another least or greatest {name}"
    return None


def _fits(name: str, said: Bounds, there: Bounds, times_lose_us: int) -> bool:
    if any(end is not None and type(end) is not type(there.least) for end in (said.least, said.greatest)):
        return False
    kind = LEDGER_ARROW.field(name).type
    if pa.types.is_integer(kind):
        return said.least in (None, there.least) and said.greatest in (None, there.greatest)
    greatest = said.greatest
    if pa.types.is_timestamp(kind) and greatest is not None:
        greatest += times_lose_us
    is_below = said.least is None or said.least <= there.least
    return is_below and (greatest is None or greatest >= there.greatest)


class StatisticsCheck:
    """A check of the stored statistics that runs while the ledger's rows are read.

    Read the rows by `watched`, call `end` for each file, then read the results.

    Args:
        by_log: The statistics of each file in Delta's log, by its path below the table.

    Attributes:
        rows: The number of rows in all row groups.
        findings: The contradictions, at most one for each file.
    """

    def __init__(self, by_log: dict[str, Said]) -> None:
        self.rows = 0
        self.findings: list[Finding] = []
        self._by_log = by_log
        self._done: dict[str, set[int]] = {}
        self._files: dict[str, Seen] = {}
        self._told: set[str] = set()

    def watched(self, path: str, group: RowGroup) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a row group. At its end, compare them with the row group's statistics.

        When all row groups of a file were read, the file's statistics are compared, too. Contradictions are
        added to `findings`. A row group that was read before is only yielded again.

        Args:
            path: The file's path below the table.
            group: The row group, as `LedgerFiles.row_groups` yields it.

        Raises:
            OSError: The file cannot be read. Damaged files raise pyarrow.ArrowException or ValueError, too.
        """
        done = self._done.setdefault(path, set())
        if group.number in done:
            yield from group.scanner.to_batches()
            return
        in_log = self._by_log[path]
        seen = Seen(0, dict.fromkeys(group.said.bounds.keys() | in_log.bounds.keys(), _NO_ROWS))
        for batch in group.scanner.to_batches():
            seen.add(batch)
            yield batch
        done.add(group.number)
        self.rows += seen.rows
        if wrong := contradiction(group.said, seen):
            self._tell(path, f"its footer says of row group {group.number}: {wrong}")
        whole = self._files.setdefault(path, Seen(0, dict.fromkeys(in_log.bounds, _NO_ROWS)))
        whole.merge(seen)
        if len(done) == group.parts:
            del self._files[path]
            if wrong := contradiction(in_log, whole):
                self._tell(path, f"the log says of it: {wrong}")

    def end(self, path: str, row_groups: int) -> None:
        """Add a finding if some row groups of a file were never read. Call it after all reads.

        Readers skip row groups by the footer's statistics. So a false footer could hide rows.

        Args:
            path: The file's path below the table.
            row_groups: The number of row groups in the file.
        """
        if len(self._done.get(path, ())) < row_groups:
            self._tell(path, "its footer keeps row groups from readers that ask for offsets")

    def _tell(self, path: str, text: str) -> None:
        if path not in self._told:
            self._told.add(path)
            text = f"a file is not what is said of it: {path}: {text}"
            self.findings.append(Finding(Fault.HIDDEN_ROWS, text))
