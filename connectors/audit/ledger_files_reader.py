"""Reads the ledger as an auditor must: every file of one version, whatever the log says about what is in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from math import inf
from typing import Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from schemas.audit_chain import LogPart, lines_in_log
from schemas.delta_files import table_storage
from schemas.errors import NotFound, TrunklineError
from schemas.ledger import LEDGER
from schemas.ledger_arrow import LEDGER_ARROW
from schemas.settings import Settings

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
        actions = pa.table(self._table.get_add_actions(flatten=True))
        self.paths = sorted(unquote(found) for found in actions.column("path").to_pylist())

    def log(self) -> LogPart:
        """The entries of the audit chain in the commits up to this version that the log still has."""
        found = lines_in_log(self._storage)
        return found._replace(lines=[line for line in found.lines if line.version <= self.version])

    def hiding_features(self) -> list[str]:
        """What the table has switched on that hides or renames what stands in its files. We never do."""
        protocol, configured = self._table.protocol(), self._table.metadata().configuration
        found = set(protocol.reader_features or ()) & _HIDING
        if configured.get("delta.columnMapping.mode", "none") != "none":
            found.add("columnMapping")
        return sorted(found)

    def row_count(self, path: str) -> int:
        """How many rows a file has, by its own footer. Raises OSError, pyarrow.ArrowInvalid."""
        return int(self._dataset(path).count_rows())

    def batches(self, path: str, part: LedgerPart) -> Iterator[pa.RecordBatch]:
        """A file's rows that belong to `part`, in no particular order. Raises OSError, pyarrow.ArrowInvalid."""
        yield from (
            self._dataset(path)
            .scanner(
                filter=part.expression(),
                batch_size=_BATCH_ROWS,
                batch_readahead=4,
                fragment_readahead=1,
            )
            .to_batches()
        )

    def _dataset(self, path: str) -> ds.Dataset:
        return ds.dataset([path], schema=LEDGER_ARROW, format="parquet", filesystem=self._storage)
