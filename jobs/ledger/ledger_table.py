"""The ledger as a Delta table: creation, upgrade to this version's columns, data files and checkpoints.

Each Spark task writes its rows into one Parquet file. A file becomes part of the table with the commit that
names it (ledger_sink.py). A file of a failed task, or without a commit, is never read, and maintenance deletes
it. So only a file's name, statistics and Merkle roots pass through the JVM. Before that, rows passed through it
twice, and planning their 25 columns took a third of a micro-batch (decision 0012).
"""

from __future__ import annotations

import itertools
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError

from jobs.driver.programs import nobody_else_writes
from schemas.fold.settled import FOLD_VERSION
from schemas.integrity.audit_chain import partition_root, roots_text
from schemas.integrity.ledger_leaves import ENCODINGS, NEWEST_ENCODING, ledger_leaves
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import LEDGER_ARROW, with_comments
from schemas.tables.delta_files import table_storage
from schemas.tables.fold_version import FOLD_PROPERTY, version_of
from schemas.tables.ledger import LEDGER, LedgerRow

# Columns with statistics by which readers skip files. A stream has rows in most files, so it needs none.
SKIPPING_COLUMNS: Final = ("partition", "offset", "logged_at", "verdict")


class FileStatistics:
    """Statistics of one data file of the ledger, by which readers skip files.

    They are its number of rows, and the least and greatest value of the columns SKIPPING_COLUMNS, which are
    never null. Call `add` for each batch of rows, then `to_json`.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._bounds: dict[str, list[Any]] = {name: [] for name in SKIPPING_COLUMNS}

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the rows of `batch`, which must not be empty, and update the least and greatest values."""
        self._rows += batch.num_rows
        for name, bounds in self._bounds.items():
            found = pc.min_max(batch.column(name)).as_py()
            bounds += [found["min"], found["max"]]

    def to_json(self) -> str:
        """Return the statistics as JSON for Delta's log ("Per-file Statistics" of Delta's protocol).

        Delta's protocol wants times in whole milliseconds. Kafka's times are whole milliseconds, so nothing is
        lost.
        """
        return json.dumps(
            {
                "numRecords": self._rows,
                "minValues": {name: _plain(min(bounds)) for name, bounds in self._bounds.items()},
                "maxValues": {name: _plain(max(bounds)) for name, bounds in self._bounds.items()},
                "nullCount": dict.fromkeys(self._bounds, 0),
            }
        )


def _plain(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z"
    return value


def write_file(table: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write ledger rows into one new Parquet file, and yield one row that describes the file.

    The file is not part of the table until a commit names it.

    Args:
        table: The path or URI of the ledger. The file is written into this directory.
        batches: Ledger rows, with the columns LEDGER_ARROW. No batch is empty.

    Yields:
        A row with the columns of LEDGER_FILE: path, size, statistics and Merkle roots. No row and no file if
        there are no ledger rows.
    """
    rows = iter(batches)
    first = next(rows, None)
    if first is None:
        return
    name, storage = f"part-{uuid.uuid4()}.parquet", table_storage(table)
    statistics, roots = FileStatistics(), FileRoots()
    with (
        storage.open_output_stream(name) as stream,
        parquet.ParquetWriter(stream, LEDGER_ARROW, compression="snappy") as writer,
    ):
        for batch in itertools.chain([first], rows):
            statistics.add(batch)
            roots.add(batch)
            writer.write_batch(batch)
    size = storage.get_file_info(name).size
    row = {"path": name, "size": size, "statistics": statistics.to_json(), "roots": roots.to_json()}
    yield pa.RecordBatch.from_pylist([row])


class FileRoots:
    """The Merkle roots of one data file, one root for each Kafka partition.

    Add the file's batches of rows in order, then call `to_json`. A partition's rows of a micro-batch are all in
    one task, in the order of their offsets. Any other order is
    refused, because its root could not be checked later.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, list[bytes]] = {}
        self._offsets: dict[int, tuple[int, int]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Hash the rows of `batch`, which must not be empty and must follow the rows of earlier calls.

        Raises:
            ValueError: Rows of a partition are not in the order of their offsets.
        """
        partitions = batch.column("partition")
        present = pc.unique(partitions).to_pylist()
        for partition in present:
            rows = batch if len(present) == 1 else batch.filter(pc.equal(partitions, partition))
            offsets = rows.column("offset").to_numpy(zero_copy_only=False)
            first, before = self._offsets.get(partition, (int(offsets[0]), -1))
            if offsets[0] <= before or (np.diff(offsets) <= 0).any():
                raise ValueError(f"rows of partition {partition} are not in the order of their offsets")
            self._offsets[partition] = first, int(offsets[-1])
            self._leaves.setdefault(partition, []).extend(ledger_leaves(rows, ENCODINGS[NEWEST_ENCODING]))

    def to_json(self) -> str:
        """Return the Merkle root of each Kafka partition as JSON, for the column `roots` of LEDGER_FILE."""
        return roots_text(partition_root(p, self._offsets[p], leaves) for p, leaves in self._leaves.items())


# The least time for which replaced files are kept, because readers may have them open.
KEEP_AT_LEAST_H: Final = 1
EVERY_COMMITS: Final = 100


def keep_old_files_h(settings: Settings) -> int:
    """Return for how many hours replaced files of the tables are kept.

    It is the setting `views.keep_old_files_h`, rounded to whole hours, and at least 1.
    """
    return max(KEEP_AT_LEAST_H, round(settings.views.keep_old_files_h))


def create_ledger(settings: Settings) -> None:
    """Create an empty ledger unless there is one, because a Spark stream cannot read a missing table."""
    path = settings.table_path(LEDGER)
    if not DeltaTable.is_deltatable(path):
        columns = with_comments(LEDGER_ARROW, LedgerRow)
        DeltaTable.create(path, columns, mode="ignore", name=LEDGER, configuration=_properties(settings))


def prepare_ledger(settings: Settings, check: Callable[[], None] = nobody_else_writes) -> None:
    """Create the ledger, or add to an existing one the columns and table properties that it lacks.

    Call it only while no program appends: an append fails if the table's metadata changes meanwhile. `check`
    raises if this process may not write the tables any more.
    """
    create_ledger(settings)
    table = DeltaTable(settings.table_path(LEDGER))
    check()
    known = {field.name for field in table.schema().fields}
    columns = Schema.from_arrow(with_comments(LEDGER_ARROW, LedgerRow)).fields
    lacking = [field for field in columns if field.name not in known]
    if lacking:
        table.alter.add_columns(lacking)
    wanted = _properties(settings)
    if FOLD_PROPERTY not in table.metadata().configuration:
        wanted[FOLD_PROPERTY] = str(version_of(table) or FOLD_VERSION)
    if not wanted.items() <= table.metadata().configuration.items():
        table.alter.set_table_properties(wanted, raise_if_not_exists=False)


def _properties(settings: Settings) -> dict[str, str]:
    return {
        "delta.deletedFileRetentionDuration": f"interval {keep_old_files_h(settings)} hours",
        # With tens of thousands of files in the log's folder, each commit is slow.
        "delta.logRetentionDuration": "interval 1 hours",
        # LedgerCheckpoints writes the checkpoints, so that no micro-batch waits for them.
        "delta.checkpointInterval": "10000",
        # build_views reads the change data feed. Appends need no further files for it.
        "delta.enableChangeDataFeed": "true",
        "delta.dataSkippingStatsColumns": ",".join(SKIPPING_COLUMNS),
    }


class LedgerCheckpoints:
    """A writer of Delta checkpoints of the ledger's log, one after every 100 commits.

    A commit reads the part of the log after its newest checkpoint, so checkpoints must be recent (decision
    0012). They are written outside the settling query, so that no micro-batch waits for them. Pass `committed`
    to the settling query as `after_batch`, and call `write_if_due` regularly.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = settings.table_path(LEDGER)
        # The first checkpoint is written at once, because the number of commits since the last one is unknown.
        self._commits = EVERY_COMMITS

    def committed(self, batch_id: int) -> None:
        """Count one committed micro-batch for `write_if_due`. Its number, `batch_id`, is not used."""
        self._commits += 1

    def write_if_due(self) -> bool:
        """Write a Delta checkpoint of the ledger's log if 100 commits were counted since the last one.

        The first call of an object always tries. An error is printed to stderr, and the next attempt follows
        after another 100 commits.

        Returns:
            Whether this call wrote a checkpoint.
        """
        if self._commits < EVERY_COMMITS:
            return False
        self._commits = 0
        try:
            DeltaTable(self._path).create_checkpoint()
        except (DeltaError, OSError) as error:
            print(f"ledger_checkpoints: {type(error).__name__}: {error}", file=sys.stderr)
            return False
        return True
