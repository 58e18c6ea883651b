"""A ledger and its views, settled without Kafka and Spark."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from deltalake import DeltaTable, write_deltalake

from jobs import refold
from jobs.settling.fold_run import settle_run
from jobs.views.view_changes import CHANGE_COLUMNS, changes_of, key_columns
from jobs.views.view_tables import open_tables
from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring, ensure_keyring
from schemas.settings.settings import Settings
from schemas.streams.fold import STREAM_ENTRIES, VIEW_TABLES
from schemas.tables.arrow_tables import VIEW_ARROW, ledger_batch
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import ViewProgress
from schemas.wire.record import OutgoingRecord, Record

PARTITIONS = 3
FIRST_MOMENT_US = 1_790_000_000_000_000


class Backbone:
    """A ledger and its views, made without Kafka and Spark: the records of a run are settled batch by batch."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data_dir=folder)
        self.keyring: Keyring = ensure_keyring(self.settings)
        self._entries: dict[bytes | None, Entries] = {}
        self._ends = [0] * PARTITIONS
        self._moment = FIRST_MOMENT_US

    def copy(self, folder: Path) -> Backbone:
        """Copy the tables, the keys and the state of the streams."""
        shutil.copytree(self.settings.data_dir, folder)
        other = Backbone(folder)
        other._entries = {key: Entries(entries.stored()) for key, entries in self._entries.items()}
        other._ends, other._moment = [*self._ends], self._moment
        return other

    def settle(self, *records: OutgoingRecord) -> None:
        """One micro-batch of settle_events."""
        rows = []
        for partition in range(PARTITIONS):
            mine = [self._record(r, partition) for r in records if sum(r.key) % PARTITIONS == partition]
            for record in mine:
                self._entries.setdefault(record.key, Entries())
            rows += settle_run(mine, self._entries.__getitem__, self.keyring)
        write_deltalake(self.settings.table_path(LEDGER), ledger_batch(rows), mode="append")

    def _record(self, record: OutgoingRecord, partition: int) -> Record:
        names, values = zip(*record.headers(), strict=True)
        offset, self._ends[partition] = self._ends[partition], self._ends[partition] + 1
        self._moment += 1000
        return Record(
            self.settings.kafka.topic, partition, offset, self._moment, record.key, record.value, names, values
        )

    def build(self) -> None:
        """Apply all new changes in one micro-batch, as build_views does."""
        tables = open_tables(self.settings)
        ledger = DeltaTable(self.settings.table_path(LEDGER))
        changes = changes_of(ledger.to_pyarrow_dataset().to_table(columns=list(CHANGE_COLUMNS)))
        for name, table in tables.items():
            progress = ViewProgress(changes.next_offsets, ledger.version()) if name == STREAM_ENTRIES else None
            table.apply(changes.tables[name], progress)
            table.close()

    def state(self) -> dict[str, Any]:
        """All rows of all view tables."""
        found: dict[str, Any] = {}
        for table in VIEW_TABLES:
            stored = DeltaTable(self.settings.table_path(table)).to_pyarrow_dataset()
            rows = stored.to_table(columns=VIEW_ARROW[table].names).to_pylist()
            found[table] = sorted(rows, key=lambda row: [row[name] for name in key_columns(table)])
        return found

    def check(self) -> refold.CheckResult:
        """The parity check."""
        return refold.check_views(self.settings, DeltaTable(self.settings.table_path(LEDGER)), self.keyring)
