"""Reads all files of one version of the ledger for an audit, whatever the log says about their contents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from math import inf
from typing import Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import Schema
from deltalake.exceptions import DeltaError

from connectors.log.ledger_files.ledger_reader import open_ledger
from connectors.tools.audit.statistics_check import RowGroup, said_by_footer, said_by_log
from schemas.integrity.audit_chain import ChainLine, lines_in_log
from schemas.integrity.ledger_leaves import ENCODINGS
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.delta_files import dataset_of_files, table_storage
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import TrunklineError

_BATCH_ROWS: Final = 16_384
# Features of Delta with which readers see other rows or columns than those in the files.
_HIDING: Final = frozenset({"deletionVectors", "columnMapping"})


class LedgerPart(NamedTuple):
    """A part of the ledger's rows.

    Attributes:
        ranges: By partition, the first offset of the part and the offset after it. Infinity: no bound.
        others: Whether all rows of the partitions that are not named belong to the part, too.
    """

    ranges: Mapping[int, tuple[float, float]]
    others: bool

    def expression(self) -> ds.Expression | None:
        """Return an Arrow filter for the rows of this part. None means that all rows belong to it."""
        partition, offset = pc.field("partition"), pc.field("offset")
        if self.others and all(first == -inf and end == inf for first, end in self.ranges.values()):
            return None
        terms = [~partition.isin(list(self.ranges))] if self.others else []
        for number, (first, end) in self.ranges.items():
            term = partition == number
            if first > -inf:
                term &= offset >= pa.scalar(int(first), pa.int64())
            if end < inf:
                term &= offset < pa.scalar(int(end), pa.int64())
            terms.append(term)
        return reduce(lambda left, right: left | right, terms)

    def rows_of(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Return the rows of `batch` that belong to this part of the ledger; an empty list if none does."""
        expression = self.expression()
        if expression is None:
            return [batch] if batch.num_rows else []
        return [rows for rows in pa.table(batch).filter(expression).to_batches() if rows.num_rows]


class LedgerFiles:
    """The files of the ledger at its newest version.

    Attributes:
        version: The version of the ledger.
        table_id: The id of the Delta table.
        said: The statistics of each file in Delta's log, by the file's path below the table.
        paths: The paths of all files below the table, sorted.

    Raises:
        NotFound: There is no ledger.
        TrunklineError: The ledger or the statistics in its log cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        path = settings.table_path(LEDGER)
        self._table = open_ledger(path, "; set data_dir to where it is")
        self._storage = table_storage(path)
        self.version = int(self._table.version())
        self.table_id = str(self._table.metadata().id)
        try:
            actions = pa.table(self._table.get_add_actions(flatten=True))
            by_log = said_by_log(actions)
        except (DeltaError, pa.ArrowException, ValueError, OverflowError) as error:
            raise TrunklineError(f"the statistics in the log of {path} cannot be read: {error}") from error
        self.said = {unquote(name): said for name, said in by_log.items()}
        self.paths = sorted(unquote(name) for name in actions.column("path").to_pylist())

    def log_lines(self) -> list[ChainLine]:
        """Return the audit chain's entries that the ledger's Delta log still has, up to the opened version."""
        return [line for line in lines_in_log(self._storage).lines if line.version <= self.version]

    def hiding(self, encodings: Iterable[int]) -> list[str]:
        """Return a text for each setting of the table that lets readers see other data than the files have.

        A ledger that only Trunkline has written has no such setting, so the list is empty.

        Args:
            encodings: The numbers of the encodings in the table's audit chain (`Span.encoding`). If the table
                lacks a column that one of these encodings hashes, this is reported, too.
        """
        protocol, metadata = self._table.protocol(), self._table.metadata()
        features = set(protocol.reader_features or ()) & _HIDING
        if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
            features.add("columnMapping")
        found = [f"the table has {name} switched on" for name in sorted(features)]
        if metadata.partition_columns:
            found.append(f"the table takes {', '.join(metadata.partition_columns)} from its log")
        ours = {column.name: column.type for column in Schema.from_arrow(LEDGER_ARROW).fields}
        here = {column.name: column.type for column in self._table.schema().fields}
        needed = {name for encoding in encodings for name in ENCODINGS.get(encoding, ())}
        wrong = {name for name in here if here[name] != ours.get(name)} | needed - here.keys()
        if wrong:
            found.append(f"the table lacks columns of the ledger, or has others: {', '.join(sorted(wrong))}")
        return found

    def row_group_count(self, path: str) -> int:
        """Return how many row groups a Parquet file of the ledger has. `path` is one of `paths`.

        Raises:
            OSError: The file cannot be read. A damaged one may raise pyarrow.ArrowException.
        """
        return int(self._fragment(path).num_row_groups)

    def row_groups(self, path: str, part: LedgerPart) -> Iterator[RowGroup]:
        """Yield the row groups of a file that may have rows of `part`, chosen by the footer's statistics.

        A row group is yielded whole, also with rows of other parts.

        Args:
            path: The file's path below the table.
            part: The wanted rows.

        Raises:
            OSError: The file cannot be read. A damaged one may raise pyarrow.ArrowException or ValueError.
        """
        fragment = self._fragment(path)
        for group in fragment.split_by_row_group(part.expression(), schema=LEDGER_ARROW):
            number = group.row_groups[0].id
            scanner = group.scanner(
                schema=LEDGER_ARROW, batch_size=_BATCH_ROWS, batch_readahead=4, fragment_readahead=1
            )
            said = said_by_footer(fragment.metadata.row_group(number))
            yield RowGroup(number, fragment.num_row_groups, said, scanner)

    def _fragment(self, path: str) -> ds.ParquetFileFragment:
        files = dataset_of_files(self._storage, [path], LEDGER_ARROW)
        return next(iter(files.get_fragments()))
