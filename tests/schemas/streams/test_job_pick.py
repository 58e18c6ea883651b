"""Picking a job: the first session in the log has it, and its winner gets what it needs to work (JE-11)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import Keyring, UnsealError, job_secret_purpose
from schemas.streams.fold import settle
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import BrokerOverlay, JobPick, JobRegistration, JobRow
from schemas.tables.ledger import ledger_row, record_of_row
from tests.schemas.job_records import (
    JOB_ID,
    KEYRING,
    SECRET,
    START_US,
    cancellation,
    document_record,
    pick,
    registration,
    said,
    signed,
)
from tests.schemas.stream_records import as_read

pytestmark = pytest.mark.requirement("JE-11")


def registered(**changed: Any) -> Entries:
    """The entries of a registered job."""
    entries = Entries()
    record = document_record(registration(**changed), "job.registered")
    assert settle(record, entries, KEYRING, Entries()).verdict == "accepted"
    return entries


def picked_by(session: str, entries: Entries, offset: int = 7) -> Settled:
    """Settle a pick of the job by a session."""
    return settle(document_record(pick(session), "job.picked", offset=offset), entries, KEYRING, Entries())


def job_row(settled: Settled) -> JobRow:
    """The registry's row after the record."""
    (change,) = settled.changes
    assert isinstance(change.row, JobRow)
    return change.row


def test_of_two_sessions_the_first_in_the_log_has_the_job() -> None:
    entries = registered()
    won = picked_by("s1", entries)
    assert said(won) == ("accepted", None)
    found = job_row(won)
    assert (found.status, found.session, found.session_wanted) == ("running", "s1", None)
    assert (found.picked_at, found.started_at) == (START_US + 7000, None)
    lost = picked_by("s2", entries)
    assert (*said(lost), lost.status_after) == ("rejected", "illegal_transition", "running")


@pytest.mark.parametrize("end", [None, signed(1, "completed"), signed(1, "error"), cancellation()])
def test_the_session_that_has_the_job_may_ask_again_at_any_time(end: dict[str, Any] | None) -> None:
    entries = registered()
    picked_by("s1", entries)
    if end is not None:
        settle(
            document_record(end, "job.event" if "seq" in end else "job.cancelled"), entries, KEYRING, Entries()
        )
    before = dict(entries.stored())
    assert said(picked_by("s1", entries)) == ("duplicate", None)
    other = "illegal_transition" if end is None else "after_terminal"
    assert said(picked_by("s2", entries)) == ("rejected", other)
    assert entries.stored() == before


def test_a_job_that_wants_a_session_is_taken_by_that_one_only() -> None:
    entries = registered(session="s1")
    refused = picked_by("s2", entries)
    assert (*said(refused), refused.status_after) == ("rejected", "illegal_transition", "pending")
    won = picked_by("s1", entries)
    assert (said(won), job_row(won).session) == (("accepted", None), "s1")


def test_a_job_that_runs_by_its_first_event_cannot_be_picked_any_more() -> None:
    entries = registered()
    settle(document_record(signed(1, "started")), entries, KEYRING, Entries())
    assert said(picked_by("s1", entries)) == ("rejected", "illegal_transition")


def test_a_picked_job_goes_on_as_any_other() -> None:
    entries = registered()
    picked_by("s1", entries)
    found = job_row(settle(document_record(signed(1, "started"), offset=9), entries, KEYRING, Entries()))
    assert (found.status, found.session, found.started_at) == ("running", "s1", START_US + 9000)
    end = document_record(signed(2, "completed"), offset=10, ce_id="the end")
    found = job_row(settle(end, entries, KEYRING, Entries()))
    assert (found.status, found.ended_by, found.picked_at) == ("completed", "the end", START_US + 7000)


def test_the_same_pick_by_any_door_and_gateway_is_the_same_record() -> None:
    one = JobPick(job_id=JOB_ID, session="s1").record(principal="w1", door="http")
    again = JobPick(job_id=JOB_ID, session="s1").record(door="mcp", principal="w1")
    assert (one.ce_id, one.value, one.stream) == (again.ce_id, again.value, f"job/{JOB_ID}")
    assert one.ce_id != JobPick(job_id=JOB_ID, session="s2").record(principal="w1", door="http").ce_id
    assert one.ce_id != JobPick(job_id="00000000", session="s1").record(principal="w1", door="http").ce_id
    entries = registered()
    assert [settle(as_read(r), entries, KEYRING, Entries()).verdict for r in (one, again)] == [
        "accepted",
        "duplicate",
    ]


@pytest.mark.parametrize("session", ["", "../x", "a/b", "+", "x" * 129, "a\nb"])
def test_no_pick_is_made_for_what_is_no_name(session: str) -> None:
    with pytest.raises(ValidationError):
        JobPick(job_id=JOB_ID, session=session).record(principal="w1", door="http")
    assert said(picked_by(session, registered())) == ("rejected", "malformed")


def test_a_pick_of_an_unknown_job_and_one_before_the_registration_are_refused() -> None:
    assert said(picked_by("s1", Entries())) == ("rejected", "unknown_stream")


def test_the_winner_is_granted_secret_description_and_overlay() -> None:
    entries = Entries()
    overlay = BrokerOverlay(host="mq", tls=True, sealed_password="k1:x")
    made = JobRegistration(
        sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
        job_id=JOB_ID,
        description="count the stars",
        broker=overlay,
    ).record(door="cli", principal="operator")
    settle(as_read(made), entries, KEYRING, Entries())
    picked_by("s1", entries)
    grant = job_grant(JOB_ID, entries, KEYRING)
    assert grant is not None
    assert (grant.job_id, grant.description, grant.secret) == (JOB_ID, "count the stars", SECRET)
    assert grant.broker is not None
    assert BrokerOverlay.model_validate_json(grant.broker) == overlay
    settled = settle(document_record(signed(1, "started", secret=grant.secret)), entries, KEYRING, Entries())
    assert settled.verdict == "accepted"


def test_a_job_without_an_overlay_and_an_unknown_job() -> None:
    grant = job_grant(JOB_ID, registered(), KEYRING)
    assert grant is not None
    assert grant.broker is None
    assert job_grant(JOB_ID, Entries(), KEYRING) is None


@pytest.mark.requirement("CM-05")
def test_a_grant_does_not_show_its_secret_and_opens_for_its_own_job_and_key_only() -> None:
    entries = registered()
    assert SECRET not in repr(job_grant(JOB_ID, entries, KEYRING))
    with pytest.raises(UnsealError):
        job_grant("00000000", entries, KEYRING)
    with pytest.raises(UnsealError):
        job_grant(JOB_ID, entries, Keyring({"k2": bytes(32)}, "k2"))


def test_what_was_written_before_picks_existed_is_read_as_a_job_that_nobody_picked() -> None:
    """An entry of fold version 1 ends with `cancelled_by`."""
    entries = registered()
    old = msgspec.msgpack.decode(entries.stored()["progress"])[:9]
    entries = Entries({**entries.stored(), "progress": msgspec.msgpack.encode(old)})
    assert said(picked_by("s1", entries)) == ("accepted", None)


@pytest.mark.requirement("ST-13")
def test_progress_that_fold_version_9_wrote_is_carried_on() -> None:
    entries = registered()
    for seq in range(1, 17):
        assert said(settle(document_record(signed(seq)), entries, KEYRING, Entries())) == ("accepted", None)
    assert set(entries.stored()) == {"job", "progress"}
    version, status, (*seqs, moved, lowest), *rest = msgspec.msgpack.decode(entries.stored()["progress"])
    assert (moved, lowest) == (0, 0)
    old = msgspec.msgpack.encode([version, status, seqs, *rest])
    entries = Entries({**entries.stored(), "progress": old})
    assert said(settle(document_record(signed(3)), entries, KEYRING, Entries())) == ("duplicate", None)
    assert said(settle(document_record(signed(17)), entries, KEYRING, Entries())) == ("accepted", None)
    assert set(entries.stored()) == {"job", "progress", f"seqs/{0:016x}"}
    for seq in (1, 15, 16, 17):
        assert said(settle(document_record(signed(seq)), entries, KEYRING, Entries())) == ("duplicate", None)
        other = document_record(signed(seq, detail="another"))
        assert said(settle(other, entries, KEYRING, Entries())) == ("rejected", "seq_conflict")


def test_a_pick_is_refolded_from_its_ledger_row() -> None:
    record = as_read(JobPick(job_id=JOB_ID, session="s1").record(principal="w1", door="http"), offset=4)
    row = ledger_row(record, settle(record, registered(), KEYRING, Entries()), KEYRING)
    assert (row.door, row.principal, row.status_after, row.wire) == ("http", "w1", "running", None)
    copy = record_of_row(row, KEYRING)
    assert said(settle(copy, registered(), KEYRING, Entries())) == ("accepted", None)
