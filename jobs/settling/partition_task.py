"""The Spark task that settles whole Kafka partitions: records in, one data file of the ledger out.

The task folds the records over the state in the local store of each partition. The store stays as it is: the
next task of the partition brings it forward to the end of the ledger, from committed data alone.

A store that lags a few commits behind gets the changes in the data files of these commits. Any other store is
loaded from the tables: `stream_entries`, and the rows of the ledger after it.
"""

from __future__ import annotations

import functools
import gc
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark import TaskContext
from pyspark.sql.types import LongType, StringType, StructField, StructType

from jobs.ledger.ledger_chain import PLAN_PROPERTY, BatchPlan, Place, read_plan
from jobs.ledger.ledger_table import write_file
from jobs.settling.fold_run import RECORD_COLUMNS, check_order, no_collection, records_of, settle_run
from schemas.fold.entries import Entries
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import Keyring
from schemas.state_store.local_store import StoreDamaged, StoreMoved
from schemas.state_store.partition_store import EntryChange, PartitionStore, Position, Snapshot
from schemas.streams.control.record_macs import macs_stream
from schemas.tables.arrow_tables import LEDGER_ARROW, ledger_batch
from schemas.tables.delta_files import dataset_of, dataset_of_files, table_storage
from schemas.tables.ledger import LedgerRow
from schemas.tables.view_progress import read_progress
from schemas.wire.record import Record
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import parse_stream_key

_OF_ENTRIES: Final = ("stream_kind", "stream_id", "entry", "value")
_OF_LEDGER: Final = ("partition", "offset", "stream_kind", "stream_id", "entries")
# A data file of the ledger before its commit: path below the table, size in bytes, Delta's statistics as JSON,
# and the Merkle roots of its rows (schemas/integrity/audit_chain.py).
LEDGER_FILE: Final = StructType(
    [
        StructField(name, LongType() if name == "size" else StringType(), nullable=False)
        for name in ("path", "size", "statistics", "roots")
    ]
)
ROWS_AT_ONCE = 20_000
# More entries than such a stream ever has.
_FEW = 100
KeyringSource = Callable[[Path], Keyring]
"""Returns the master keys in a file. Each worker process calls it once, so that no key is part of a task."""


class StageSettings(msgspec.Struct, frozen=True):
    """The settings that a task needs. They contain no secret, because Spark stores them with the query.

    Attributes:
        ledger: The path or URI of the ledger.
        stream_entries: The path or URI of the table `stream_entries`.
        stores: The folder of the local stores, on each machine that runs tasks.
        epoch: The epoch of the topic.
        key_file: The path of the file with the master keys.
    """

    ledger: str
    stream_entries: str
    stores: Path
    epoch: int
    key_file: Path


def _position_at(at: StageSettings, table: str, place: Place) -> Position:
    """Return the position of a store that has the state of the ledger `table` at `place`."""
    return Position(table, at.epoch, FOLD_VERSION, place.offset, place.chain)


class PartitionStates:
    """The local stores of the partitions that this process has settled, each opened once. Not thread-safe.

    Args:
        at: The settings.
    """

    def __init__(self, at: StageSettings) -> None:
        self._at = at
        self._opened: dict[int, PartitionStore] = {}

    @contextmanager
    def at_end(self, plan: BatchPlan, partition: int) -> Iterator[Snapshot]:
        """Read the partition's store at the ledger's end in `plan`, for the length of the block.

        Raises:
            StoreDamaged: The store must be discarded. It is then made again from the tables.
            StoreMoved: The plan is an old one, or another process changes the store at the same time.
            TrunklineError: The tables do not have the state at the ledger's end.
        """
        store = self._store(partition)
        place, steps = plan.places.get(partition, Place()), plan.steps.get(partition, [])
        found, wanted = store.position(), _position_at(self._at, plan.table, place)
        for step in steps:
            if found != wanted and found == _position_at(self._at, plan.table, step.before):
                after = _position_at(self._at, plan.table, step.after)
                try:
                    store.advance(found, after, self._changes_in(step.path, partition))
                except FileNotFoundError:
                    # Maintenance has put the file's rows into another one, and deleted it hours later.
                    break
                found = after
        if found != wanted:
            self._load(store, found, wanted, plan, partition)
        with store.snapshot() as snapshot:
            if snapshot.position != wanted:
                raise StoreMoved(f"partition {partition}: another process changes the state store")
            yield snapshot

    def _load(
        self, store: PartitionStore, found: Position | None, wanted: Position, plan: BatchPlan, partition: int
    ) -> None:
        """Load the store from the tables. Raises StoreMoved if the plan is an old one."""
        # At the start of a query, a store may be of a ledger that an older copy has replaced. Later, only a
        # task that comes too late finds a store beyond its plan.
        if plan.steps.get(partition) and found is not None and _is_beyond(found, wanted):
            raise StoreMoved(f"partition {partition}: the state store is at {found}, the task comes too late")
        place = plan.places.get(partition, Place())
        store.load(found, wanted, self._from_tables(plan, partition, place))

    def discard(self, partition: int) -> None:
        """Delete the partition's store. It is made again when it is needed."""
        store = self._opened.pop(partition, None)
        if store is not None:
            store.close()
        shutil.rmtree(self._folder(partition), ignore_errors=True)

    def _folder(self, partition: int) -> Path:
        return self._at.stores / f"partition-{partition:05d}"

    def _store(self, partition: int) -> PartitionStore:
        """Return the partition's store, opened again if its file is another one or has become shorter."""
        known = self._opened.get(partition)
        if known is not None:
            if known.is_whole():
                return known
            known.close()
            del self._opened[partition]
        store = self._opened[partition] = PartitionStore(self._folder(partition))
        return store

    def _changes_in(self, path: str, partition: int) -> Iterator[EntryChange]:
        """Yield the changes of a partition's entries in one data file of the ledger, in order."""
        # A file has row groups of one partition each. The filter skips those of the others.
        is_changed = (pc.field("partition") == partition) & pc.field("entries").is_valid()
        file = dataset_of_files(table_storage(self._at.ledger), [path], LEDGER_ARROW)
        yield from _changes(file.to_table(columns=list(_OF_LEDGER), filter=is_changed))

    def _from_tables(self, plan: BatchPlan, partition: int, place: Place) -> Iterator[EntryChange]:
        """Yield a partition's entries as of a place in the ledger: a snapshot, and the changes after it."""
        first = 0
        if DeltaTable.is_deltatable(self._at.stream_entries):
            table = DeltaTable(self._at.stream_entries)
            first = read_progress(table).offsets.get(partition, 0)
            if first > place.offset:
                raise TrunklineError(
                    f"the views have seen partition {partition} up to offset {first - 1}, the ledger ends at "
                    f"{place.offset - 1}: build the views anew (jobs/rebuild_views.py), then start again"
                )
            yield from _entries_of(table, partition)
        if first < place.offset:
            ledger = dataset_of(DeltaTable(self._at.ledger, version=plan.version))
            offset = pc.field("offset")
            is_later = (offset >= first) & (offset < place.offset) & pc.field("entries").is_valid()
            rows = ledger.to_table(
                columns=list(_OF_LEDGER), filter=(pc.field("partition") == partition) & is_later
            )
            yield from _changes(rows.sort_by("offset"))


def _is_beyond(found: Position, wanted: Position) -> bool:
    return (
        found.offset > wanted.offset
        and msgspec.structs.replace(found, offset=wanted.offset, chain=wanted.chain) == wanted
    )


def _entries_of(table: DeltaTable, partition: int) -> Iterator[EntryChange]:
    wanted = pc.field("partition") == partition
    for batch in dataset_of(table).to_batches(columns=list(_OF_ENTRIES), filter=wanted):
        columns = (batch.column(name).to_pylist() for name in _OF_ENTRIES)
        for kind, name, entry, value in zip(*columns, strict=True):
            yield f"{kind}/{name}", entry, value


def _changes(rows: pa.Table) -> Iterator[EntryChange]:
    columns = (rows[name].to_pylist() for name in ("stream_kind", "stream_id", "entries"))
    for kind, name, entries in zip(*columns, strict=True):
        for entry, value in entries:
            yield f"{kind}/{name}", entry, value


def settle_partitions(
    at: StageSettings, keyring_source: KeyringSource, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Settle the Kafka records of a task, and write their ledger rows into one new data file.

    Spark's `mapInArrow` calls this function once in each task.

    Args:
        at: The settings.
        keyring_source: A function of a module, which returns the master keys.
        batches: The records of one or more whole Kafka partitions, with the columns RECORD_COLUMNS.

    Yields:
        A row with the columns of LEDGER_FILE. No row and no file if there are no records.

    Raises:
        OrderError: The records do not follow the ledger's end.
        StoreMoved: Another process changes the same store.
    """
    by_partition = _by_partition(batches)
    if not by_partition:
        return
    context = TaskContext.get()
    assert context is not None  # noqa: S101  for the type checker: Spark runs this function
    plan = read_plan(context.getLocalProperty(PLAN_PROPERTY) or "")
    states, keyring = _states(at), _keyring(keyring_source, at.key_file)
    rows = (
        ledger_batch(settled[start : start + ROWS_AT_ONCE])
        for partition, records in sorted(by_partition.items())
        for settled in [settle_partition(states, plan, partition, records, keyring)]
        for start in range(0, len(settled), ROWS_AT_ONCE)
    )
    # The collector would scan the many rows of a task again and again, and they have no cycles.
    with no_collection():
        yield from write_file(at.ledger, rows)
    keep_modules()


def settle_partition(
    states: PartitionStates,
    plan: BatchPlan,
    partition: int,
    batches: list[pa.RecordBatch],
    keyring: Keyring,
) -> list[LedgerRow]:
    """Settle the records of one partition in a micro-batch, and return their ledger rows. No store changes.

    Args:
        states: The local stores.
        plan: The end of the ledger.
        partition: The Kafka partition.
        batches: Its records in the order of offsets, with the columns RECORD_COLUMNS.
        keyring: The master keys.

    Raises:
        OrderError: The records do not follow the ledger's end.
        StoreMoved: Another process changes the store.
    """
    records = [record for batch in batches for record in records_of(batch)]
    check_order(records, plan.places.get(partition, Place()).offset)

    def over_store() -> list[LedgerRow]:
        with states.at_end(plan, partition) as snapshot:
            return settle_over(snapshot, partition, records, keyring)

    try:
        return over_store()
    except StoreDamaged:
        states.discard(partition)
        return over_store()


def settle_over(snapshot: Snapshot, partition: int, records: list[Record], keyring: Keyring) -> list[LedgerRow]:
    """Settle the records of one partition over the state in its store, and return their ledger rows."""
    stream = macs_stream(partition)
    macs_key = stream.encode("ascii")

    def open_stream(key: bytes | None) -> Entries:
        return _in_memory(snapshot, stream) if key == macs_key else opened(snapshot, key)

    return settle_run(records, open_stream, keyring, macs_key)


def opened(snapshot: Snapshot, key: bytes | None) -> Entries:
    """Return the state of a stream by the key of its records. A key that names no stream has none."""
    if key is None or parse_stream_key(key) is None:
        return Entries()
    return Entries(source=snapshot.stream(key.decode("ascii")))


def _in_memory(snapshot: Snapshot, stream: str) -> Entries:
    """Return the state of a stream with few entries, which stays right when its changes were taken."""
    stored = snapshot.stream(stream)
    found = {key: stored.get(key) for key in stored.keys("", "", _FEW)}
    return Entries({key: value for key, value in found.items() if value is not None})


def _by_partition(batches: Iterable[pa.RecordBatch]) -> dict[int, list[pa.RecordBatch]]:
    found: dict[int, list[pa.RecordBatch]] = {}
    for batch in batches:
        partitions = batch.column("partition")
        present = pc.unique(partitions).to_pylist()
        for partition in present:
            rows = batch if len(present) == 1 else batch.filter(pc.equal(partitions, partition))
            found.setdefault(partition, []).append(rows.select(list(RECORD_COLUMNS)))
    return found


# A worker process settles many micro-batches of one query.
@functools.cache
def _states(at: StageSettings) -> PartitionStates:
    return PartitionStates(at)


@functools.cache
def _keyring(source: KeyringSource, key_file: Path) -> Keyring:
    return source(key_file)


@functools.cache
def keep_modules() -> None:
    """Exclude the objects that this process has now from garbage collection. A second call does nothing.

    Later objects are collected as usual. The excluded ones are mostly modules that a task has imported.
    pyspark.daemon calls `gc.collect()` at the end of each task. With pyarrow, pandas and the models in memory,
    that takes 100 ms and more in each worker of a micro-batch, and frees almost no memory.
    """
    gc.collect()
    gc.freeze()
