"""Small ledgers with real roots, without Spark: what tasks and sink do is called as they call it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import Row

from jobs.ledger.audit_trail import AuditTrail
from jobs.ledger.ledger_table import prepare_ledger, write_file
from jobs.maintain_tables import tidy_ledger
from jobs.settling import ledger_sink
from jobs.settling.ledger_sink import LedgerSink
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.ledger import LEDGER, LedgerRow


def ledger_row_at(partition: int, offset: int, **other: Any) -> LedgerRow:
    """A row as an accepted event makes it."""
    known: dict[str, Any] = {
        **dict.fromkeys(LedgerRow._fields),
        "topic": "trunk.events",
        "partition": partition,
        "offset": offset,
        "stream_kind": "job",
        "stream_id": f"{partition:08x}",
        "door": "mqtt",
        "seq": offset,
        "sent_at": "2026-11-21T10:00:00Z",
        "logged_at": 1_790_000_000_000_000 + offset * 1000,
        "verdict": "accepted",
        "late": False,
        "fold_version": 2,
        "value": b"event %d" % offset,
        # All there is for a map: none, empty, with a value that is null.
        "entries": (None, [], [("job", b"x"), ("progress", None)])[offset % 3],
    }
    return LedgerRow(**(known | other))


class AuditedLedger:
    """A ledger below a folder, or where settings say, and what makes its commits."""

    def __init__(self, where: Path | Settings, **audit: Any) -> None:
        plain = where if isinstance(where, Settings) else Settings(data_dir=where)
        self.settings = plain.model_copy(update={"audit": plain.audit.model_copy(update=audit)})
        self.path = self.settings.table_path(LEDGER)
        prepare_ledger(self.settings)
        self.trail = AuditTrail(self.settings)
        self.batches = 0
        self.restart()

    def restart(self) -> None:
        """A new start of the settling query."""
        self._sink = LedgerSink(self.settings)
        self._sink.started("the query")

    def files_of(self, rows: Sequence[LedgerRow]) -> list[Row]:
        """Return the file of a task that settled these rows: a batch for each partition."""
        partitions = sorted({row.partition for row in rows})
        batches = [ledger_batch([row for row in rows if row.partition == p]) for p in partitions]
        return [Row(**file) for written in write_file(self.path, batches) for file in written.to_pylist()]

    def commit(self, *tasks: Sequence[LedgerRow], began: float | None = None, leaves_out: bool = False) -> None:
        """One micro-batch, that began at `began` on the monotonic clock.

        `leaves_out`: it leaves out offsets, and Kafka is not asked whether they have records.
        """
        files = [file for rows in tasks for file in self.files_of(rows)]
        with mock.patch.object(ledger_sink, "check_gaps") if leaves_out else nullcontext():
            self._sink.commit(files, self.batches, began)
        self.batches += 1

    def plant(self, rows: Sequence[LedgerRow]) -> None:
        """Add rows past the sink, without an entry of the chain, as no program of ours does."""
        table = DeltaTable(self.path)
        adds: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, 0, True, file.statistics) for file in self.files_of(rows)
        ]
        table.create_write_transaction(adds, mode="append", schema=table.schema())

    def commit_offsets(self, ends: dict[int, tuple[int, int]], *, leaves_out: bool = False) -> None:
        """One micro-batch with the offsets from one to before another of some partitions."""
        rows = [ledger_row_at(p, at) for p, (first, end) in ends.items() for at in range(first, end)]
        self.commit(rows, leaves_out=leaves_out)

    def forget_log(self) -> None:
        """Maintenance as it is hours later: the log has nothing of the commits so far."""
        then = time.time() - 2 * 3600
        for _ in range(2):
            for file in Path(self.path, "_delta_log").iterdir():
                os.utime(file, (then, then))
            tidy_ledger(self.settings)

    def log_versions(self) -> list[int]:
        """The commits that the log still has."""
        return sorted(int(file.stem) for file in Path(self.path, "_delta_log").glob("*.json"))

    def keep(self) -> None:
        """Write the chain file and the anchor, as the driver's thread does."""
        self.trail.follow()
        self.trail.anchor(at_once=True)


def three_commits(folder: Path) -> AuditedLedger:
    """A ledger of three partitions, all of it anchored."""
    ledger = AuditedLedger(folder)
    ledger.commit_offsets({0: (0, 4), 1: (0, 3)})
    ledger.commit_offsets({0: (4, 9)})
    ledger.commit_offsets({0: (9, 12), 2: (0, 2)})
    ledger.keep()
    return ledger
