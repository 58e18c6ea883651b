"""Registering and cancelling a job: the records that doors make and what the fold makes of them."""

from __future__ import annotations

import json

import pytest
from pydantic import SecretStr, ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import job_secret_purpose
from schemas.streams.fold import settle
from schemas.streams.job.job_registry import (
    BrokerOverlay,
    JobCancellation,
    JobRegistration,
    JobRow,
)
from schemas.tables.ledger import ledger_row
from tests.schemas.job_records import JOB_ID, KEYRING, START_US, document_record, event, said
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.signing import new_secret, sign_event

SECRET = new_secret()


def row(settled: Settled) -> JobRow:
    """The registry's row after the record."""
    (change,) = settled.changes
    assert (change.view, change.key) == ("registry_jobs", JOB_ID)
    assert change.row is not None
    return change.row


@pytest.mark.requirement("JE-10")
def test_a_registered_job_is_pending_and_believes_the_secret_it_was_given() -> None:
    entries = Entries()
    overlay = BrokerOverlay(host="mq", port=8883, tls=True)
    made = JobRegistration(
        sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
        job_id=JOB_ID,
        description="count\nthe stars",
        session="s1",
        broker=overlay,
    ).record(door="cli", principal="operator")
    first = settle(as_read(made), entries, KEYRING, Entries())
    assert said(first) == ("accepted", None)
    found = row(first)
    assert (found.status, found.description, found.session_wanted) == ("pending", "count\nthe stars", "s1")
    assert (found.registered_by, found.registered_at, found.last_seq) == ("cli/operator", START_US, 0)
    assert (found.session, found.picked_at) == (None, None)
    body = sign_event(event(1, "started"), SECRET)
    assert row(settle(document_record(body), entries, KEYRING, Entries())).status == "running"


@pytest.mark.requirement("JE-10")
@pytest.mark.requirement("CM-05")
def test_the_secret_of_a_registration_travels_sealed() -> None:
    made = JobRegistration(
        sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)), job_id=JOB_ID, description="x"
    ).record(door="cli", principal="operator")
    settled = settle(as_read(made), Entries(), KEYRING, Entries())
    assert SECRET.encode() not in made.value
    assert SECRET not in repr(ledger_row(as_read(made), settled, KEYRING))


@pytest.mark.requirement("CM-04")
def test_a_registration_sent_again_by_another_connection_has_one_effect() -> None:
    entries = Entries()
    made = JobRegistration(
        sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)), job_id=JOB_ID, description="x"
    ).record(door="cli", principal="operator")
    again = JobRegistration(
        sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)), job_id=JOB_ID, description="x"
    ).record(door="cli", principal="operator")
    assert (made.ce_id, made.value) == (again.ce_id, again.value)
    assert said(settle(as_read(made), entries, KEYRING, Entries())) == ("accepted", None)
    assert said(settle(as_read(again, 1), entries, KEYRING, Entries())) == ("duplicate", None)
    other = JobRegistration(
        sealed_secret=KEYRING.seal(new_secret().encode(), job_secret_purpose(JOB_ID)),
        job_id=JOB_ID,
        description="x",
    ).record(door="cli", principal="operator")
    assert said(settle(as_read(other, 2), entries, KEYRING, Entries())) == ("rejected", "seq_conflict")


@pytest.mark.requirement("JE-08")
def test_a_job_is_cancelled_once_and_a_retry_with_the_same_request_is_a_duplicate() -> None:
    entries = Entries()
    settle(
        as_read(
            JobRegistration(
                sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
                job_id=JOB_ID,
                description="x",
            ).record(door="cli", principal="operator")
        ),
        entries,
        KEYRING,
        Entries(),
    )
    cancel = JobCancellation(job_id=JOB_ID, reason="no stars", request_id="r1").record(
        door="cli", principal="operator"
    )
    found = row(settle(as_read(cancel, 5), entries, KEYRING, Entries()))
    assert (found.status, found.ended_at, found.started_at) == ("cancelled", START_US + 5000, None)
    assert said(settle(as_read(cancel, 6), entries, KEYRING, Entries())) == ("duplicate", None)
    other = settle(
        as_read(JobCancellation(job_id=JOB_ID, request_id="r9").record(door="cli", principal="operator"), 7),
        entries,
        KEYRING,
        Entries(),
    )
    assert (other.reason, other.status_after) == ("after_terminal", "cancelled")
    late = settle(document_record(sign_event(event(1, "started"), SECRET)), entries, KEYRING, Entries())
    assert (late.reason, late.status_after) == ("after_terminal", "cancelled")


def test_a_cancellation_is_told_apart_by_sender_and_job_and_request_and_not_by_its_reason() -> None:
    """A derived record of a job's end takes its id from the cancellation's id: two jobs must not share it."""
    one = JobCancellation(job_id=JOB_ID, request_id="r1").record(principal="ann", door="cli")
    others = [
        JobCancellation(job_id=JOB_ID, request_id="r1").record(principal="bo", door="cli"),
        JobCancellation(job_id="00000000", request_id="r1").record(principal="ann", door="cli"),
        JobCancellation(job_id=JOB_ID, request_id="r2").record(principal="ann", door="cli"),
    ]
    assert one.ce_id not in {other.ce_id for other in others}
    assert (
        one.ce_id
        == JobCancellation(job_id=JOB_ID, request_id="r1", reason="why")
        .record(principal="ann", door="cli")
        .ce_id
    )


@pytest.mark.parametrize("description", ["x" * 4001, "bell \u0007", "\u009b31m", "\u007f"])
def test_a_description_with_control_characters_or_too_long_is_not_sent(description: str) -> None:
    with pytest.raises(ValidationError):
        JobRegistration(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
            job_id=JOB_ID,
            description=description,
        ).record(door="cli", principal="operator")


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("name", ["../x", "a/b", "#", "", "x" * 129, "a b"])
def test_session_and_request_are_names(name: str) -> None:
    with pytest.raises(ValidationError):
        JobRegistration(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
            job_id=JOB_ID,
            description="x",
            session=name,
        ).record(door="cli", principal="operator")
    if name:
        with pytest.raises(ValidationError):
            JobCancellation(job_id=JOB_ID, request_id=name).record(door="cli", principal="operator")


def test_a_broker_overlay_has_no_field_for_a_plain_password() -> None:
    with pytest.raises(ValidationError):
        BrokerOverlay.model_validate({"password": "x"})
    assert "x" not in json.dumps(BrokerOverlay().model_dump())
    assert SecretStr("x") not in BrokerOverlay().model_dump().values()
