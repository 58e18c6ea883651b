"""The plan of a micro-batch: the end of the ledger and its latest commits. The driver gives it to tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from schemas.integrity.audit_chain import ChainEntry, FirstEntry, read_roots

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
