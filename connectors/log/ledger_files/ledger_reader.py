"""Reads the Delta table `ledger` without Spark: all rows, the newest ones, or those of each new commit.

To read all rows takes one version of the table. `follow` reads the `add` actions (dataChange) of each new
commit in `_delta_log`, on an object store through deltalake's own storage layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import reduce
from math import inf
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow.fs import FileSystem, FileType

from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.delta_files import dataset_of, dataset_of_files, table_storage
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import NotFound, TrunklineError

POLL_S: Final = 0.05
_NO_TABLE_POLL_S: Final = 0.25
_GAP_CHECK_POLLS: Final = 100
_FILES_AT_ONCE: Final = 4
_ORDER: Final = [("logged_at", "ascending"), ("partition", "ascending"), ("offset", "ascending")]
# A statistic of each file. Spark cuts times in them to milliseconds.
_NEWEST_ROW: Final = "max.logged_at"
_STATISTICS_STEP_US: Final = 1000
_MOMENT: Final = LEDGER_ARROW.field("logged_at").type
_ORDER_COLUMNS: Final = tuple(name for name, _ in _ORDER)


class LedgerPart(NamedTuple):
    """Some rows of the ledger.

    Attributes:
        version: The version of the table at which the rows were read, or whose commit added them.
        rows: The rows as an Arrow table.
    """

    version: int
    rows: pa.Table


@dataclass(frozen=True)
class LedgerFilter:
    """A condition on ledger rows: each given column must have this value; None matches any value.

    Attributes:
        since: Kafka's time of the row must be this one or later. It needs a time zone.
    """

    stream_kind: str | None = None
    stream_id: str | None = None
    verdict: str | None = None
    reason: str | None = None
    door: str | None = None
    type: str | None = None
    partition: int | None = None
    offset: int | None = None
    since: datetime | None = None

    def expression(self) -> pc.Expression | None:
        """Return the condition as an Arrow expression. None means that it matches every row."""
        terms = [
            pc.field(field.name) == pa.scalar(wanted, LEDGER_ARROW.field(field.name).type)
            for field in fields(self)
            if field.name != "since" and (wanted := getattr(self, field.name)) is not None
        ]
        if self.since is not None:
            terms.append(pc.field("logged_at") >= pa.scalar(self.since, _MOMENT))
        return reduce(lambda left, right: left & right, terms) if terms else None


ALL_ROWS: Final = LedgerFilter()


def open_ledger(path: str, advice: str) -> DeltaTable:
    """Open the Delta table `ledger` at its newest version.

    Args:
        path: The path or URI of the table.
        advice: The end of the error's message if there is no ledger.

    Raises:
        NotFound: There is no ledger.
        TrunklineError: The ledger cannot be read.
    """
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        raise NotFound(f"there is no ledger at {path}{advice}") from None
    except DeltaError as error:
        raise TrunklineError(f"the ledger at {path} cannot be read: {error}") from error


class LedgerReader:
    """A reader of the ledger that the settings name. It keeps no file open between calls.

    Attributes:
        path: The path or URI of the ledger.
    """

    def __init__(self, settings: Settings) -> None:
        self.path = settings.table_path(LEDGER)

    def exists(self) -> bool:
        """Return whether there is a ledger: it appears with the first settled record."""
        return bool(DeltaTable.is_deltatable(self.path))

    def version(self) -> int | None:
        """Return the ledger's newest version, or None while there is no ledger."""
        return self._open().version() if self.exists() else None

    def rows(self, where: LedgerFilter = ALL_ROWS, columns: Sequence[str] | None = None) -> LedgerPart:
        """Return all rows that match `where`, sorted by Kafka's time, partition and offset.

        Args:
            where: The condition.
            columns: The columns to return. None: all columns.

        Raises:
            NotFound: There is no ledger.
        """
        table = self._open()
        found = dataset_of(table).to_table(filter=where.expression(), columns=_with_order(columns))
        return LedgerPart(table.version(), _selected(found.sort_by(_ORDER), columns))

    def newest_rows(
        self,
        count: int,
        where: LedgerFilter = ALL_ROWS,
        columns: Sequence[str] | None = None,
        *,
        bytes_most: int | None = None,
    ) -> LedgerPart:
        """Return the newest `count` rows that match `where`, oldest first; fewer if there are fewer.

        Files with newer rows, by their statistics, are read first. Reading ends when no other file can have a
        newer row.

        Args:
            count: The number of rows.
            where: The condition.
            columns: The columns to return, with `value` if there is a limit of bytes. None: all columns.
            bytes_most: The largest number of bytes of their values. One row is returned in any case. None: no
                limit.

        Raises:
            NotFound: There is no ledger.
        """
        table = self._open()
        files, at_once = _newest_first(table), _FILES_AT_ONCE
        storage, newest = table_storage(self.path), _empty(columns)
        while files and count > 0 and (newest.num_rows < count or _oldest_us(newest) < files[0].before_us):
            paths = [file.path for file in files[:at_once]]
            found = pa.concat_tables([newest, _read(storage, paths, where, columns)]).sort_by(_ORDER)
            newest = found.slice(max(0, found.num_rows - count))
            if bytes_most is not None and (fitting := _fitting(newest, bytes_most)) < newest.num_rows:
                newest, count = newest.slice(newest.num_rows - fitting), fitting
            files, at_once = files[at_once:], at_once * 2
        return LedgerPart(table.version(), _selected(newest, columns))

    def follow(
        self,
        after_version: int | None = None,
        where: LedgerFilter = ALL_ROWS,
        columns: Sequence[str] | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
        poll_s: float = POLL_S,
    ) -> Iterator[LedgerPart]:
        """Yield the rows that each new commit adds, as soon as the commit exists, until `stop` returns True.

        Each yielded LedgerPart has the rows of one commit. Commits without matching rows are skipped. If there
        is no ledger yet, the iterator waits for it.

        Args:
            after_version: Start after this version. None: start with the next commit. -1: start with the first
                one.
            where: The condition on the rows.
            columns: The columns to return. None: all columns.
            stop: Called at least every `poll_s` seconds; the iterator ends when it returns True.
            poll_s: The pause between looks at the table's log, in seconds.

        Raises:
            TrunklineError: The next commits, or their files, were removed.
        """
        found = self.version() if after_version is None else after_version
        version = -1 if found is None else found
        while not self.exists():
            if stop():
                return
            time.sleep(max(poll_s, _NO_TABLE_POLL_S))
        storage, empty_polls = table_storage(self.path), 0
        while not stop():
            paths = _added_files(storage, version + 1)
            if paths is None:
                empty_polls += 1
                if empty_polls % _GAP_CHECK_POLLS == 1:
                    self._check_gap(storage, version + 1)
                time.sleep(poll_s)
                continue
            version, empty_polls = version + 1, 0
            rows = _read(storage, paths, where, columns)
            if rows.num_rows:
                yield LedgerPart(version, _selected(rows.sort_by(_ORDER), columns))

    def _open(self) -> DeltaTable:
        return open_ledger(
            self.path,
            " yet: it appears with the first settled event. Start the stack with 'trunkline up'; or set "
            "data_dir or storage.tables to where it is",
        )

    def _check_gap(self, storage: FileSystem, version: int) -> None:
        newest = self._open().version()
        # Check again: the commit may have appeared since the poll.
        if newest >= version and _added_files(storage, version) is None:
            raise TrunklineError(
                f"commit {version} of the ledger is not in its log any more (the newest is {newest}): "
                "read the table whole and follow from there"
            )


class _File(NamedTuple):
    """A data file, and a moment in microseconds before which all its rows were logged."""

    path: str
    before_us: float


def _newest_first(table: DeltaTable) -> list[_File]:
    """Return the table's files, newest row first. A compaction writes old rows into new files."""
    actions = pa.table(table.get_add_actions(flatten=True))
    paths = [unquote(path) for path in actions.column("path").to_pylist()]
    newest: list[int | None] = [None] * len(paths)
    if _NEWEST_ROW in actions.column_names:
        newest = actions.column(_NEWEST_ROW).cast(_MOMENT).cast(pa.int64()).to_pylist()
    # A file without statistics may have any rows.
    bounds = [inf if moment is None else moment + _STATISTICS_STEP_US for moment in newest]
    return sorted(map(_File, paths, bounds), key=lambda file: file.before_us, reverse=True)


def _fitting(rows: pa.Table, bytes_most: int) -> int:
    """Return how many of the last rows have values of at most so many bytes together, at least one."""
    sizes = pc.fill_null(pc.binary_length(rows.column("value")), 0).to_pylist()
    number = 0
    for size in reversed(sizes):
        bytes_most -= size
        if number and bytes_most < 0:
            break
        number += 1
    return number


def _oldest_us(rows: pa.Table) -> int:
    """Return when the first of the ordered rows was logged."""
    found: int = rows.column("logged_at")[0].cast(pa.int64()).as_py()
    return found


def _added_files(storage: FileSystem, version: int) -> list[str] | None:
    """Return the files that commit `version` adds for new rows, or None while there is no such commit."""
    path = f"_delta_log/{version:020d}.json"
    if storage.get_file_info([path])[0].type != FileType.File:
        return None
    with storage.open_input_stream(path) as stream:
        actions: list[dict[str, Any]] = [orjson.loads(line) for line in stream.read().splitlines() if line]
    adds = [action["add"] for action in actions if "add" in action]
    return [unquote(add["path"]) for add in adds if add["dataChange"]]


def _read(
    storage: FileSystem, paths: list[str], where: LedgerFilter, columns: Sequence[str] | None
) -> pa.Table:
    if not paths:
        return _empty(columns)
    try:
        files = dataset_of_files(storage, paths, LEDGER_ARROW)
        return files.to_table(filter=where.expression(), columns=_with_order(columns))
    except FileNotFoundError as error:
        raise TrunklineError(
            f"a file of the ledger is gone since its commit, by compaction and cleaning: {error}; "
            "read the table whole and follow from there"
        ) from error


def _empty(columns: Sequence[str] | None) -> pa.Table:
    return LEDGER_ARROW.empty_table().select(_with_order(columns) or LEDGER_ARROW.names)


def _with_order(columns: Sequence[str] | None) -> list[str] | None:
    return None if columns is None else list(dict.fromkeys((*columns, *_ORDER_COLUMNS)))


def _selected(table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
    return table if columns is None else table.select(list(columns))
