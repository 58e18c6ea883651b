"""The timers of schedules, and the message of a run (DL-23): the same at every gateway."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
from msgspec.structs import replace

from connectors.hub.reactor.timers import KindTimers
from schemas.effects.schedule_effects import SCHEDULE_TIMER, has_lost_owner
from schemas.fold.settled import AppliedChange, Settled
from schemas.streams.mailboxes.message import Message
from schemas.streams.principal.principals import (
    OPERATOR,
    PrincipalAddition,
    PrincipalRevocation,
    token_hash,
)
from schemas.streams.schedule.schedule_registry import (
    ScheduleRow,
    ScheduleSet,
)
from schemas.streams.task.task_registry import (
    TaskCompletion,
    TaskStart,
    TokenRevocation,
    token_id_of,
)
from schemas.wire.record import OutgoingRecord, Record
from tests.broker_processes import wait_until
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.reactor.followed import follows, needs_verdict
from tests.schemas.hub_records import schedule
from tests.schemas.job_records import KEYRING, START_US
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import decode

pytestmark = pytest.mark.requirement("DL-23")

S_US = 1_000_000
MINUTE_US = 60 * S_US
TOKEN_SHA256 = "ab" * 32
BY: dict[str, Any] = {"door": "http", "principal": "operator"}


class Log(FoldedLog):
    """A log with the schedule of ann, as the timers read it."""

    def __init__(self, by: str = "ann", now_us: int = START_US, **changed: Any) -> None:
        super().__init__(KEYRING)
        self.offset = 0
        body = ScheduleSet.model_validate(schedule(**changed))
        self.put(body.record(door="http", principal=by), now_us)

    def put(self, made: OutgoingRecord, now_us: int) -> tuple[Record, Settled]:
        """Settle a record at a time."""
        self.offset += 1
        record = as_read(made, self.offset, now_us)
        return record, self.add(record)

    @property
    def row(self) -> ScheduleRow:
        """The schedule."""
        found = self.get(ScheduleRow, "tea")
        assert isinstance(found, ScheduleRow)
        return found

    def live(self, row_type: type[Any]) -> list[Any]:
        """Return the live rows of a type, as `LiveView.live`."""
        rows = [row for _, _, row in self.rows[row_type.VIEW].values()]
        return [row for row in rows if row.is_live]

    def wanted(self, now_us: int) -> OutgoingRecord:
        """The record that a gateway's timers append at a time."""
        timers = KindTimers("schedule", SCHEDULE_TIMER, self, lambda _: None)  # type: ignore[arg-type]
        assert timers.moment_of(self.row) == self.row.next_run_at
        return timers.record_of(self.row, now_us)


def no_row(row_type: Any, key: str) -> None:
    """Look up a row where there is none."""


def messages_of_run(record: Record, verdict: str) -> list[OutgoingRecord]:
    """Return the message that follows from a run with this verdict, in a list."""
    return follows(record, no_row, verdict)


def verdict_of(log: Log, now_us: int, made: OutgoingRecord) -> tuple[Record, str]:
    """Settle a record; returns it with its verdict."""
    record, settled = log.put(made, now_us)
    return record, settled.verdict


def test_all_gateways_append_the_same_record_of_a_run_whenever_they_do() -> None:
    log = Log()
    first, later = log.wanted(START_US + MINUTE_US), log.wanted(START_US + 2 * MINUTE_US)
    assert first == later
    assert (first.type, first.door, first.principal) == ("schedule.ran", "reactor", "reactor")
    log.put(first, START_US + MINUTE_US)
    other = log.wanted(START_US + 2 * MINUTE_US)
    assert other.ce_id != first.ce_id
    # The schedule that is set anew has other runs, also at the same time.
    again = Log(now_us=START_US)
    body = ScheduleSet.model_validate(schedule("s2"))
    again.put(body.record(door="http", principal="ann"), START_US)
    same_time = again.wanted(START_US + MINUTE_US)
    assert same_time.ce_id != first.ce_id
    of_both = [
        messages_of_run(*verdict_of(one, START_US + MINUTE_US, made))[0].ce_id
        for one, made in ((Log(), first), (again, same_time))
    ]
    assert len(set(of_both)) == 2


def test_a_run_that_was_missed_is_recorded_as_such() -> None:
    log = Log()
    made = log.wanted(START_US + 2 * MINUTE_US + 1)
    assert made.type == "schedule.missed"
    assert log.put(made, START_US + 2 * MINUTE_US + 1)[1].verdict == "accepted"
    assert (log.row.missed_runs, log.row.next_run_at) == (1, START_US + 2 * MINUTE_US)


def test_an_accepted_run_has_one_message_of_the_owner_whose_id_follows_from_the_run() -> None:
    log = Log(priority="high", expires_in_ms=5000)
    record, settled = log.put(log.wanted(START_US + MINUTE_US), START_US + MINUTE_US + 250_000)
    assert needs_verdict(record, no_row)
    (posting,) = messages_of_run(record, settled.verdict)
    assert messages_of_run(record, settled.verdict) == [posting]
    assert (posting.stream, posting.door, posting.principal) == ("mailbox/default/bo", "reactor", "reactor")
    message = Message.model_validate(decode(posting.value)[0])
    assert posting.ce_id == message.message_id
    assert (message.sender, message.from_verified, message.from_task) == ("ann", True, None)
    assert (message.kind, message.body, message.priority) == ("remind", '{"text":"tea"}', "high")
    assert (message.expires_in_ms, message.sent_at) == (5000, iso_moment(START_US + MINUTE_US))
    assert log.put(posting, START_US + MINUTE_US)[1].verdict == "accepted"
    # The run of another gateway, or of a reactor that starts again.
    record, settled = log.put(log.wanted(START_US + 2 * MINUTE_US), START_US + 2 * MINUTE_US)
    (other,) = messages_of_run(record, settled.verdict)
    assert other.ce_id != posting.ce_id


def test_no_message_follows_from_a_run_that_was_not_accepted_or_from_another_record() -> None:
    log = Log()
    run = log.wanted(START_US + MINUTE_US)
    early, _ = log.put(run, START_US)
    assert messages_of_run(early, "rejected") == []
    record, settled = log.put(run, START_US + MINUTE_US)
    again, second = log.put(run, START_US + MINUTE_US)
    assert (settled.verdict, second.verdict) == ("accepted", "duplicate")
    assert messages_of_run(again, second.verdict) == []
    missed, _ = log.put(log.wanted(START_US + 9 * MINUTE_US), START_US + 9 * MINUTE_US)
    assert not needs_verdict(missed, no_row)
    assert messages_of_run(missed, "accepted") == []
    assert messages_of_run(replace(record, value=b"{}"), "accepted") == []
    assert messages_of_run(replace(record, value=None), "accepted") == []
    assert not needs_verdict(replace(record, header_names=(), header_values=()), no_row)


def test_the_schedule_of_a_revoked_principal_is_removed_instead_of_its_next_run() -> None:
    log = Log()
    # A principal that the live view does not know yet loses nothing.
    assert log.wanted(START_US + MINUTE_US).type == "schedule.ran"
    log.put(
        PrincipalAddition(principal="ann", role="worker", token_sha256=token_hash("a token")).record(
            door="http", principal=OPERATOR
        ),
        START_US,
    )
    assert log.wanted(START_US + MINUTE_US).type == "schedule.ran"
    log.put(PrincipalRevocation(principal="ann").record(door="http", principal=OPERATOR), START_US)
    made = log.wanted(START_US + MINUTE_US)
    assert made.type == "schedule.removed"
    assert log.put(made, START_US + MINUTE_US)[1].verdict == "accepted"
    assert (log.row.status, log.live(ScheduleRow)) == ("removed", [])
    assert log.put(made, START_US + MINUTE_US)[1].verdict == "duplicate"


def started_task(log: Log) -> None:
    start = TaskStart(
        task_id="t1",
        request_id="q1",
        description="x",
        agent_name="echo",
        capabilities=[],
        token_sha256=TOKEN_SHA256,
        expiry_ms=600_000,
    )
    assert log.put(start.record(**BY), START_US)[1].verdict == "accepted"


@pytest.mark.parametrize("end", ["none", "completed", "revoked", "expired"])
def test_the_schedule_of_a_tasks_agent_ends_with_the_tasks_token(end: str) -> None:
    log = Log(by="echo", from_task="t1")
    assert not has_lost_owner(log.get, log.row, START_US)
    started_task(log)
    now_us = START_US + (600 * S_US if end == "expired" else MINUTE_US)
    if end == "completed":
        log.put(TaskCompletion(task_id="t1", request_id="q2", result="1").record(**BY), START_US)
    if end == "revoked":
        token_id = token_id_of(TOKEN_SHA256)
        body = TokenRevocation(task_id="t1", token_id=token_id, request_id="q3", reason="lost")
        log.put(body.record(**BY), START_US)
    assert has_lost_owner(log.get, log.row, now_us) is (end != "none")
    assert has_lost_owner(log.get, log.row, now_us - 1) is (end in ("completed", "revoked"))


@pytest.mark.long
def test_the_next_run_is_recorded_at_its_time_and_runs_that_were_missed_follow_each_other_at_once() -> None:
    now_us, missed = time.time_ns() // 1000, 40
    log = Log(now_us=now_us - (missed + 1) * S_US, every_s=1, missed="all")
    appended: queue.SimpleQueue[OutgoingRecord | None] = queue.SimpleQueue()
    timers = KindTimers("schedule", SCHEDULE_TIMER, log, appended.put)  # type: ignore[arg-type]
    logged: list[tuple[int, int]] = []

    def settle() -> None:
        """Settle what was appended a moment later, as the thread of the live view."""
        while (made := appended.get()) is not None:
            time.sleep(0.005)
            at_us = time.time_ns() // 1000
            logged.append((at_us, decode(made.value)[0]["run_at"]))
            for change in log.put(made, at_us)[1].changes:
                timers.on_change(AppliedChange(change.view, change.key, log.offset, change.row))

    view, began = threading.Thread(target=settle), time.monotonic()
    view.start()
    timers.open()
    try:
        wait_until(lambda: log.row.runs >= missed + 2, 40, "the missed runs and the next ones")
    finally:
        timers.close()
        appended.put(None)
        view.join(10)
    # With one run in each tick of half a second, this would take 20 s.
    assert time.monotonic() - began < 10
    first = log.row.set_at + -log.row.set_at % S_US + S_US
    assert [run_at for _, run_at in logged] == [first + number * S_US for number in range(len(logged))]
    assert all(at_us >= run_at for at_us, run_at in logged)
