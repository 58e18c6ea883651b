"""The Spark task that settles whole Kafka partitions: records in, one data file of the ledger out.

The task folds the records over the state in the local store of each partition. The store stays as it is: the
next task of the partition brings it forward, when the file is committed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from jobs.ledger.batch_plan import PLAN_PROPERTY, BatchPlan, Place, read_plan
from jobs.ledger.ledger_files import write_file
from jobs.settling.fold_run import check_order, no_collection, settle_run
from jobs.settling.partition_state import PartitionStates, StageSettings
from jobs.spark.kafka_columns import RECORD_COLUMNS, records_of
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring
from schemas.state_store.local_store import StoreDamaged
from schemas.state_store.partition_store import Snapshot
from schemas.streams.control.record_macs import macs_stream
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import LedgerRow
from schemas.wire.record import Record
from trunkline_agent.wire.ids import parse_stream_key

ROWS_AT_ONCE = 20_000
# More entries than such a stream ever has.
_FEW = 100
KeyringSource = Callable[[Path], Keyring]
"""Returns the master keys in a file. Each worker process calls it once, so that no key is part of a task."""


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
