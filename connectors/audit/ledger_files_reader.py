"""Reads the ledger as an auditor must: every file of one version, whatever the log says about what is in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from math import inf
from typing import Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError

from connectors.audit.statistics_check import RowGroup, said_by_footer, said_by_log
from schemas.errors import NotFound, TrunklineError
from schemas.integrity.audit_chain import LogPart, lines_in_log
from schemas.integrity.ledger_leaves import ENCODINGS
from schemas.settings.settings import Settings
from schemas.tables.delta_files import dataset_of_files, table_storage
from schemas.tables.ledger import LEDGER
from schemas.tables.ledger_arrow import LEDGER_ARROW

_BATCH_ROWS: Final = 16_384
# What makes readers see something else than what stands in the files: rows taken out, columns renamed.
_HIDING: Final = frozenset({"deletionVectors", "columnMapping"})


class LedgerPart(NamedTuple):
    """Which rows: of each partition those from an offset to before another; with `others` all rows of the
    partitions that are not named as well.
    """

    ranges: Mapping[int, tuple[float, float]]
    others: bool

    def expression(self) -> ds.Expression | None:
        """As a filter; None for all rows there are."""
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
        """Those rows of `batch`."""
        expression = self.expression()
        if expression is None:
            return [batch] if batch.num_rows else []
        return [rows for rows in pa.table(batch).filter(expression).to_batches() if rows.num_rows]


class LedgerFiles:
    """The ledger at its newest version. Raises NotFound when there is none, TrunklineError."""

    def __init__(self, settings: Settings) -> None:
        path = settings.table_path(LEDGER)
        try:
            self._table = DeltaTable(path)
        except TableNotFoundError:
            raise NotFound(f"there is no ledger at {path}; set data_dir to where it is") from None
        except DeltaError as error:
            raise TrunklineError(f"the ledger at {path} cannot be read: {error}") from error
        self._storage = table_storage(path)
        self.version = int(self._table.version())
        self.table_id = str(self._table.metadata().id)
        try:
            actions = pa.table(self._table.get_add_actions(flatten=True))
            by_log = said_by_log(actions)
        except (DeltaError, pa.ArrowException, ValueError, OverflowError) as error:
            raise TrunklineError(f"what the log of {path} says of its files cannot be read: {error}") from error
        # What the log says of each file, by its path below the table.
        self.said = {unquote(name): said for name, said in by_log.items()}
        self.paths = sorted(unquote(name) for name in actions.column("path").to_pylist())

    def log(self) -> LogPart:
        """The entries of the audit chain in the commits up to this version that the log still has."""
        found = lines_in_log(self._storage)
        return found._replace(lines=[line for line in found.lines if line.version <= self.version])

    def hiding(self, encodings: Iterable[int]) -> list[str]:
        """What in the table makes its readers see something else than what stands in its files: nothing, in a
        ledger that we have made. `encodings`: those of its chain, whose columns it must have.
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
            found.append(f"the table has no such columns as we make, or others: {', '.join(sorted(wrong))}")
        return found

    def row_group_count(self, path: str) -> int:
        """How many row groups a file has. Raises OSError, pyarrow.ArrowException."""
        return int(self._fragment(path).num_row_groups)

    def row_groups(self, path: str, part: LedgerPart) -> Iterator[RowGroup]:
        """Those of a file that may have rows of `part`, each with all its rows, in no particular order. Raises
        OSError, pyarrow.ArrowException, ValueError.
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
