"""The jobs of a log that is only in memory: the real fold behind the questions that the live view answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from secrets import token_hex
from typing import Any

from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.keys.sealing import Keyring, job_secret_purpose
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import (
    JobCancellation,
    JobRegistration,
    JobSecretRotation,
)
from schemas.wire.record import OutgoingRecord
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.ids import new_job_id
from trunkline_agent.wire.signing import new_secret
from trunkline_agent.wire.verdicts import ACCEPTED

KEYRING = Keyring({"test": b"k" * 32}, "test")


class FoldedJobs:
    """Appends a record and has it settled at once; `ago_s` moves the log's clock back."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}
        self.listeners: list[Callable[[AppliedChange], None]] = []
        self._entries: dict[str, Entries] = {}
        self._rows: dict[tuple[str, str], Row] = {}
        self._offset = 0

    def row(self, view: str, key: str) -> Row | None:
        return self._rows.get((view, key))

    def rows(self, view: str) -> list[Row]:
        return [row for (name, _), row in self._rows.items() if name == view]

    def get(self, row_type: type[Row], key: str) -> Any:
        return self.row(row_type.VIEW, key)

    def all(self, row_type: type[Row]) -> list[Any]:
        return self.rows(row_type.VIEW)

    def live(self, row_type: type[Row]) -> list[Any]:
        return [row for row in self.rows(row_type.VIEW) if row.is_live]

    def entries(self, stream: str) -> Entries:
        return Entries(dict(self._entries[stream].stored()))

    def register(self) -> tuple[str, str]:
        """A new job: its id and its secret."""
        job_id, secret = new_job_id(), new_secret()
        self.secrets[job_id] = secret
        self._append(
            JobRegistration(
                sealed_secret=KEYRING.seal(secret.encode(), job_secret_purpose(job_id)),
                job_id=job_id,
                description="some work",
            ).record(door="cli", principal="operator"),
            0,
        )
        return job_id, secret

    def rotate(self, job_id: str, overlap_s: float) -> str:
        """The job is given a new secret, which is returned; the one before it is good for `overlap_s` more."""
        self.secrets[job_id] = secret = f"{token_hex(4)}.{new_secret()}"
        overlap_ms = round(overlap_s * 1000)
        record = JobSecretRotation(
            sealed_secret=KEYRING.seal(secret.encode(), job_secret_purpose(job_id)),
            job_id=job_id,
            overlap_ms=overlap_ms,
            request_id=secret[:8],
        ).record(door="cli", principal="operator")
        self._append(record, 0)
        return secret

    def end(self, job_id: str, ago_s: float = 0) -> None:
        """The job is cancelled."""
        self._append(
            JobCancellation(job_id=job_id, request_id="end").record(door="cli", principal="operator"), ago_s
        )

    def _append(self, outgoing: OutgoingRecord, ago_s: float) -> None:
        record = as_read(outgoing, self._offset, int((time.time() - ago_s) * 1e6))
        entries = self._entries.setdefault(outgoing.stream, Entries())
        settled = settle(record, entries, KEYRING, Entries())
        assert settled.verdict == ACCEPTED, settled
        for change in settled.changes:
            assert change.row is not None
            self._rows[(change.view, change.key)] = change.row
            for listener in self.listeners:
                listener(AppliedChange(change.view, change.key, self._offset, change.row))
        self._offset += 1
