"""Micro-batches without Spark and Kafka: what driver and tasks do is called as Spark calls it."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql import Row

from jobs.ledger.audit_trail import AuditTrail
from jobs.ledger.ledger_chain import BatchPlan
from jobs.ledger.ledger_table import prepare_ledger, write_file
from jobs.settling.fold_run import RECORD_COLUMNS, SEPARATOR
from jobs.settling.ledger_sink import LedgerSink
from jobs.settling.partition_task import PartitionStates, StageSettings, settle_partition
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.streams.fold import STREAM_ENTRIES
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import LEDGER, LedgerRow
from schemas.wire.record import STANDARD_HEADERS, Record
from tests.raw_records import Raw

_COLUMNS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("usual_headers", pa.binary()),
        ("odd_headers", pa.string()),
    ]
)


def records_of(raws: Iterable[Raw], partition: int = 0, first: int = 0) -> list[Record]:
    """Kafka's records of what was appended to one partition, a millisecond apart."""
    return [
        Record(
            "trunk.events",
            partition,
            first + number,
            1_790_000_000_000_000 + (first + number) * 1000,
            raw.key,
            raw.value,
            tuple(str(name) for name, _ in raw.headers),
            tuple(value for _, value in raw.headers),
        )
        for number, raw in enumerate(raws)
    ]


def spark_batch(records: Sequence[Record]) -> pa.RecordBatch:
    """The records as Spark hands them to a task."""
    rows = [(*_headers(one), one) for one in records]
    cells = [
        (r.topic, r.partition, r.offset, r.logged_at_us, r.key, r.value, usual, odd) for usual, odd, r in rows
    ]
    columns = zip(*cells, strict=True) if cells else [()] * len(RECORD_COLUMNS)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _COLUMNS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_COLUMNS)


def _headers(record: Record) -> tuple[bytes | None, str | None]:
    values = record.header_values
    is_usual = record.header_names == STANDARD_HEADERS and all(
        v is not None and SEPARATOR not in v for v in values
    )
    if is_usual:
        return SEPARATOR.join(value for value in values if value is not None), None
    pairs = zip(record.header_names, values, strict=True)
    odd = [
        {"key": name, **({} if value is None else {"value": b64encode(value).decode()})}
        for name, value in pairs
    ]
    return None, json.dumps(odd) if odd else None


class MicroBatches:
    """A settling query over one ledger. `host` names the machine whose local stores a micro-batch uses."""

    def __init__(self, settings: Settings, keyring: Keyring) -> None:
        self.settings, self.keyring = settings, keyring
        prepare_ledger(settings)
        self._states: dict[str, PartitionStates] = {}
        self.restart()

    def restart(self) -> None:
        """A new start of the query."""
        self.sink = LedgerSink(self.settings)
        self.sink.started("the query")
        self.number = 0

    def at(self, host: str) -> StageSettings:
        """The settings of a task on a machine."""
        return StageSettings(
            ledger=self.settings.table_path(LEDGER),
            stream_entries=self.settings.table_path(STREAM_ENTRIES),
            stores=self.stores(host),
            epoch=1,
            key_file=self.settings.key_file,
        )

    def stores(self, host: str) -> Path:
        """The folder of a machine's local stores."""
        return self.settings.state_path / host

    def plan(self) -> BatchPlan:
        """The plan of the next micro-batch."""
        return self.sink.next_plan()

    def settle(
        self, records: Sequence[Record], host: str = "one", plan: BatchPlan | None = None
    ) -> list[LedgerRow]:
        """Settle records of one partition on a machine, and commit nothing."""
        batches = [spark_batch(records)]
        return settle_partition(
            self._states_of(host), plan or self.plan(), records[0].partition, batches, self.keyring
        )

    def bring_forward(self, host: str = "one", partition: int = 0) -> BatchPlan:
        """Bring a store to the ledger's end, as a task does, and return the plan of a task after that."""
        plan = self.plan()
        with self._states_of(host).at_end(plan, partition):
            return msgspec.structs.replace(plan, steps={})

    def _states_of(self, host: str) -> PartitionStates:
        return self._states.setdefault(host, PartitionStates(self.at(host)))

    def files_of(self, rows: Sequence[LedgerRow]) -> list[Row]:
        """The data file with these rows."""
        written = write_file(self.settings.table_path(LEDGER), [ledger_batch(rows)])
        return [Row(**file) for batch in written for file in batch.to_pylist()]

    def run(self, records: Sequence[Record], host: str = "one") -> list[LedgerRow]:
        """One whole micro-batch with records of one partition."""
        rows = self.settle(records, host)
        self.commit(rows)
        return rows

    def commit(self, rows: Sequence[LedgerRow]) -> None:
        """Commit the rows of a micro-batch."""
        self.sink.commit(self.files_of(rows), self.number)
        self.number += 1

    def forget_stores(self) -> None:
        """Close all local stores, as when the worker processes end."""
        for states in self._states.values():
            for store in states._opened.values():
                store.close()
        self._states.clear()

    def keep(self) -> None:
        """Write the chain file, as the driver's thread does."""
        AuditTrail(self.settings).follow()
