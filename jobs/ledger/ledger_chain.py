"""The audit chain's entry for each commit of the settling query, and the plan of each micro-batch.

The plan is the end of the ledger and its latest commits. The driver gives it to tasks.

Reads: the ledger's log and the chain file, once at a start.
Guarantees: the chain has one entry for each commit of a micro-batch, in order, also after a crash or a new
start. Each is bound to the entry before. This requires a single settling job for each ledger.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

import msgspec
from deltalake import DeltaTable
from pyarrow.fs import FileSystem

from jobs.views.view_changes import ends_of
from schemas.integrity.audit_anchors import chain_file
from schemas.integrity.audit_chain import (
    ChainEntry,
    ChainLine,
    FirstEntry,
    PartitionRoot,
    has_commit,
    last_in_file,
    line_in_commit,
    lines_from_end,
    lines_in_log,
    newest_entry,
    next_entry,
    read_roots,
)
from schemas.settings.settings import Settings
from schemas.tables.delta_files import table_storage
from schemas.tables.ledger import LEDGER
from trunkline_agent.errors import Refused, TrunklineError

# A task that has not seen its partition for so many commits reads the tables instead.
_STEPS_KEPT: Final = 16
PLAN_PROPERTY: Final = "trunkline.plan"


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The end of a partition in the ledger: the next offset, and the chain's value of its last commit."""

    offset: int = 0
    chain: str = ""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A commit with rows of a partition: the ends before and after it, and the data file with the rows."""

    before: Place
    after: Place
    path: str


class BatchPlan(msgspec.Struct, frozen=True, array_like=True):
    """The ledger as it is when a micro-batch begins.

    Attributes:
        table: the id of the Delta table `ledger`.
        version: the newest version of the ledger.
        places: for each partition the end of the ledger. A partition without rows is absent.
        steps: for each partition its latest commits, oldest first.
    """

    table: str
    version: int
    places: dict[int, Place]
    steps: dict[int, list[Step]]

    def text(self) -> str:
        """Return the plan as JSON, for the tasks."""
        return msgspec.json.encode(self).decode()


read_plan: Final = msgspec.json.Decoder(BatchPlan).decode


class PlanKeeper:
    """Makes the plan of each micro-batch from the commits before it. Not thread-safe."""

    def __init__(self, head: ChainEntry | FirstEntry, places: dict[int, Place]) -> None:
        self._table = head.table
        self._places = places
        self._steps: dict[int, deque[Step]] = {}

    def plan(self, version: int) -> BatchPlan:
        """Return the plan for a micro-batch that begins when the ledger has the version `version`."""
        steps = {partition: list(kept) for partition, kept in self._steps.items()}
        return BatchPlan(self._table, version, dict(self._places), steps)

    def committed(self, entry: ChainEntry, files: Iterable[tuple[str, str]]) -> None:
        """Note a commit: its entry of the audit chain, and for each file the path and the Merkle roots."""
        value = entry.value()
        for path, roots in files:
            for root in read_roots([roots]):
                before = self._places.get(root.partition, Place())
                after = Place(root.last + 1, value)
                self._places[root.partition] = after
                kept = self._steps.setdefault(root.partition, deque(maxlen=_STEPS_KEPT))
                kept.append(Step(before, after, path))


# The number of commits among which the last one of each partition is looked for.
_LOOK_BACK: Final = 20_000


class LedgerChain:
    """The newest entry of the ledger's audit chain, from which the next commit's entry is made.

    Each start of the settling query makes a new object, which reads the chain from disk. Not thread-safe.

    Attributes:
        head: The newest entry, or the start of a chain without entries.

    Raises:
        Refused: The chain is ahead of the ledger, for example because an old copy of the ledger was put back.
    """

    def __init__(self, settings: Settings) -> None:
        path = settings.table_path(LEDGER)
        table = DeltaTable(path)
        table_id = str(table.metadata().id)
        self._file = chain_file(settings, table_id)
        known = last_in_file(self._file)
        storage = table_storage(path)
        if known is not None and not _is_of(known, table.version(), storage):
            raise Refused(
                f"the audit chain {self._file} knows version {known.version} of the ledger, which is another "
                "one or ends before: put the newer ledger back, or the chain file that belongs to this one"
            )
        # After an hour, entries may be in the chain file alone.
        self._lines = lines_in_log(storage, -1 if known is None else known.version).lines
        found = newest_entry(None if known is None else known.entry, self._lines)
        # A ledger may be older than its chain, which then starts at the ledger's end.
        self.head: ChainEntry | FirstEntry = found or FirstEntry(table_id, ends_of(table))

    @property
    def ends(self) -> dict[int, int]:
        """The first offset of each partition that is not in the ledger. Partitions without rows are absent."""
        return self.head.start if isinstance(self.head, FirstEntry) else self.head.ends

    def places(self) -> dict[int, Place]:
        """Return for each partition the ledger's end, with the chain's value of the last commit of its rows.

        The value is empty if none of the chain's last 20,000 entries has the partition. A partition without
        rows is absent.
        """
        values: dict[int, str] = {}
        lines = itertools.chain(reversed(self._lines), lines_from_end(self._file))
        for line in itertools.islice(lines, _LOOK_BACK):
            for root in line.entry.partitions:
                values.setdefault(root.partition, line.value)
            if len(values) == len(self.ends):
                break
        return {partition: Place(end, values.get(partition, "")) for partition, end in self.ends.items()}

    def entry(self, query: str, batch: int, roots: Iterable[str]) -> ChainEntry:
        """Return the audit chain's entry for the ledger's next commit.

        Call `committed` with it after the commit.

        Args:
            query: The id of the query.
            batch: The number of the micro-batch.
            roots: The Merkle roots of the micro-batch's files, as `FileRoots.to_json` returned them.

        Raises:
            TrunklineError: The micro-batch begins before the ledger's end, or two files have a partition.
        """
        ends = self.ends
        texts = list(roots)
        found = read_roots(texts)
        times = Counter(root.partition for root in found)
        twice = [root for root in found if times[root.partition] > 1]
        if twice:
            raise TrunklineError(
                f"micro-batch {batch} brings {_names(twice)} in several files: one task must settle a partition"
            )
        wrong = [root for root in found if root.first < ends.get(root.partition, 0)]
        if wrong:
            raise TrunklineError(
                f"micro-batch {batch} brings {_names(wrong)}; the ledger ends before {ends}: another settling "
                "job has written to it"
            )
        return next_entry(self.head, query, batch, texts)

    def committed(self, entry: ChainEntry) -> None:
        """Make `entry` the newest one of the audit chain, after its commit to the ledger has succeeded."""
        self.head = entry


def _is_of(known: ChainLine, version: int, storage: FileSystem) -> bool:
    """Return whether the ledger, whose newest version is `version`, can be the one of a chain with this end."""
    if known.version > version:
        return False
    return not has_commit(storage, known.version) or line_in_commit(storage, known.version) == known


def _names(roots: Iterable[PartitionRoot]) -> str:
    return ", ".join(f"offsets {root.first} to {root.last} of partition {root.partition}" for root in roots)
