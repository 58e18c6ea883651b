"""A run of records is settled as they are one by one: all columns, the state and the rows of views."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from jobs.settling.fold_run import settle_run
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.streams.fold import settle
from schemas.streams.job import job_fold
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.wire.record import Record
from schemas.wire.verdicts import ACCEPTED
from tests.jobs.topic_load import event, registration
from tests.micro_batches import records_of
from tests.random_log import RandomLog
from tests.raw_records import raw
from tests.schemas.job_records import KEYRING

Stored = dict[bytes | None, dict[str, bytes]]
JOB, TRIGGER = "0badcafe", "the fold fails here"


def one_by_one(records: Sequence[Record], stored: Stored) -> list[LedgerRow]:
    """The rows of a micro-batch, settled record by record: what `settle_run` must equal."""
    last = {record.key: number for number, record in enumerate(records)}
    changes: dict[bytes | None, dict[tuple[str, str], AppliedChange]] = {}
    writes: dict[bytes | None, dict[str, bytes | None]] = {}
    accepted: dict[bytes | None, int] = {}
    rows = []
    for number, record in enumerate(records):
        key = record.key
        state = Entries(stored.get(key))
        settled = settle(record, state, KEYRING, Entries())
        if settled.verdict == ACCEPTED:
            accepted[key] = record.offset
        for change in settled.changes:
            applied = AppliedChange(change.view, change.key, record.offset, change.row)
            changes.setdefault(key, {})[change.view, change.key] = applied
        writes.setdefault(key, {}).update(state.take_writes())
        stored[key] = state.stored()
        if last[key] == number:
            changed = changes.get(key, {}).values()
            rows.append(ledger_row(record, settled, KEYRING, changed, writes[key], accepted.get(key)))
        else:
            rows.append(ledger_row(record, settled, KEYRING))
    return rows


def assert_equal_in_batches(records: Sequence[Record], draw: random.Random, most: int) -> None:
    """Settle records both ways, in micro-batches of random lengths, and compare rows and states."""
    in_runs: Stored = {}
    singly: Stored = {}
    first = 0
    while first < len(records):
        batch = records[first : first + draw.randint(1, most)]
        # As a task does: over the state of the micro-batch before, which no run changes.
        found = settle_run(list(batch), lambda key: Entries(in_runs.get(key)), KEYRING, Entries())
        for mine, theirs in zip(found, one_by_one(batch, singly), strict=True):
            assert mine == theirs
        for record, row in zip(batch, found, strict=True):
            state = in_runs.setdefault(record.key, {})
            for entry, value in row.entries or ():
                if value is None:
                    state.pop(entry, None)
                else:
                    state[entry] = value
        first += len(batch)
    for key, state in singly.items():
        assert in_runs.get(key, {}) == state


@pytest.mark.requirement("ST-12")
@pytest.mark.parametrize(("most", "step_s"), [(1, 0), (40, 600), (2000, 0), (2000, 60)])
def test_a_run_equals_its_records_one_by_one(most: int, step_s: int) -> None:
    # With long steps, leases and nonces expire, and ids are forgotten.
    records = [
        msgspec.structs.replace(record, logged_at_us=record.logged_at_us + number * step_s * 1_000_000)
        for number, record in enumerate(records_of(RandomLog(most, KEYRING).records(2000)))
    ]
    assert_equal_in_batches(records, random.Random(most), most)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.requirement("ST-12")
def test_a_million_records_in_runs_equal_the_same_one_by_one() -> None:
    # Memories are full, and whole micro-batches go to one stream.
    for seed in range(20):
        records = records_of(RandomLog(seed, KEYRING).records(50_000))
        assert_equal_in_batches(records, random.Random(seed), 5000)


@pytest.mark.requirement("ST-12")
def test_a_fold_that_fails_while_it_changes_state_costs_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = job_fold._keep

    def failing(given: Any, *arguments: Any, **named: Any) -> Any:
        if given.body.get("detail") == TRIGGER:
            raise ZeroDivisionError
        return keep(given, *arguments, **named)

    monkeypatch.setattr(job_fold, "_keep", failing)
    outgoing = [
        registration(JOB, KEYRING),
        event(JOB, 1, "started"),
        event(JOB, 2),
        event(JOB, 3, detail=TRIGGER),
        event(JOB, 4),
        event(JOB, 3, detail=TRIGGER),
        event(JOB, 5, "completed", detail=TRIGGER),
        event(JOB, 6, "completed"),
    ]
    records = records_of(map(raw, outgoing))
    for most in (1, 3, len(records)):
        assert_equal_in_batches(records, random.Random(most), most)
    (*_, row) = settle_run(records, lambda _: Entries(), KEYRING, Entries())
    assert (row.verdict, row.status_after) == ("accepted", "completed")
