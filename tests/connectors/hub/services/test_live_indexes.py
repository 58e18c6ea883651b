"""Mailboxes by depth, messages of a task and brokers of live jobs equal a scan of all rows at any time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.hub.live import row_lists
from connectors.hub.services import mailboxes
from connectors.hub.services.mailboxes import Depth, MailboxIndex
from connectors.hub.services.picking import BrokerOverlays
from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import job_secret_purpose
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import (
    JOB_TERMINAL,
    BrokerOverlay,
    JobCancellation,
    JobRegistration,
    JobRow,
)
from schemas.streams.mailboxes.message import DEAD, LEASED, MESSAGE_PENDING, UNREAD, MessageRow
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


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mailboxes_by_depth_and_messages_of_a_task_equal_a_scan(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_lists, "_BLOCK", 4)
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
    known = [row for row in made.rows.values() if row.ended_at is None or row.key in kept]
    _compare(index, known)
    assert 0 < len([row for row in known if row.ended_at is not None]) < len(made.rows)


def test_a_page_of_a_mailbox_does_not_cost_more_in_a_deeper_one() -> None:
    index, nothing = MailboxIndex(), dict.fromkeys(MessageRow.__struct_fields__)
    for name, depth in (("deep", 20_000), ("flat", 200)):
        for number in range(depth):
            known = {"realm": "default", "recipient": name, "message_id": f"{name}-{number}", "status": UNREAD}
            row = MessageRow(**{**nothing, **known, "posted_at": number})
            index.changed(AppliedChange(MessageRow.VIEW, row.key, number, row))
    times = {"deep": [math.inf], "flat": [math.inf]}
    for turn in range(60):
        for name, found in times.items():
            began = time.process_time()
            page, total = index.pending_page(("default", name), None, (turn, f"{name}-{turn}"), 10)
            found.append(time.process_time() - began)
            assert page == [f"{name}-{turn + 1 + n}" for n in range(10)] and total == len(
                index.waiting(("default", name))
            )
    assert min(times["deep"]) < 10 * min(times["flat"])


@pytest.mark.parametrize("most", [3, 99])
def test_the_newest_final_messages_are_those_of_a_scan(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "FINAL_MESSAGES", most)
    made = Changes()
    source = RandomMailboxes(random.Random(6), AGENTS, AGENTS)
    for turn in range(300):
        made.settle([source.message, source.hand_out, source.handed_out][turn % 3](), MessageRow.VIEW)
    final = [row for row in made.rows.values() if not row.is_live]
    assert len({row.status for row in final}) > 1

    class View:
        def newest_ended(self, row_type: type[MessageRow], listed: str) -> Iterator[MessageRow]:
            listing = [row for row in final if row.status == listed]
            yield from sorted(listing, key=lambda row: row.ended_at or 0, reverse=True)

    found = mailboxes.newest_final(View())  # type: ignore[arg-type]
    ends = sorted((row.ended_at or 0 for row in final), reverse=True)
    assert [row.ended_at for row in found] == ends[:most]


def _compare(index: MailboxIndex, rows: list[MessageRow]) -> None:
    held = sorted((row.handed_at or 0, row.key) for row in rows if row.status == LEASED)
    times = {key: handed_at for handed_at, key in held}
    listed = index.long_held(1 << 62, 0)
    assert sorted((times[key], key) for key in listed) == held
    assert [times[key] for key in listed] == [handed_at for handed_at, _ in held]
    middle = held[len(held) // 2][0] if held else 0
    assert len(index.long_held(middle, 0)) == sum(handed_at < middle for handed_at, _ in held)
    found: dict[tuple[str, str], Depth] = {}
    for box in {(row.realm, row.recipient) for row in rows}:
        mine = [row for row in rows if (row.realm, row.recipient) == box]
        pending = [row.posted_at for row in mine if row.status in MESSAGE_PENDING]
        dead = sum(row.status == DEAD for row in mine)
        for status in (None, *MESSAGE_PENDING, DEAD):
            _compare_pages(index, box, status, [row for row in mine if status in (None, row.status)])
        if pending or dead:
            found[box] = Depth(box, len(pending), dead, min(pending, default=None))
    expected = sorted(found.values(), key=lambda one: (-one.depth, -one.dead, one.mailbox))
    assert index.deepest(99) == expected
    assert index.deepest(2) == expected[:2]
    assert index.totals() == (sum(one.depth for one in expected), len(expected))
    for task_id in {row.from_task for row in rows if row.from_task is not None}:
        assert set(index.of_task(task_id)) == {row.key for row in rows if row.from_task == task_id}


def _compare_pages(
    index: MailboxIndex, box: tuple[str, str], status: str | None, rows: list[MessageRow]
) -> None:
    """Compare the pages of a mailbox's pending messages with a scan."""
    wanted = sorted((row.posted_at, row.message_id) for row in rows if row.status in MESSAGE_PENDING)
    found, after = list[str](), (0, "")
    while True:
        page, total = index.pending_page(box, status, after, 3)
        assert total == len(wanted)
        found += page
        if len(page) < 3:
            break
        after = wanted[len(found) - 1]
    assert found == [message_id for _, message_id in wanted]


@pytest.mark.parametrize("seed", [1, 2])
def test_brokers_of_live_jobs_equal_a_scan_and_each_job_is_read_once(seed: int) -> None:
    draw, made = random.Random(seed), Changes()
    reads: list[str] = []

    def entries(stream: str) -> Entries:
        reads.append(stream)
        found = made.entries(stream)
        if draw.random() < 0.2:  # the job may end while its broker is read
            for change in made.settle(
                raw(
                    JobCancellation(job_id=stream[4:], request_id="q").record(door="cli", principal="operator")
                ),
                JobRow.VIEW,
            ):
                index.changed(change)
        return found

    index = BrokerOverlays(entries, KEYRING)

    def settled(count: int) -> Iterator[AppliedChange]:
        for _ in range(count):
            live = [row.job_id for row in made.rows.values() if row.status not in JOB_TERMINAL]
            if not live or draw.random() < 0.5:
                job_id, host = f"{draw.getrandbits(32):08x}", draw.choice([None, *"abcdefghijklmnopqrstuvwxyz"])
                broker = None if host is None else BrokerOverlay(host=host)
                record = JobRegistration(
                    sealed_secret=KEYRING.seal(b"secret", job_secret_purpose(job_id)),
                    job_id=job_id,
                    description="d",
                    broker=broker,
                ).record(door="cli", principal="operator")
            else:
                record = JobCancellation(job_id=draw.choice(live), request_id="q").record(
                    door="cli", principal="operator"
                )
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
