"""The live view on a real Kafka: the fold's answers, by position, whatever the records hold."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import contextmanager

import pytest

from connectors.hub.live.live_view import LiveView
from connectors.hub.live.settled_feed import SettledFeed
from connectors.log.kafka_libraries import to_record
from connectors.log.publisher import Publisher
from schemas.fold.settled import FOLD_VERSION
from schemas.streams.control.control_fold import FoldSwitched
from schemas.streams.fold import VIEWS
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import REGISTRY_JOBS, JobRow
from schemas.streams.session.sessions import SessionRow
from schemas.wire.record import Position, Record
from tests.broker_processes import wait_until
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.live.local_stores import entries_of, stored, streams_of
from tests.jobs.topic_load import SECRET, event, raw_event, registration
from tests.random_log import trouble
from tests.raw_records import append_raw, read_to_end
from trunkline_agent.errors import BackboneUnreachable, Refused
from trunkline_agent.wire.ids import parse_stream_key

JOB = "0a1b2c3d"


@contextmanager
def opened(settings, keyring):
    """A live view that is open inside the block."""
    view = LiveView(settings, keyring)
    try:
        view.open()
        yield view
    finally:
        view.close()


def first_records_of(settings) -> list[Record]:
    """The log's first records, by partition and offset."""
    return list(map(to_record, read_to_end(settings.kafka)))


def assert_agrees(view: LiveView, folded: FoldedLog, timeout_s: float = 30) -> None:
    """Compare rows with their offsets, entries, and how far both are."""
    view.catch_up(timeout_s)
    assert {n: end for n, end in view.next_offsets().items() if end} == folded.next_offsets
    for name in VIEWS:
        expected = {
            key: (row, offset) for key, (_, offset, row) in folded.rows[name].items() if row is not None
        }
        found = {row.key: row for row in view.rows(name)}
        assert {key: (row, view.row_offset(name, key)) for key, row in found.items()} == expected
    assert entries_of(view._state) == folded.entries


@pytest.mark.requirement("JE-09")
@pytest.mark.requirement("CM-04")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_live_view_agrees_with_the_fold_on_records_with_every_kind_of_trouble(
    backbone_settings, keyring, seed
):
    folded = FoldedLog(keyring)
    for record in first_records_of(backbone_settings):
        folded.add(record)
    with opened(backbone_settings, keyring) as view:
        records = append_raw(backbone_settings, trouble(1500, keyring, seed))
        for record in records:
            expected = folded.add(record)
            found = view.wait_settled(Position(record.partition, record.offset), 20)
            said = (found.verdict, found.reason, found.why, found.late, found.status_after, found.seq)
            assert said == (
                expected.verdict,
                expected.reason,
                expected.why,
                expected.late,
                expected.status_after,
                expected.seq,
            )
            assert found.stream == f"{expected.stream_kind}/{expected.stream_id}"
            assert found.logged_at_us == record.logged_at_us
            assert found.value == (record.value if expected.shown is None else expected.shown)
        assert_agrees(view, folded)
        verdicts = {settled.verdict for settled in folded.settled.values()}
        reasons = {settled.reason for settled in folded.settled.values()}
        assert len(verdicts) == 3
        assert len(reasons) >= 10, "the load has lost some of its trouble"


@pytest.mark.requirement("CM-04")
def test_two_live_views_agree_and_one_that_starts_later_catches_up(backbone_settings, keyring):
    folded = FoldedLog(keyring)
    for record in first_records_of(backbone_settings):
        folded.add(record)
    with opened(backbone_settings, keyring) as first:
        records = append_raw(backbone_settings, trouble(600, keyring, seed=3))
        with opened(backbone_settings, keyring) as second:
            records += append_raw(backbone_settings, trouble(200, keyring, seed=4))
            for record in sorted(records, key=lambda one: (one.partition, one.offset)):
                folded.add(record)
            assert_agrees(first, folded)
            assert_agrees(second, folded)


def test_a_verdict_can_be_asked_for_before_and_after_its_record_is_settled(backbone_settings, keyring):
    with opened(backbone_settings, keyring) as view, Publisher(backbone_settings) as publisher:
        before = publisher.append(registration(JOB, keyring)).result(10)
        view.wait_offset(before, 10)
        assert view.wait_settled(before, 1).status_after == "pending"
        next_one = Position(before.partition, before.offset + 1)
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(view.wait_settled(next_one, 20)))
        waiting.start()
        assert publisher.append(event(JOB, 1, "started")).result(10) == next_one
        waiting.join(20)
        (found,) = answers
        assert (found.verdict, found.status_after, found.position) == ("accepted", "running", next_one)
        assert view.row(REGISTRY_JOBS, JOB).status == "running"
        grant = job_grant(JOB, view.entries(f"job/{JOB}"), keyring)
        assert grant is not None
        assert grant.secret == SECRET


def test_a_wait_for_what_is_not_in_the_log_times_out_and_leaves_nothing_behind(backbone_settings, keyring):
    with opened(backbone_settings, keyring) as view:
        with pytest.raises(BackboneUnreachable, match=r"not settled within 0\.05 s"):
            view.wait_settled(Position(0, 500), 0.05)
        with pytest.raises(BackboneUnreachable, match="was not settled within"):
            view.wait_offset(Position(0, 500), 0.05)
        assert not view._waits._promises
        view.catch_up(10)
        assert set(view.lag().values()) == {0}


def test_closing_breaks_the_waits_that_are_under_way(backbone_settings, keyring):
    broken = []

    def wait(view, waits):
        try:
            waits(Position(0, 500), 60)
        except BackboneUnreachable as error:
            broken.append(str(error))

    with opened(backbone_settings, keyring) as view:
        threads = [
            threading.Thread(target=wait, args=(view, waits)) for waits in (view.wait_settled, view.wait_offset)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: view._waits._promises)
    for thread in threads:
        thread.join(10)
    assert len(broken) == 2
    with pytest.raises(BackboneUnreachable, match="closed"):
        view.wait_settled(Position(0, 500), 60)


def test_a_switch_to_a_newer_version_of_the_fold_ends_a_live_view_that_runs_with_the_reason(
    backbone_settings, keyring
):
    newer = FoldSwitched(from_version=FOLD_VERSION, to_version=FOLD_VERSION + 1, offsets={})
    with opened(backbone_settings, keyring) as view, Publisher(backbone_settings) as publisher:
        view.wait_settled(publisher.append(registration(JOB, keyring)).result(10), 10)
        switch = publisher.append(newer.record(door="stack", principal="operator")).result(10)
        wait_until(lambda: view.failure is not None, what="the view's end")
        assert isinstance(view.failure, Refused)
        with pytest.raises(BackboneUnreachable, match=r"has stopped: .* start the newer program"):
            view.wait_settled(switch, 10)
        assert view.next_offsets()[switch.partition] <= switch.offset, "the switch is the newer program's"


def test_a_view_that_is_closed_gives_the_collector_back_what_it_kept_from_it(backbone_settings, keyring):
    """Else all that was garbage when it was opened would stay for ever, its sockets open."""
    with opened(backbone_settings, keyring):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_changes_are_told_in_order_also_those_of_the_replay(backbone_settings, keyring):
    with Publisher(backbone_settings) as publisher:
        publisher.append(registration(JOB, keyring)).result(10)
        view = LiveView(backbone_settings, keyring)
        told, jobs, sessions = [], [], []
        view.on_change(jobs.append, [JobRow])
        view.on_change(sessions.append, [SessionRow])
        view.on_change(lambda change: told.append((change.view, change.key, change.offset, change.row.status)))
        view.on_change(lambda change: 1 // 0)
        try:
            view.open()
            last = publisher.append(event(JOB, 1, "started")).result(10)
            publisher.append(raw_event(JOB, b"rubbish")).result(10)
            view.catch_up(10)
        finally:
            view.close()
    assert [(one[1], one[3]) for one in told] == [(JOB, "pending"), (JOB, "running")]
    assert ([one.key for one in jobs], sessions) == ([JOB, JOB], [])
    assert told[-1][2] == last.offset


def test_an_unsafe_body_is_shown_masked(backbone_settings, keyring):
    with opened(backbone_settings, keyring) as view, Publisher(backbone_settings) as publisher:
        publisher.append(registration(JOB, keyring)).result(10)
        position = publisher.append(event(JOB, 1, detail="PASSWORD=hunter2 at /home/ann/x")).result(10)
        found = view.wait_settled(position, 10)
    assert found.verdict == "accepted"
    assert b"hunter2" not in found.value
    assert "hunter2" not in str(view.row(REGISTRY_JOBS, JOB))


def test_strangers_records_leave_no_trace_in_memory(backbone_settings, keyring):
    with opened(backbone_settings, keyring) as view, Publisher(backbone_settings) as publisher:
        before = streams_of(view._state)
        appends = [publisher.append(event(f"{number:08x}", 1)) for number in range(200)]
        for append in appends:
            assert view.wait_settled(append.result(10), 10).reason == "unknown_stream"
        assert streams_of(view._state) == before


def test_a_record_that_has_left_the_ring_and_is_not_in_the_ledger_is_a_clear_error(backbone_settings, keyring):
    with opened(backbone_settings, keyring) as view, Publisher(backbone_settings) as publisher:
        view.feed = SettledFeed(limit_records=1)
        first = publisher.append(registration(JOB, keyring)).result(10)
        last = publisher.append(event(JOB, 1)).result(10)
        assert view.wait_settled(last, 10).seq == 1
        started = time.monotonic()
        with pytest.raises(BackboneUnreachable, match=r"the ledger .* does not have its verdict yet"):
            view.wait_settled(first, 0.3)
        assert time.monotonic() - started < 5


def test_entries_are_read_only_and_an_unknown_stream_has_none(backbone_settings, keyring):
    with opened(backbone_settings, keyring) as view, Publisher(backbone_settings) as publisher:
        view.wait_settled(publisher.append(registration(JOB, keyring)).result(10), 10)
        stream = f"job/{JOB}"
        assert parse_stream_key(stream.encode())
        draft = view.entries(stream)
        draft.delete("job")
        draft.keep()
        assert set(stored(draft)) == {"progress"}
        assert set(stored(view.entries(stream))) == {"job", "progress"}
        assert stored(view.entries("job/ffffffff")) == {}
