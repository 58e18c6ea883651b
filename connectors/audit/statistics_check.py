"""Whether what is said of rows is so: the log of each file, a file's footer of each of its row groups.

Readers skip files and row groups by it, and some answer counts and bounds from it alone. So each row group is
read as a whole, whatever is said of it, and then compared. Where nothing is said, as in files from before there
were statistics, everybody reads the rows, and that is no finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from connectors.audit.findings import HIDDEN_ROWS, Finding
from schemas.tables.ledger_arrow import LEDGER_ARROW

# The log's times are cut to milliseconds ("Per-file Statistics" in Delta's protocol).
_LOG_TIMES_LOSE_US: Final = 999


class Bounds(NamedTuple):
    """How many nulls a column has, its least and its greatest value; None where it is not known."""

    nulls: int | None
    least: Any
    greatest: Any


@dataclass
class Said:
    """What is said of some rows: how many they are, and the bounds of columns. Times may be greater than that
    by `times_lose_us`.
    """

    rows: int | None
    bounds: dict[str, Bounds]
    times_lose_us: int = 0


@dataclass
class Seen:
    """What is so."""

    rows: int = 0
    bounds: dict[str, Bounds] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch, names: list[str]) -> None:
        """Count in the rows of `batch`, and these columns of it."""
        self.rows += batch.num_rows
        for name in names:
            column = comparable(batch.column(name))
            found = pc.min_max(column).as_py()
            self._widen(name, Bounds(column.null_count, found["min"], found["max"]))

    def merge(self, other: Seen, names: list[str]) -> None:
        """Count in what was seen of another row group."""
        self.rows += other.rows
        for name in names:
            self._widen(name, other.bounds[name])

    def _widen(self, name: str, by: Bounds) -> None:
        known = self.bounds.get(name, Bounds(0, None, None))
        least = [value for value in (known.least, by.least) if value is not None]
        greatest = [value for value in (known.greatest, by.greatest) if value is not None]
        nulls = (known.nulls or 0) + (by.nulls or 0)
        self.bounds[name] = Bounds(nulls, min(least, default=None), max(greatest, default=None))


class RowGroup(NamedTuple):
    """The part `number` of the `parts` of a file: what the footer says of it, and how to read its rows."""

    number: int
    parts: int
    said: Said
    scanner: pa.dataset.Scanner


def comparable(column: pa.Array) -> pa.Array:
    """A column in the form in which it is compared: times as microseconds, texts as bytes."""
    if pa.types.is_timestamp(column.type):
        return column.cast(LEDGER_ARROW.field("logged_at").type).cast(pa.int64())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.binary())
    return column


def said_by_footer(metadata: parquet.RowGroupMetaData) -> Said:
    """What a file's footer says of one of its row groups."""
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
    """What the log says of each file, by the path in it; `actions`: as delta-rs shows them, flattened."""
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
    """In what they differ. How many rows and nulls, and the bounds of numbers, must be equal; of texts and
    times, which writers cut, all values must lie within.
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
    return (said.least is None or said.least <= there.least) and (
        greatest is None or greatest >= there.greatest
    )


class StatisticsCheck:
    """Looks on while rows are read; then `findings`, at most one a file, and `rows`: how many there are."""

    def __init__(self, by_log: dict[str, Said]) -> None:
        self.rows = 0
        self.findings: list[Finding] = []
        self._by_log = by_log
        self._done: dict[str, set[int]] = {}
        self._files: dict[str, Seen] = {}
        self._told: set[str] = set()

    def watched(self, path: str, group: RowGroup) -> Iterator[pa.RecordBatch]:
        """All rows of a row group. Raises OSError, pyarrow.ArrowException, ValueError."""
        done = self._done.setdefault(path, set())
        if group.number in done:
            yield from group.scanner.to_batches()
            return
        in_log = self._by_log[path]
        names, seen = sorted(group.said.bounds.keys() | in_log.bounds.keys()), Seen()
        for batch in group.scanner.to_batches():
            seen.add(batch, names)
            yield batch
        done.add(group.number)
        self.rows += seen.rows
        if wrong := contradiction(group.said, _with_none(seen, names)):
            self._tell(path, f"its footer says of row group {group.number}: {wrong}")
        whole = self._files.setdefault(path, Seen())
        whole.merge(seen, list(in_log.bounds))
        if len(done) == group.parts:
            del self._files[path]
            if wrong := contradiction(in_log, whole):
                self._tell(path, f"the log says of it: {wrong}")

    def end(self, path: str, row_groups: int) -> None:
        """Of a file that has so many row groups all is read that its footer has let through."""
        if len(self._done.get(path, ())) < row_groups:
            self._tell(path, "its footer keeps row groups from readers that ask for offsets")

    def _tell(self, path: str, text: str) -> None:
        if path not in self._told:
            self._told.add(path)
            self.findings.append(Finding(HIDDEN_ROWS, f"a file is not what is said of it: {path}: {text}"))


def _with_none(seen: Seen, names: list[str]) -> Seen:
    """The same of a row group that has given no batch at all."""
    return seen if seen.bounds else Seen(seen.rows, dict.fromkeys(names, Bounds(0, None, None)))
