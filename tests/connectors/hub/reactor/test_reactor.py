"""The reactor on a real Kafka: each derived record once, also when it is killed at any of its steps."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import msgspec
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from kafka.admin import KafkaAdminClient

import connectors.hub.reactor.reactor as reactor_module
from connectors.hub.live.live_view import LiveView
from connectors.hub.reactor.derived_records import derived_records
from schemas.effects.following import DOOR, derived_id
from schemas.log_access.kafka_clients import client_options
from schemas.streams.job.job_registry import (
    REGISTRY_JOBS,
    JobCancellation,
    JobPick,
)
from schemas.streams.mailboxes.message import MAILBOX_VIEW, MESSAGE_BODIES, MESSAGE_POSTED
from schemas.streams.session.sessions import REGISTRY_SESSIONS, SessionCreation
from schemas.tables.ledger import LEDGER
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until, with_kafka
from tests.connectors.folded_log import FoldedLog
from tests.connectors.hub.live.test_live_view import opened
from tests.connectors.hub.reactor.dying_reactor import DyingReactor, reacting
from tests.connectors.hub.reactor.followed import follows
from tests.jobs.topic_load import append_all, event, registration
from tests.schemas.job_records import make_record

STEPS = ("seen", "before_append", "appended", "acknowledged", "committed")
JOBS = [f"{n:08x}" for n in range(0xE0, 0xE6)]


def lives(job: str, keyring, times: int = 2) -> list[OutgoingRecord]:
    """A job's life: picked by a session, worked on, ended; pick and end come `times` times."""
    session = f"s{job[-1]}"
    return [
        registration(job, keyring),
        *[JobPick(job_id=job, session=session).record(principal=session, door="http")] * times,
        event(job, 1, "started"),
        event(job, 2),
        *[event(job, 3, "completed", "all done")] * times,
        JobCancellation(job_id=job, request_id="r1").record(door="cli", principal="operator"),
    ]


def derived_records_of(view: LiveView) -> list[tuple[str, str, str]]:
    """Stream, type and verdict of all that the reactor's door appended."""
    found, _ = view.feed.since(0, 100_000)
    return [
        (one.stream, str(one.type), one.verdict)
        for one in found
        if one.principal is not None and one.principal.startswith(f"{DOOR}/")
    ]


def expected_records(jobs) -> Counter:
    """Return the records that must be accepted once for each of `jobs`."""
    assigned = [(f"session/s{job[-1]}", "session.job_assigned") for job in jobs]
    ended = [(f"session/s{job[-1]}", "session.job_ended") for job in jobs]
    return Counter([*assigned, *ended, *[("mailbox/default/operator", MESSAGE_POSTED) for _ in jobs]])


def accepted(view: LiveView) -> Counter:
    """The reactor's accepted records."""
    return Counter(
        (stream, kind) for stream, kind, verdict in derived_records_of(view) if verdict == "accepted"
    )


def duplicates(view: LiveView) -> int:
    """How many of the reactor's records were duplicates."""
    return sum(verdict == "duplicate" for *_, verdict in derived_records_of(view))


def assert_each_happened_once(view: LiveView, jobs, timeout_s: float = 40) -> None:
    """Wait for all derived records of `jobs`; none is rejected or accepted twice, the rows are right."""
    wait_until(lambda: accepted(view).total() >= 3 * len(jobs), timeout_s, "all derived records")
    view.catch_up(10)
    assert accepted(view) == expected_records(jobs)
    assert {verdict for _, _, verdict in derived_records_of(view)} <= {"accepted", "duplicate"}
    for job in jobs:
        session = view.row(REGISTRY_SESSIONS, f"s{job[-1]}")
        assert (session.job_id, session.jobs_ended, session.created_by) == (None, 1, "reactor/reactor")
    assert len(view.rows(MAILBOX_VIEW)) == len(jobs)


def committed(settings) -> dict[int, int]:
    """By partition, the group's committed offset."""
    admin = KafkaAdminClient(**client_options(settings.kafka))
    try:
        (found,) = admin.list_group_offsets([settings.gateway.reactor_group]).values()
        return {where.partition: told.offset for where, told in found.items()}
    finally:
        admin.close()


@pytest.fixture
def settings(backbone_settings):
    """Settings with a consumer group of this test's own."""
    group = f"reactor-{backbone_settings.kafka.topic}"
    gateway = backbone_settings.gateway.model_copy(update={"reactor_group": group})
    return backbone_settings.model_copy(update={"gateway": gateway})


def test_a_picked_and_ended_job_is_told_to_its_session_and_to_who_registered_it(settings, keyring):
    steps = []
    with opened(settings, keyring) as view, reacting(settings, view, step=steps.append):
        append_all(settings, [record for job in JOBS for record in lives(job, keyring)])
        assert_each_happened_once(view, JOBS)
        (said,) = [row for row in view.rows(MESSAGE_BODIES) if JOBS[0] in row.body]
        told = view.row(MAILBOX_VIEW, f"{said.realm}/{said.recipient}/{said.message_id}")
        assert said.body == f'{{"detail":"all done","job_id":"{JOBS[0]}","status":"completed"}}'
        assert (told.sender, told.kind, told.from_verified) == ("trunkline", "job.completed", True)
        ended_by = view.row(REGISTRY_JOBS, JOBS[0]).ended_by
        assert told.message_id == derived_id(ended_by, MESSAGE_POSTED)
        ends = view.next_offsets()
        wait_until(lambda: {n: e for n, e in ends.items() if e} == committed(settings), 20, "commits")
    assert set(steps) == set(STEPS)


def test_one_request_that_cancels_two_jobs_tells_of_both(settings, keyring):
    with opened(settings, keyring) as view, reacting(settings, view):
        records = [record for job in JOBS[:2] for record in (registration(job, keyring),)]
        append_all(
            settings,
            [
                *records,
                *(
                    JobCancellation(job_id=job, request_id="same").record(door="cli", principal="operator")
                    for job in JOBS[:2]
                ),
            ],
        )
        wait_until(lambda: len(view.rows(MAILBOX_VIEW)) == 2, 20, "two messages")
        assert {row.kind for row in view.rows(MAILBOX_VIEW)} == {"job.cancelled"}
        assert view.rows(REGISTRY_SESSIONS) == []


def session_for(job: str, name: str) -> OutgoingRecord:
    """The record of a session that is made for a job."""
    creation = SessionCreation(session=name, request_id=name, for_job=job)
    return creation.record(door="http", principal="operator")


@pytest.mark.requirement("HB-01")
def test_a_session_made_for_a_job_ends_with_it_also_when_it_never_picked_it(settings, keyring):
    not_picked, picked_by_another, ended = JOBS[:3]

    def ends(job: str) -> list[OutgoingRecord]:
        return [event(job, 1, "started"), event(job, 2, "completed", "done")]

    with opened(settings, keyring) as view, reacting(settings, view):
        append_all(settings, [registration(job, keyring) for job in JOBS[:3]])
        append_all(settings, [session_for(job, f"for-{job}") for job in JOBS[:2]])
        append_all(
            settings,
            [JobPick(job_id=picked_by_another, session="picker").record(principal="picker", door="http")],
        )
        append_all(settings, [one for job in JOBS[:3] for one in ends(job)])
        append_all(settings, [session_for(ended, "late")])

        def statuses() -> dict[str, str]:
            return {row.session: row.status for row in view.rows(REGISTRY_SESSIONS)}

        over = dict.fromkeys((f"for-{not_picked}", f"for-{picked_by_another}", "late"), "terminated")
        wait_until(lambda: statuses() == {**over, "picker": "running"}, 20, "the ends of the sessions")
        assert view.row(REGISTRY_SESSIONS, f"for-{not_picked}").reason == "job completed"
        assert view.row(REGISTRY_SESSIONS, "picker").jobs_ended == 1


@pytest.mark.requirement("CM-04")
def test_killed_at_any_step_every_derived_record_still_happens_once(settings, keyring, tmp_path):
    records = [record for job in JOBS for record in lives(job, keyring, times=1)]
    numbers = {step: 4 if step in ("before_append", "appended") else 1 for step in STEPS}
    dying = {step: DyingReactor(settings, records, step, numbers[step], tmp_path) for step in STEPS}
    for one in dying.values():
        one.wait()
    with ExitStack() as stack:
        views = {step: stack.enter_context(opened(one.settings, keyring)) for step, one in dying.items()}
        before = {step: Counter(derived_records_of(view)) for step, view in views.items()}
        # All at once: each has to wait until the session of the killed one times out.
        for step, view in views.items():
            stack.enter_context(reacting(dying[step].settings, view))
        for view in views.values():
            assert_each_happened_once(view, JOBS)
        assert before["seen"].total() == 0
        for step in ("acknowledged", "committed"):
            assert before[step].total() > 0
        again = before["acknowledged"].total()
        wait_until(lambda: duplicates(views["acknowledged"]) == again, 30, "the uncommitted once more")
        assert duplicates(views["seen"]) == 0
        for view in views.values():
            assert_each_happened_once(view, JOBS)


def test_two_reactors_of_one_group_share_the_work_and_each_derived_record_happens_once(settings, keyring):
    with (
        opened(settings, keyring) as view,
        opened(settings, keyring) as other,
        reacting(settings, view),
    ):
        append_all(settings, [record for job in JOBS[:3] for record in lives(job, keyring)])
        with reacting(settings, other):
            append_all(settings, [record for job in JOBS[3:] for record in lives(job, keyring)])
            assert_each_happened_once(view, JOBS)


def test_a_new_group_on_an_old_log_makes_duplicates_only(settings, keyring):
    with opened(settings, keyring) as view:
        append_all(settings, [record for job in JOBS for record in lives(job, keyring)])
        with reacting(settings, view):
            assert_each_happened_once(view, JOBS)
        gateway = settings.gateway.model_copy(update={"reactor_group": f"new-{settings.kafka.topic}"})
        anew = settings.model_copy(update={"gateway": gateway})
        with reacting(anew, view):
            wait_until(lambda: duplicates(view) >= 18, 20)
        assert_each_happened_once(view, JOBS)


def test_what_the_ledger_has_of_the_reactor_is_not_appended_again_from_an_old_log(
    settings, keyring, monkeypatch
):
    monkeypatch.setattr(reactor_module, "_OLD_S", -1.0)
    with opened(settings, keyring) as view:
        append_all(settings, [record for job in JOBS for record in lives(job, keyring)])
        with reacting(settings, view):
            assert_each_happened_once(view, JOBS)
        write_ledger(settings, view)
        before = len(derived_records_of(view))
        gateway = settings.gateway.model_copy(update={"reactor_group": f"new-{settings.kafka.topic}"})
        anew = settings.model_copy(update={"gateway": gateway})
        with reacting(anew, view):
            # The reactor's own records lie in the log, too, so the ends of both are the same.
            ends = {n: end for n, end in view.next_offsets().items() if end}
            wait_until(lambda: committed(anew) == ends, 20, "the log's end")
        view.catch_up(10)
        assert len(derived_records_of(view)) == before


def write_ledger(settings, view) -> None:
    """A ledger with what the live view has settled, of its columns those that the reactor asks for."""
    found, _ = view.feed.since(0, 100_000)
    doors = [one.principal.partition("/")[0] for one in found]
    logged_at = pa.array([one.logged_at_us for one in found], pa.timestamp("us", "UTC"))
    streams = [one.stream.partition("/") for one in found]
    columns = {
        "door": doors,
        "type": [one.type for one in found],
        "stream_kind": [kind for kind, _, _ in streams],
        "stream_id": [name for _, _, name in streams],
        "ce_id": [one.ce_id for one in found],
        "logged_at": logged_at,
    }
    write_deltalake(settings.table_path(LEDGER), pa.table(columns))


def test_a_derived_record_that_kafka_refuses_is_skipped_and_the_others_happen(settings, keyring, monkeypatch):
    original = reactor_module.derived_records
    monkeypatch.setattr(reactor_module, "derived_records", lambda *asked: _swollen(original(*asked)))
    # The limits are raised so that the broker, not the publisher, has to refuse.
    limits = settings.limits.model_copy(update={"payload_bytes": 64 * 1024 * 1024})
    wide = with_kafka(settings.model_copy(update={"limits": limits}), record_limit_bytes=4 * 1024 * 1024)
    with opened(settings, keyring) as view, reacting(wide, view):
        append_all(settings, [record for job in JOBS[:5] for record in lives(job, keyring)])
        wait_until(lambda: accepted(view).total() >= 10, 40, "the sessions' derived records")
        view.catch_up(10)
        assert {kind for _, kind in accepted(view)} == {"session.job_assigned", "session.job_ended"}
        append_all(settings, lives(JOBS[5], keyring))
        wait_until(lambda: accepted(view).total() == 12, 40, "what comes after")


def _swollen(found: list[OutgoingRecord]) -> list[OutgoingRecord]:
    def swell(record):
        value = b"x" * (2 * 1024 * 1024)
        return msgspec.structs.replace(record, value=value) if record.type == MESSAGE_POSTED else record

    return [swell(record) for record in found]


def test_a_record_that_cannot_be_reacted_to_stops_nobody(settings, keyring, monkeypatch):
    def fail_for_the_first(cause, ask):
        if cause.name == JOBS[0]:
            raise RuntimeError("a bug")
        return derived_records(cause, ask)

    monkeypatch.setattr(reactor_module, "derived_records", fail_for_the_first)
    with opened(settings, keyring) as view, reacting(settings, view):
        append_all(settings, [record for job in JOBS[:2] for record in lives(job, keyring)])
        wait_until(lambda: accepted(view) == expected_records(JOBS[1:2]), 30, "the second job's")


def test_kafka_away_for_a_while_only_delays_the_derived_records(settings, keyring, kafka_broker):
    with opened(settings, keyring) as view, reacting(settings, view):
        append_all(settings, lives(JOBS[0], keyring))
        assert_each_happened_once(view, JOBS[:1])
        kafka_broker.kill()
        kafka_broker.start()

        def appended():
            try:
                return append_all(settings, lives(JOBS[1], keyring))
            except Exception:
                return 0

        wait_until(appended, 60, "Kafka takes records again")
        assert_each_happened_once(view, JOBS[:2])


def test_a_pick_that_came_again_later_under_another_id_has_no_effect(keyring):
    folded = FoldedLog(keyring)

    def settled(record: OutgoingRecord, offset: int):
        made = make_record(
            record.value, record.type, key=record.key, ce_id=record.ce_id, sender="http/s1", offset=offset
        )
        folded.add(made)
        return follows(made, folded.get)

    job = JOBS[0]
    assert settled(registration(job, keyring), 1) == []
    assert len(settled(JobPick(job_id=job, session="s1").record(principal="s1", door="http"), 2)) == 1
    again = msgspec.structs.replace(
        JobPick(job_id=job, session="s1").record(principal="s1", door="http"), ce_id="another"
    )
    assert settled(again, 3) == []
    assert settled(JobPick(job_id=job, session="s2").record(principal="s2", door="http"), 4) == []
    assert settled(event(job, 1, "started"), 5) == []
    assert [one.type for one in settled(event(job, 2, "error"), 6)] == ["session.job_ended", MESSAGE_POSTED]
    assert (
        settled(JobCancellation(job_id=job, request_id="r").record(door="cli", principal="operator"), 7) == []
    )
