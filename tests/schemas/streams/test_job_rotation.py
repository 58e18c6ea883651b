"""A job's secret is rotated: which secrets sign until when, by the log's clock, and what stays the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import job_secret_purpose
from schemas.streams.fold import settle
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import JobRegistration, JobRow, JobSecretRotation
from schemas.tables.ledger import ledger_row, record_of_row
from schemas.wire.wire_body import OVERLAP_LIMIT_MS
from tests.schemas.job_records import (
    JOB_ID,
    KEYRING,
    OTHER_SECRET,
    SECRET,
    START_US,
    cancellation,
    document_record,
    registration,
    rotation,
    said,
    signed,
)
from tests.schemas.stream_records import as_read
from trunkline_agent.wire.mqtt_password import job_of_rotated_user, job_user
from trunkline_agent.wire.signing import new_secret

pytestmark = [pytest.mark.requirement("JE-05"), pytest.mark.requirement("CM-05")]

THIRD_SECRET = "a third secret of the tests"
OVERLAP_MS = 5


def registered() -> Entries:
    """The entries of a job with SECRET."""
    entries = Entries()
    assert (
        said(settle(document_record(registration(), "job.registered"), entries, KEYRING, Entries()))[0]
        == "accepted"
    )
    return entries


def rotated(entries: Entries, body: dict[str, Any], offset: int = 10, ce_id: str = "") -> Settled:
    """Settle a rotation that is logged at `offset` milliseconds."""
    ce_id = ce_id or body["request_id"]
    return settle(
        document_record(body, "job.secret_rotated", offset=offset, ce_id=ce_id), entries, KEYRING, Entries()
    )


def event_at(entries: Entries, offset: int, seq: int, secret: str, **changed: Any) -> tuple[str, str | None]:
    """Settle an event that is logged at `offset` milliseconds."""
    return said(
        settle(
            document_record(signed(seq, secret=secret, **changed), offset=offset), entries, KEYRING, Entries()
        )
    )


def job_row(settled: Settled) -> JobRow:
    (change,) = settled.changes
    assert isinstance(change.row, JobRow)
    return change.row


BAD = ("rejected", "bad_signature")
GOOD = ("accepted", None)


def test_both_secrets_sign_during_the_overlap_and_then_the_new_one_alone() -> None:
    entries = registered()
    assert event_at(entries, 9, 1, OTHER_SECRET) == BAD
    row = job_row(rotated(entries, rotation(overlap_ms=OVERLAP_MS)))
    assert (row.secret_rotations, row.old_secret_ends_at) == (1, START_US + 15_000)
    assert event_at(entries, 11, 1, SECRET) == GOOD
    assert event_at(entries, 12, 2, OTHER_SECRET) == GOOD
    assert event_at(entries, 14, 3, SECRET) == GOOD
    assert event_at(entries, 15, 4, SECRET) == BAD
    assert event_at(entries, 16, 4, OTHER_SECRET) == GOOD


def test_without_an_overlap_the_old_secret_is_worth_nothing_at_once() -> None:
    entries = registered()
    rotated(entries, rotation(overlap_ms=0))
    assert event_at(entries, 10, 1, SECRET) == BAD
    assert event_at(entries, 10, 1, OTHER_SECRET) == GOOD


def test_a_rotation_during_an_overlap_leaves_one_old_secret_the_last() -> None:
    entries = registered()
    rotated(entries, rotation(overlap_ms=60_000))
    rotated(entries, rotation("t2", THIRD_SECRET, OVERLAP_MS), offset=11)
    assert event_at(entries, 12, 1, SECRET) == BAD
    assert event_at(entries, 12, 1, OTHER_SECRET) == GOOD
    assert event_at(entries, 12, 2, THIRD_SECRET) == GOOD
    assert event_at(entries, 16, 3, OTHER_SECRET) == BAD


def test_an_event_that_is_signed_anew_after_any_number_of_rotations_is_the_same_event() -> None:
    entries = registered()
    assert event_at(entries, 1, 1, SECRET) == GOOD
    rotated(entries, rotation(overlap_ms=60_000))
    assert event_at(entries, 11, 2, SECRET) == GOOD
    assert event_at(entries, 12, 1, OTHER_SECRET) == ("duplicate", None)
    rotated(entries, rotation("t2", THIRD_SECRET, 0), offset=20)
    for seq in (1, 2):
        assert event_at(entries, 21, seq, THIRD_SECRET) == ("duplicate", None)
        other = event_at(entries, 21, seq, THIRD_SECRET, detail="other")
        assert other == ("rejected", "seq_conflict")


def test_the_same_request_again_is_the_same_rotation_also_after_others_and_after_the_end() -> None:
    entries = registered()
    first, second = rotation(overlap_ms=OVERLAP_MS), rotation("t2", THIRD_SECRET, OVERLAP_MS)
    assert said(rotated(entries, first)) == GOOD
    assert said(rotated(entries, second, 11)) == GOOD
    before = dict(entries.stored())
    assert said(rotated(entries, first, 12)) == ("duplicate", None)
    conflict = rotated(entries, rotation(overlap_ms=OVERLAP_MS + 1), 12)
    assert said(conflict) == ("rejected", "seq_conflict")
    assert dict(entries.stored()) == before
    settle(document_record(cancellation(), "job.cancelled"), entries, KEYRING, Entries())
    assert said(rotated(entries, second, 13)) == ("duplicate", None)


def test_a_rotation_of_an_unknown_job_of_an_ended_one_or_to_the_same_secret_is_refused() -> None:
    assert said(rotated(Entries(), rotation())) == ("rejected", "unknown_stream")
    entries = registered()
    assert said(rotated(entries, rotation("t1", SECRET))) == ("rejected", "illegal_transition")
    settle(document_record(cancellation(), "job.cancelled"), entries, KEYRING, Entries())
    found = rotated(entries, rotation())
    assert (*said(found), found.status_after) == ("rejected", "after_terminal", "cancelled")


@pytest.mark.parametrize("sealed", ["", "k1:", "k9:AAAA", registration()["sealed_secret"][:-8] + "AAAAAAA="])
def test_a_secret_that_does_not_open_for_this_job_replaces_none(sealed: str) -> None:
    entries = registered()
    assert said(rotated(entries, rotation(sealed_secret=sealed))) == BAD
    assert event_at(entries, 11, 1, SECRET) == GOOD


def test_the_grant_after_a_rotation_has_the_new_secret_and_the_registration_comes_again_as_it_was() -> None:
    entries, (first, second) = Entries(), (new_secret(), new_secret())
    made = JobRegistration(
        sealed_secret=KEYRING.seal(first.encode(), job_secret_purpose(JOB_ID)),
        job_id=JOB_ID,
        description="count the stars",
    ).record(door="cli", principal="operator")
    settle(as_read(made), entries, KEYRING, Entries())
    record = JobSecretRotation(
        sealed_secret=KEYRING.seal(second.encode(), job_secret_purpose(JOB_ID)),
        job_id=JOB_ID,
        overlap_ms=OVERLAP_MS,
        request_id="t1",
    ).record(door="cli", principal="operator")
    settled = settle(as_read(record, 10), entries, KEYRING, Entries())
    assert said(settled) == GOOD
    grant = job_grant(JOB_ID, entries, KEYRING)
    assert grant is not None
    assert (grant.secret, grant.old_secret, grant.registered_secret) == (second, first, first)
    assert grant.old_until == START_US + 15_000
    assert said(settle(as_read(made, 11), entries, KEYRING, Entries())) == ("duplicate", None)
    row = ledger_row(as_read(record, 10), settled, KEYRING)
    for shown in (repr(grant), repr(row), record.value.decode(), repr(entries.stored())):
        assert first not in shown and second not in shown
    again = Entries()
    settle(as_read(made), again, KEYRING, Entries())
    copy = record_of_row(row, KEYRING)
    assert settle(copy, again, KEYRING, Entries()) == settled
    assert again.stored() == entries.stored()


def test_a_rotation_is_told_apart_by_sender_job_and_request_and_not_by_what_it_brings() -> None:
    one = JobSecretRotation(
        sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
        job_id=JOB_ID,
        overlap_ms=0,
        request_id="r1",
    ).record(principal="ann", door="cli")
    others = [
        JobSecretRotation(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
            job_id=JOB_ID,
            overlap_ms=0,
            request_id="r1",
        ).record(principal="bo", door="cli"),
        JobSecretRotation(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose("00000000")),
            job_id="00000000",
            overlap_ms=0,
            request_id="r1",
        ).record(principal="ann", door="cli"),
        JobSecretRotation(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
            job_id=JOB_ID,
            overlap_ms=0,
            request_id="r2",
        ).record(principal="ann", door="cli"),
    ]
    assert one.ce_id not in {other.ce_id for other in others}
    same = JobSecretRotation(
        sealed_secret=KEYRING.seal(OTHER_SECRET.encode(), job_secret_purpose(JOB_ID)),
        job_id=JOB_ID,
        overlap_ms=9,
        request_id="r1",
    ).record(principal="ann", door="cli")
    assert one.ce_id == same.ce_id


@pytest.mark.parametrize(("overlap_ms", "request_id"), [(-1, "r"), (OVERLAP_LIMIT_MS + 1, "r"), (0, "a/b")])
def test_no_rotation_is_made_with_a_bad_overlap_or_request(overlap_ms: int, request_id: str) -> None:
    with pytest.raises(ValidationError):
        JobSecretRotation(
            sealed_secret=KEYRING.seal(SECRET.encode(), job_secret_purpose(JOB_ID)),
            job_id=JOB_ID,
            overlap_ms=overlap_ms,
            request_id=request_id,
        ).record(door="cli", principal="operator")


def test_what_was_written_before_secrets_were_rotated_is_read_as_a_job_with_its_first_one() -> None:
    """An entry of fold version 5 ends with `notify`; its events are known by their signature."""
    entries = registered()
    assert event_at(entries, 1, 1, SECRET) == GOOD
    old = msgspec.msgpack.decode(entries.stored()["job"])[:10]
    entries = Entries({**entries.stored(), "job": msgspec.msgpack.encode(old)})
    assert said(rotated(entries, rotation(overlap_ms=0))) == GOOD
    assert event_at(entries, 11, 1, OTHER_SECRET) == ("duplicate", None)
    assert event_at(entries, 11, 2, OTHER_SECRET) == GOOD


def test_an_mqtt_user_is_the_job_or_after_a_rotation_the_job_and_the_tag_of_the_secret() -> None:
    assert job_user(JOB_ID, new_secret()) == JOB_ID
    assert job_user(JOB_ID, "0a1b2c3d.rest") == f"{JOB_ID}.0a1b2c3d"
    for odd in ("0a1b2c3.rest", "0A1B2C3D.rest", "x0a1b2c3d.", "a.b", ".", "../0a1b2c3d.x", ""):
        assert job_user(JOB_ID, odd) == JOB_ID
    assert job_of_rotated_user(f"{JOB_ID}.0a1b2c3d") == JOB_ID
    for user in (JOB_ID, "agent.0a1b2c3d", f"{JOB_ID}.0a1b2c3d\n", "operator", f"{JOB_ID}."):
        assert job_of_rotated_user(user) is None
