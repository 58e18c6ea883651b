"""Timers whose process has another clock than the log: they ask by the log's (ST-85)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from connectors.hub.live.log_clock import LogClock
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.reactor.timers import KindTimers
from schemas.effects.mailbox_effects import MESSAGE_TIMER
from schemas.fold.settled import AppliedChange
from schemas.streams.mailboxes.message import Message, MessageRow
from schemas.wire.record import OutgoingRecord, Position
from tests.connectors.folded_log import FoldedLog
from tests.schemas.job_records import KEYRING, START_US
from tests.schemas.stream_records import as_read, message

pytestmark = pytest.mark.requirement("ST-85")

S_US = 1_000_000


class SkewedLog(FoldedLog):
    """A log and the timers of a process whose clock is ahead of it, turned by hand."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__(KEYRING)
        self.now_us, self.ahead_us, self.offset = START_US, int(ahead_s * S_US), 0
        self.clock = LogClock(1, lambda: self.now_us + self.ahead_us)
        self.timers = KindTimers("mailbox", MESSAGE_TIMER, self, self.put, self.clock)  # type: ignore[arg-type]
        self.rejected = 0

    def live(self, row_type: type[Any]) -> list[Any]:
        rows = [row for _, _, row in self.rows[row_type.VIEW].values()]
        return [row for row in rows if row.is_live]

    def put(self, made: OutgoingRecord) -> None:
        """Append a record, which is settled five milliseconds later."""
        self.offset += 1
        logged_us = self.now_us
        settled = self.add(as_read(made, self.offset, logged_us))
        self.rejected += settled.verdict == "rejected"
        self.now_us += 5000
        for change in settled.changes:
            self.timers.on_change(AppliedChange(change.view, change.key, self.offset, change.row))
        about = (made.stream, made.type, made.ce_id, "reactor/reactor", settled.verdict, settled.reason)
        position = Position(0, self.offset)
        self.clock.settled([SettledRecord(position, *about, settled.why, False, None, None, logged_us, None)])

    def post(self, message_id: str, **times: int) -> None:
        body = Message.model_validate(message(message_id, **times))
        self.put(body.record(door="http", principal="ann"))

    def run(self, seconds: int) -> None:
        """Let the time pass in steps of half a second."""
        for _ in range(2 * seconds):
            looks = 0
            while self.timers._look():
                looks += 1
                assert looks < 100, "the timers look at the same rows again and again"
            self.now_us += S_US // 2

    def statuses(self) -> set[str]:
        return {row.status for _, _, row in self.rows[MessageRow.VIEW].values()}


@pytest.mark.parametrize("ahead_s", [600, 75, 0, -75, -600])
def test_a_clock_that_is_wrong_costs_one_refusal_and_then_no_record_a_timer(ahead_s: float) -> None:
    log = SkewedLog(ahead_s)
    for number in range(20):
        log.post(f"m{number}", deliver_after_ms=20_000)
    log.run(19)
    assert log.statuses() == {"delayed"}
    # Timers that asked before the first answer came too early, too.
    assert log.rejected <= (20 if ahead_s > 0 else 0)
    log.rejected = 0
    log.run(3 if ahead_s >= 0 else 700)
    assert log.statuses() == {"unread"} and log.rejected == 0
    for number in range(20, 40):
        log.post(f"m{number}", deliver_after_ms=20_000)
    log.run(19)
    assert log.statuses() == {"delayed", "unread"} and log.rejected == 0
    log.run(3)
    assert log.statuses() == {"unread"} and log.rejected == 0


@pytest.mark.parametrize("ahead_s", [600, 75, 0, -1])
def test_a_record_that_came_too_early_is_asked_for_again_at_its_time(ahead_s: float) -> None:
    log = SkewedLog(ahead_s)
    log.post("m1", deliver_after_ms=2000)
    log.run(1)
    assert log.statuses() == {"delayed"}
    log.run(3)
    assert log.statuses() == {"unread"} and log.rejected <= 1


def test_a_record_that_is_never_settled_is_asked_for_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, asked = SkewedLog(0), list[int]()
    log.post("m1", deliver_after_ms=1000)
    monkeypatch.setattr(log.timers, "_append", lambda made: asked.append(log.now_us))
    log.run(1300)
    pauses = [round((later - earlier) / S_US) for earlier, later in itertools.pairwise(asked)]
    assert pauses[:7] == [5, 10, 20, 40, 80, 160, 320]
    assert len(asked) <= 10


def test_a_lease_that_a_wrong_clock_made_is_ended_by_the_timers() -> None:
    log = SkewedLog(0)
    log.post("m1", deliver_after_ms=1000)
    log.now_us += 370 * 86_400 * S_US
    log.post("m2", deliver_after_ms=1000)
    log.now_us = START_US + 2 * S_US
    log.timers.close()
    for row in log.live(MessageRow):
        log.timers._note(row.key, row)
    log.run(2)
    assert log.statuses() == {"unread"} and log.rejected <= 2
