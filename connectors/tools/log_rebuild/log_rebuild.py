"""Rebuilds the Kafka log from the ledger, after Kafka has lost all or the last of its records.

Every record gets the partition, offset, time, key, headers and value that it had, as far as the ledger has
them. So it folds to the same row. First the records that are still in the topic are compared, and no change is
made if one differs. Written records are read back and compared, too. After an interruption, the next run
continues from the topic's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from connectors.tools.log_rebuild import rebuilt_topic
from connectors.tools.log_rebuild.ledger_log_reader import LedgerLog, LedgerRecord
from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings
from schemas.streams.control.control_fold import CONTROL_TOPOLOGY, TOPOLOGY_STREAM, Topology
from schemas.streams.control.record_macs import macs_required_records
from schemas.wire.record import Record, partition_for
from trunkline_agent.errors import Refused

COMPARED, WRITTEN = "compared", "written"
Progress = Callable[[str, int, int], None]
_KEPT: Final = (
    "Nothing was changed. A log that holds other records is not replaced: save what it holds, delete the topic "
    "by Kafka's own tools (kafka-topics --delete), then run this again"
)
_READ_BACK: Final = (
    "It was written by this run, so another program has written to the topic meanwhile, or Kafka changes "
    "records. Stop the program, delete the topic (kafka-topics --delete), then run this again"
)


@dataclass
class RebuildPlan:
    """The findings and the steps of a rebuild.

    Attributes:
        version: The version of the ledger.
        records: The number of records in the ledger.
        bytes: The size of their values.
        ledger: The ledger's ends by partition: the first offset that it lacks.
        log: The topic's ends by partition; empty if there is no topic.
        planned: The ends up to which Spark had planned to settle the log, by partition; None if unknown.
        replaces_topology: Whether the topic has only a new topology record, and is deleted first.
        is_rebuilding: Whether an earlier rebuild of the topic was interrupted.
        missing: The offsets to write, by partition: the first one and the one after the last.
        lost: The offsets that Spark has planned but neither ledger nor log have, in the same form.
    """

    version: int
    records: int
    bytes: int
    ledger: dict[int, int]
    log: dict[int, int]
    planned: dict[int, int] | None
    replaces_topology: bool
    is_rebuilding: bool
    missing: dict[int, tuple[int, int]] = field(init=False)
    lost: dict[int, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        """Compute the ranges."""
        found = {} if self.replaces_topology else self.log
        self.missing = {n: (found.get(n, 0), end) for n, end in self.ledger.items() if found.get(n, 0) < end}
        known = {n: max(end, found.get(n, 0)) for n, end in self.ledger.items()}
        self.lost = {
            n: (known.get(n, found.get(n, 0)), end)
            for n, end in sorted((self.planned or {}).items())
            if end > known.get(n, found.get(n, 0))
        }

    @property
    def to_write(self) -> int:
        """The number of records that the rebuild has to write into the topic."""
        return sum(end - first for first, end in self.missing.values())


@dataclass(frozen=True)
class Rebuilt:
    """The result of a rebuild.

    Attributes:
        written: The number of written records.
        seconds: How long the rebuild took.
    """

    written: int
    seconds: float


class LogRebuild:
    """One rebuild of the topic. First call `plan`, which reads and compares, then `run`, which writes.

    The caller makes sure that no other program writes to the topic.

    Args:
        settings: The settings of Kafka and the tables.
        keyring: The master keys that unseal masked values.
        progress: Called from time to time with COMPARED or WRITTEN, the number of records done, and their
            total.
    """

    def __init__(self, settings: Settings, keyring: Keyring, progress: Progress) -> None:
        self._settings = settings
        self._kafka = settings.kafka
        self._keyring = keyring
        self._progress = progress

    def plan(self) -> RebuildPlan:
        """Compare the topic with the ledger and return the steps of the rebuild. Nothing is changed.

        Raises:
            Refused: The ledger is of another topology, has gaps, or is sealed under a missing master key. Or
                the topic has records that differ from the ledger, or no longer has its first record.
            NotFound: There is no ledger, or it has no rows.
            BackboneUnreachable: Kafka does not answer.
        """
        ledger = self._ledger = LedgerLog(self._settings, self._keyring)
        self._check_topology(ledger)
        state = rebuilt_topic.topic_state(self._kafka)
        replaces = state is not None and self._has_first_records_alone(ledger, state)
        if state is not None and not replaces:
            self._compare(ledger, state)
        return RebuildPlan(
            ledger.version,
            ledger.count,
            ledger.bytes,
            ledger.ends,
            {} if state is None else state.ends,
            planned_ends(self._settings),
            replaces,
            state is not None and state.is_rebuilding,
        )

    def run(self, plan: RebuildPlan) -> Rebuilt:
        """Write the missing records into the topic, compare them, and return what was done.

        If that is interrupted, the topic stays marked as unfinished, and no other program of Trunkline uses it.
        `plan` and `run` of a new LogRebuild then continue from the topic's end.

        Args:
            plan: The result of `plan` of this object.

        Raises:
            BackboneUnreachable: Kafka is unreachable.
            Refused: Another program has written to the topic meanwhile.
            TrunklineError: A ledger row cannot be used.
        """
        began = time.monotonic()
        if plan.replaces_topology:
            rebuilt_topic.delete_topic(self._kafka)
        if plan.replaces_topology or not plan.log:
            rebuilt_topic.make_topic(self._kafka)
        elif plan.missing and not plan.is_rebuilding:
            rebuilt_topic.begin_rebuilding(self._kafka)
        written = 0
        if plan.missing:
            with rebuilt_topic.TopicWriter(self._kafka) as writer:
                for partition, (first, end) in plan.missing.items():
                    for window in self._ledger.windows(partition, first, end):
                        writer.append([one.record for one in window])
                        self._compare_window(partition, window, _READ_BACK)
                        written += len(window)
                        self._progress(WRITTEN, written, plan.to_write)
        if plan.missing or plan.is_rebuilding:
            rebuilt_topic.end_rebuilding(self._kafka)
        check_topic(self._settings)
        return Rebuilt(written, time.monotonic() - began)

    def _check_topology(self, ledger: LedgerLog) -> None:
        """Check that the ledger has the partitions and the epoch of the settings. Raises Refused."""
        where = partition_for(TOPOLOGY_STREAM.encode(), self._kafka.partitions)
        beyond = [number for number in ledger.ends if number >= self._kafka.partitions]
        first = next((window[0].record for window in ledger.windows(where, 0, 1)), None)
        said = None if first is None or beyond else _topology(first)
        wanted = (self._kafka.partitions, self._kafka.epoch)
        if said != wanted:
            what = "does not begin with its topology" if said is None else f"has partitions and epoch {said}"
            raise Refused(
                f"the ledger at {ledger.path} {what}, the settings say partitions={wanted[0]} and "
                f"epoch={wanted[1]}: set both to what they were. Nothing was changed"
            )

    def _has_first_records_alone(self, ledger: LedgerLog, state: rebuilt_topic.TopicState) -> bool:
        """Return whether the topic has only the records with which each new topic begins.

        That is so after a first start that did not know of the ledger. The records have the content that the
        settings give them, and another time than those in the ledger.
        """
        where = partition_for(TOPOLOGY_STREAM.encode(), self._kafka.partitions)
        is_cut = any(state.begins.values())
        if is_cut or any(end > 1 + (number == where) for number, end in state.ends.items()):
            return False
        kafka = self._kafka
        topology = Topology(partitions=kafka.partitions, epoch=kafka.epoch).record(
            door="stack", principal="operator"
        )
        first = {(one.key, one.value) for one in (topology, *macs_required_records(kafka.partitions))}
        for number, end in state.ends.items():
            with closing(rebuilt_topic.records(kafka, number, 0, end)) as found:
                records = list(found)
            if not first >= {(record.key, record.value) for record in records}:
                return False
            if number == where and (not records or next(ledger.windows(where, 0, 1))[0].is_same(records[0])):
                return False
        return True

    def _compare(self, ledger: LedgerLog, state: rebuilt_topic.TopicState) -> None:
        """Compare the records in the topic with the ledger. Raises Refused if one differs."""
        cut = [f"{n} (at {first})" for n, first in state.begins.items() if first]
        if cut:
            raise Refused(
                f"topic {self._kafka.topic!r} no longer has its first records, in partition {', '.join(cut)}. "
                f"{_KEPT}"
            )
        ends = {n: min(end, ledger.ends.get(n, 0)) for n, end in state.ends.items()}
        compared, total = 0, sum(ends.values())
        for partition, end in ends.items():
            for window in ledger.windows(partition, 0, end):
                self._compare_window(partition, window, _KEPT)
                compared += len(window)
                self._progress(COMPARED, compared, total)

    def _compare_window(self, partition: int, window: list[LedgerRecord], advice: str) -> None:
        first, end = window[0].record.offset, window[-1].record.offset + 1
        with closing(rebuilt_topic.records(self._kafka, partition, first, end)) as found:
            for mine in window:
                theirs = next(found, None)
                if theirs is None or not mine.is_same(theirs):
                    raise Refused(
                        f"the record at offset {mine.record.offset} of partition {partition} of topic "
                        f"{self._kafka.topic!r} is not the one that the ledger has there: "
                        f"{_difference(mine.record, theirs)}. {advice}"
                    )


def _topology(record: Record) -> tuple[int, int] | None:
    """Return partitions and epoch of a topology record; None for another record."""
    headers: Mapping[str, Any] = dict(zip(record.header_names, record.header_values, strict=True))
    try:
        body = orjson.loads(record.value or b"")
        found = int(body["partitions"]), int(body["epoch"])
    except (ValueError, KeyError, TypeError):
        return None
    is_topology = record.key == TOPOLOGY_STREAM.encode() and headers.get("ce_type") == CONTROL_TOPOLOGY.encode()
    return found if is_topology else None


def _difference(mine: Record, theirs: Record | None) -> str:
    if theirs is None:
        return "there is no record"
    if theirs.offset != mine.offset:
        return f"there is no record, the next is at {theirs.offset}"
    names = ("key", "value", "logged_at_us", "header_names", "header_values")
    return f"another {', '.join(name for name in names if getattr(mine, name) != getattr(theirs, name))}"


def planned_ends(settings: Settings) -> dict[int, int] | None:
    """Return the offsets up to which Spark had planned to settle the log, by partition.

    Spark only plans records that exist, so the log once had all records before these offsets. None means that
    the checkpoint of Spark's last run is missing, or that its newest plan cannot be read.
    """
    offsets = settings.state_path / "checkpoint" / "offsets"
    batches = [file for file in offsets.glob("*") if file.name.isdigit()]
    if not batches:
        return None
    newest = max(batches, key=lambda file: int(file.name))
    try:
        # Spark's offset log has its version, the settings of the micro-batch, and a line for each source.
        source = orjson.loads(newest.read_text(encoding="utf-8").splitlines()[2])
        return {int(number): int(end) for number, end in source[settings.kafka.topic].items()}
    except (OSError, ValueError, LookupError, AttributeError):
        return None
