"""Mailboxes by depth, messages of a task and brokers of live jobs equal a scan of all rows at any time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.gateway.services import mailboxes, sorted_keys
from connectors.gateway.services.broker_overlays import BrokerOverlays
from connectors.gateway.services.mailboxes import Depth, MailboxIndex
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import JOB_TERMINAL, BrokerOverlay, JobRow, registration_record
from schemas.streams.job.job_registry import cancellation_record as cancellation
from schemas.streams.mailboxes.message import DEAD, MESSAGE_PENDING, MessageRow
from tests.connectors.folded_log import FoldedLog
from tests.random_mailboxes import RandomMailboxes
from tests.raw_records import Raw, raw
from tests.schemas.job_records import KEYRING, START_US
from tests.test_random_log import logged

pytestmark = pytest.mark.requirement("ST-70")
AGENTS = [f"worker-{n}" for n in range(6)]


class Changes:
    """The real fold; it reports each changed row, as the live view does."""

    def __init__(self) -> None:
        self.log = FoldedLog(KEYRING)
        self.rows: dict[str, Any] = {}
        self._offset = 0

    def settle(self, made: Raw, view: str) -> list[AppliedChange]:
        self._offset += 1
        settled = self.log.add(logged(made, self._offset, START_US + self._offset // 3 * 1000))
        found = [change for change in settled.changes if change.view == view]
        self.rows |= {change.key: change.row for change in found}
        return [AppliedChange(change.view, change.key, self._offset, change.row) for change in found]

    def entries(self, stream: str) -> Entries:
        return Entries(dict(self.log.entries.get(stream, {})))


def amid(index: Any, rows: list[Any], changes: Iterator[AppliedChange]) -> None:
    """Load an index with rows while changes come, one after each row."""

    def read() -> Iterator[Any]:
        for row in rows:
            yield row
            if (change := next(changes, None)) is not None:
                index.changed(change)

    index.load(read())
    for change in changes:
        index.changed(change)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mailboxes_by_depth_and_messages_of_a_task_equal_a_scan(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_keys, "_BLOCK", 4)
    draw, made, index = random.Random(seed), Changes(), MailboxIndex()
    source = RandomMailboxes(draw, AGENTS, AGENTS)

    def settled(count: int) -> Iterator[AppliedChange]:
        for _ in range(count):
            one = draw.choice([source.message, source.message, source.hand_out, source.handed_out])()
            yield from made.settle(one, MessageRow.VIEW)

    for _ in settled(400):
        pass
    amid(index, list(made.rows.values()), settled(300))
    for _ in range(60):
        for change in settled(draw.randrange(60)):
            index.changed(change)
        _compare(index, list(made.rows.values()))
    assert any(found.dead for found in index.deepest(99))
    # Only few of the final messages are kept.
    monkeypatch.setattr(mailboxes, "FINAL_MESSAGES", 5)
    for change in settled(500):
        index.changed(change)
    kept = set(index._final)
    known = [row for row in made.rows.values() if row.status in MESSAGE_PENDING or row.key in kept]
    _compare(index, known)
    assert 0 < len([row for row in known if row.status not in MESSAGE_PENDING]) < len(made.rows)


def _compare(index: MailboxIndex, rows: list[MessageRow]) -> None:
    found: dict[tuple[str, str], Depth] = {}
    for box in {(row.realm, row.recipient) for row in rows}:
        mine = [row for row in rows if (row.realm, row.recipient) == box]
        pending = [row.posted_at for row in mine if row.status in MESSAGE_PENDING]
        dead = sum(row.status == DEAD for row in mine)
        if pending or dead:
            found[box] = Depth(box, len(pending), dead, min(pending, default=None))
    expected = sorted(found.values(), key=lambda one: (-one.depth, -one.dead, one.mailbox))
    assert index.deepest(99) == expected
    assert index.deepest(2) == expected[:2]
    assert index.totals() == (sum(one.depth for one in expected), len(expected))
    for task_id in {row.from_task for row in rows if row.from_task is not None}:
        assert set(index.of_task(task_id)) == {row.key for row in rows if row.from_task == task_id}


@pytest.mark.parametrize("seed", [1, 2])
def test_brokers_of_live_jobs_equal_a_scan_and_each_job_is_read_once(seed: int) -> None:
    draw, made = random.Random(seed), Changes()
    reads: list[str] = []

    def entries(stream: str) -> Entries:
        reads.append(stream)
        found = made.entries(stream)
        if draw.random() < 0.2:  # the job may end while its broker is read
            for change in made.settle(raw(cancellation(stream[4:], request_id="q")), JobRow.VIEW):
                index.changed(change)
        return found

    index = BrokerOverlays(entries, KEYRING)

    def settled(count: int) -> Iterator[AppliedChange]:
        for _ in range(count):
            live = [row.job_id for row in made.rows.values() if row.status not in JOB_TERMINAL]
            if not live or draw.random() < 0.5:
                job_id, host = f"{draw.getrandbits(32):08x}", draw.choice([None, *"abcdefghijklmnopqrstuvwxyz"])
                broker = None if host is None else BrokerOverlay(host=host)
                record = registration_record(job_id, "secret", "d", KEYRING, broker=broker)
            else:
                record = cancellation(draw.choice(live), request_id="q")
            yield from made.settle(raw(record), JobRow.VIEW)

    for _ in settled(100):
        pass
    amid(index, list(made.rows.values()), settled(60))
    for _ in range(60):
        for change in settled(draw.randrange(6)):
            index.changed(change)
        index.distinct()
        live = [row.job_id for row in made.rows.values() if row.status not in JOB_TERMINAL]
        grants = [job_grant(job_id, made.entries(f"job/{job_id}"), KEYRING) for job_id in live]
        expected = {grant.broker for grant in grants if grant is not None and grant.broker is not None}
        assert index.distinct() == sorted(expected)
        assert index._overlay_by_job.keys() == set(live)
    assert len(reads) == len(set(reads)) > 50
