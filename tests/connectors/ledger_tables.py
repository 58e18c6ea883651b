"""Ledger tables for tests: made of records that went through the fold, written without Spark."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from deltalake import write_deltalake

from schemas.fold.entries import Entries
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.settings.settings import Settings, StorageSettings
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import JOB_EVENT, JobRegistration
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.wire.record import OutgoingRecord
from tests.schemas.job_records import signed
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.ids import content_id
from trunkline_agent.wire.strict_json import canonical

KEYRING = Keyring({"test": b"k" * 32}, "test")
SECRET = "a-secret"
FIRST_MOMENT_US = 1_790_000_000_000_000
STEP_US = 1_000_000


def settings_below(folder: Path) -> Settings:
    """Settings whose tables lie in this folder."""
    return Settings(data_dir=folder, storage=StorageSettings(tables=str(folder / "tables")))


class LedgerTable:
    """A ledger that grows by what the fold makes of each record, one second apart."""

    def __init__(self, settings: Settings) -> None:
        self.path = settings.table_path("ledger")
        self._offsets = itertools.count()
        self._entries: dict[str, Entries] = {}

    def commit(self, *rows: LedgerRow) -> None:
        """Append rows in one commit, as settle_events does with a micro-batch."""
        write_deltalake(self.path, ledger_batch(rows), mode="append")

    def registered(self, job_id: str) -> LedgerRow:
        """The settled registration of a job."""
        return self.settled(
            JobRegistration(
                sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(job_id)),
                job_id=job_id,
                description="a job",
            ).record(door="cli", principal="operator")
        )

    def event(self, job_id: str, seq: int, detail: str, **fields: Any) -> LedgerRow:
        """A settled event, signed well; `fields` overwrite its own."""
        kind = "started" if seq == 1 else "progress"
        own = {"job_id": job_id, "timestamp": "2026-11-21T10:00:00.250Z", "detail": detail, **fields}
        return self.message(f"job/{job_id}", canonical(signed(seq, kind, SECRET, **own)))

    def message(self, stream: str, value: bytes, door: str = "mqtt") -> LedgerRow:
        """The settled bytes of a job event, whatever they are."""
        ce_id = content_id(stream.encode(), value)
        return self.settled(OutgoingRecord(stream, ce_id, door, "unverified", JOB_EVENT, value))

    def settled(self, outgoing: OutgoingRecord) -> LedgerRow:
        """The row of any record."""
        offset = next(self._offsets)
        record = as_read(outgoing, offset, FIRST_MOMENT_US + offset * STEP_US, partition=0)
        entries = self._entries.setdefault(outgoing.stream, Entries())
        settled = settle(record, entries, KEYRING, Entries())
        return ledger_row(record, settled, KEYRING, settled.changes)
