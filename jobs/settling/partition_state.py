"""Brings the local store of a partition to the end of the ledger, from committed data alone.

A store that lags a few commits behind gets the changes in the data files of these commits. Any other store is
loaded from the tables: `stream_entries`, and the rows of the ledger after it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from jobs.ledger.batch_plan import BatchPlan, Place
from schemas.fold.settled import FOLD_VERSION
from schemas.state_store.local_store import StoreMoved
from schemas.state_store.partition_store import EntryChange, PartitionStore, Position, Snapshot
from schemas.tables.arrow_tables import LEDGER_ARROW
from schemas.tables.delta_files import dataset_of, dataset_of_files, table_storage
from schemas.tables.view_progress import read_progress
from trunkline_agent.errors import TrunklineError

_OF_ENTRIES: Final = ("stream_kind", "stream_id", "entry", "value")
_OF_LEDGER: Final = ("partition", "offset", "stream_kind", "stream_id", "entries")


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


def position_at(at: StageSettings, table: str, place: Place) -> Position:
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
        found, wanted = store.position(), position_at(self._at, plan.table, place)
        for step in steps:
            if found != wanted and found == position_at(self._at, plan.table, step.before):
                after = position_at(self._at, plan.table, step.after)
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
