"""A run of records is settled as they are one by one: all columns, the state and the rows of views."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jobs.settling.partition_task import settle_over
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring
from schemas.state_store.partition_store import PartitionStore, Position
from schemas.streams.control import record_macs
from schemas.streams.control.record_macs import (
    MAC_KEY_ENDED,
    MACS_REQUIRED,
    mac_key_ended_records,
    macs_required_records,
    macs_stream,
)
from schemas.streams.fold import KINDS, settle
from schemas.streams.job import job_fold
from schemas.tables.ledger import LedgerRow, ledger_row
from schemas.wire.record import Record
from tests.jobs.topic_load import event, registration
from tests.micro_batches import records_of
from tests.random_log import RandomLog
from tests.random_macs import RandomMacs
from tests.random_tasks import task_or_agent_record
from tests.raw_records import Raw, raw, with_mac
from trunkline_agent.wire.ids import REFUSED, parse_stream_key
from trunkline_agent.wire.verdicts import ACCEPTED, UNAUTHENTICATED_RECORD

Stored = dict[bytes | None, dict[str, bytes]]
JOB, TRIGGER = "0badcafe", "the fold fails here"
FAILING = "failing"
KEYS = {"k1": bytes(range(32)), "k2": bytes(range(32, 64))}
KEYRING, OLD = Keyring(KEYS, "k1"), Keyring(KEYS, "k2")
MACS_KEY = macs_stream(0).encode()


def one_by_one(records: Sequence[Record], stored: Stored) -> list[LedgerRow]:
    """The rows of a micro-batch, settled record by record: what `settle_over` must equal."""
    last = {record.key: number for number, record in enumerate(records)}
    changes: dict[bytes | None, dict[tuple[str, str], AppliedChange]] = {}
    writes: dict[bytes | None, dict[str, bytes | None]] = {}
    accepted: dict[bytes | None, int] = {}
    rows = []
    for number, record in enumerate(records):
        key = record.key
        macs = Entries(stored.get(MACS_KEY))
        state = macs if key == MACS_KEY else Entries(stored.get(key))
        settled = settle(record, state, KEYRING, macs)
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


def assert_equal_in_batches(
    folder: Path, records: Sequence[Record], draw: random.Random, most: int
) -> list[LedgerRow]:
    """Settle records both ways, in micro-batches of random lengths, and compare rows and states.

    One way is over a local store in `folder`, as in a task. Returns the rows.
    """
    singly: Stored = {}
    rows: list[LedgerRow] = []
    with closing(PartitionStore(folder)) as store:
        at = Position("t", 1, 1, 0, "")
        store.load(None, at, [])
        while len(rows) < len(records):
            batch = list(records[len(rows) : len(rows) + draw.randint(1, most)])
            with store.snapshot() as snapshot:
                found = settle_over(snapshot, 0, batch, KEYRING)
            for mine, theirs in zip(found, one_by_one(batch, singly), strict=True):
                assert mine == theirs
            rows += found
            after = msgspec.structs.replace(at, offset=len(rows))
            store.advance(
                at,
                after,
                [
                    (f"{row.stream_kind}/{row.stream_id}", entry, value)
                    for row in found
                    for entry, value in row.entries or ()
                ],
            )
            at = after
        with store.snapshot() as snapshot:
            for key, state in singly.items():
                if key is None or parse_stream_key(key) is None:
                    assert state == {}
                    continue
                stored = snapshot.stream(key.decode())
                keys = stored.keys("", "", 1_000_000)
                assert {entry: stored.get(entry) for entry in keys} == state
    return rows


def random_records(seed: int, count: int, often: float) -> list[Record]:
    """Random records of all kinds of streams, and the rules of their MACs at random places."""
    draw, key = random.Random(seed), KEYRING.mac_key("gateway")
    others = (with_mac(raw(task_or_agent_record(draw)), key) for _ in iter(int, 1))
    log = (next(others) if draw.random() < 0.1 else one for one in RandomLog(seed, KEYRING).records(count))
    return records_of(RandomMacs(draw, KEYRING, OLD).records(log, often))


@pytest.mark.long
@pytest.mark.requirement("ST-12")
@pytest.mark.parametrize(("most", "step_s"), [(1, 0), (40, 600), (2000, 0), (2000, 60)])
def test_a_run_equals_its_records_one_by_one(tmp_path: Path, most: int, step_s: int) -> None:
    # With long steps, leases and nonces expire, and ids are forgotten.
    records = [
        msgspec.structs.replace(record, logged_at_us=record.logged_at_us + number * step_s * 1_000_000)
        for number, record in enumerate(random_records(most, 2000, 0.02))
    ]
    rows = assert_equal_in_batches(tmp_path, records, random.Random(most), most)
    rules = [row.type for row in rows if row.stream_id == "macs-0" and row.verdict == ACCEPTED]
    assert rules == [MACS_REQUIRED, MAC_KEY_ENDED]
    assert {row.stream_kind for row in rows if row.verdict == ACCEPTED} == set(KINDS) - {REFUSED}
    forged = [row.offset for row in rows if row.reason == UNAUTHENTICATED_RECORD]
    assert 50 < len(forged) < len(rows) / 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.requirement("ST-12")
def test_a_million_records_in_runs_equal_the_same_one_by_one(tmp_path: Path) -> None:
    # Memories are full, and whole micro-batches go to one stream.
    for seed in range(20):
        records = random_records(seed, 50_000, 0.0004)
        assert_equal_in_batches(tmp_path / str(seed), records, random.Random(seed), 5000)


@pytest.fixture
def failing_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds of jobs and of MAC rules that fail after they have changed state."""
    keep, accept = job_fold._keep, record_macs._accept

    def failing(given: Any, *arguments: Any, **named: Any) -> Any:
        if given.body.get("detail") == TRIGGER:
            raise ZeroDivisionError
        return keep(given, *arguments, **named)

    def failing_to_accept(given: Any, rules: Any) -> Any:
        outcome = accept(given, rules)
        if given.body.get("key_id") == FAILING:
            raise ZeroDivisionError
        return outcome

    monkeypatch.setattr(job_fold, "_keep", failing)
    monkeypatch.setattr(record_macs, "_accept", failing_to_accept)


@pytest.mark.requirement("ST-12")
@pytest.mark.usefixtures("failing_fold")
@pytest.mark.parametrize("most", [1, 3, 8])
def test_a_fold_that_fails_while_it_changes_state_costs_its_record(tmp_path: Path, most: int) -> None:
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
    (*_, row) = assert_equal_in_batches(tmp_path, records_of(map(raw, outgoing)), random.Random(most), most)
    assert (row.verdict, row.status_after) == ("accepted", "completed")


@pytest.mark.requirement("ST-12")
@pytest.mark.usefixtures("failing_fold")
@pytest.mark.parametrize("most", [1, 3, 10])
def test_a_fold_of_mac_rules_that_fails_costs_its_record(tmp_path: Path, most: int) -> None:
    key, (required,) = KEYRING.mac_key("gateway"), macs_required_records(1)
    failing, ended = (raw(next(mac_key_ended_records(1, name))) for name in (FAILING, "k2"))
    log: list[Raw] = [
        # Without a MAC, before it is required.
        raw(registration(JOB, KEYRING)),
        with_mac(raw(required), key),
        with_mac(failing, key),
        with_mac(ended, key),
        raw(registration("00000fff", KEYRING)),
        with_mac(failing, key),
        with_mac(raw(registration("00000fff", KEYRING)), OLD.mac_key("gateway")),
        raw(event(JOB, 1, "started")),
        raw(event(JOB, 2, detail=TRIGGER)),
        raw(event(JOB, 3)),
    ]
    rows = assert_equal_in_batches(tmp_path, records_of(log), random.Random(most), most)
    assert [row.reason for row in rows] == [
        *(None, None, "fold_failed", None, "unauthenticated_record", "fold_failed", "unauthenticated_record"),
        *(None, "fold_failed", None),
    ]
