"""A blob as its stream settles it (DL-25, DL-26): stored, kept, removed and stored again."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.blob import blobs as registry
from schemas.streams.blob.blobs import BlobRemoved, BlobRow, BlobStored
from schemas.streams.mailboxes.message import Message, MessageBodyRow
from schemas.streams.mailboxes.message_text import FILE_BLOB_TYPE, note_of_blob
from schemas.wire.record import OutgoingRecord
from tests.schemas.hub_records import DIGEST, storing
from tests.schemas.job_records import START_US, said
from tests.schemas.mailbox_records import S_US, at, mailbox_of, post_at, row_of
from tests.schemas.stream_records import accepted_and_refolded, as_read, message

pytestmark = pytest.mark.requirement("DL-25")

REACTOR: dict[str, Any] = {"door": "reactor", "principal": "reactor"}
BLOB = {"digest": DIGEST, "bytes": 5, "content_type": "image/png"}


def upload(request_id: str = "u1", by: str = "ann", **changed: Any) -> OutgoingRecord:
    """The record of an upload."""
    return BlobStored.model_validate(storing(request_id, **changed)).record(door="http", principal=by)


def removal(row: BlobRow) -> OutgoingRecord:
    """The record that removes the blob."""
    body = BlobRemoved(digest=row.digest, object=row.object)
    return body.record(ce_id=f"removed {row.object}/{row.keep_until}", **REACTOR)


def blob_of(settled: Settled) -> BlobRow:
    """The row that an accepted record makes."""
    assert said(settled) == ("accepted", None), settled.why
    (change,) = settled.changes
    assert (change.view, change.key) == ("blobs", DIGEST)
    assert isinstance(change.row, BlobRow)
    return change.row


def refused(settled: Settled, reason: str, why: str) -> None:
    """The record changes nothing, for this reason."""
    assert (settled.reason, settled.changes) == (reason, ())
    assert why in str(settled.why)


def test_an_upload_makes_the_row_of_the_blob() -> None:
    assert blob_of(at(0, upload(), Entries())) == BlobRow(
        digest=DIGEST,
        status="stored",
        bytes=5,
        content_type="image/png",
        object=f"{DIGEST}.1",
        stored_by="http/ann",
        stored_at=START_US,
        keep_s=60,
        keep_until=START_US + 60 * S_US,
    )
    unnamed = upload(content_type=None)
    assert blob_of(at(0, unnamed, Entries())).content_type == "application/octet-stream"


def test_a_second_upload_keeps_the_blob_longer_and_its_media_type() -> None:
    entries = Entries()
    at(0, upload(), entries)
    later = blob_of(at(30 * S_US, upload("u2", "bo", object=f"{DIGEST}.2", content_type="text/html"), entries))
    assert (later.keep_until, later.content_type) == (START_US + 90 * S_US, "image/png")
    assert (later.object, later.stored_by) == (f"{DIGEST}.2", "http/bo")
    shorter = blob_of(at(31 * S_US, upload("u3", keep_s=1), entries))
    assert (shorter.keep_until, shorter.keep_s) == (START_US + 90 * S_US, 60)


def test_the_same_record_again_is_a_duplicate() -> None:
    entries = Entries()
    row = blob_of(at(0, upload(), entries))
    assert said(at(S_US, upload(), entries)) == ("duplicate", None)
    refused(at(S_US, upload(keep_s=61), entries), "seq_conflict", "other content")
    assert said(at(60 * S_US, removal(row), entries)) == ("accepted", None)
    assert said(at(61 * S_US, removal(row), entries)) == ("duplicate", None)
    assert said(at(61 * S_US, upload(), entries)) == ("duplicate", None)


def test_a_digest_has_one_length() -> None:
    entries = Entries()
    at(0, upload(), entries)
    refused(at(0, upload("u2", bytes=6), entries), "seq_conflict", "another length")


@pytest.mark.requirement("DL-26")
def test_a_blob_is_removed_when_its_time_is_over_and_not_before() -> None:
    entries = Entries()
    row = blob_of(at(0, upload(), entries))
    refused(at(60 * S_US - 1, removal(row), entries), "illegal_transition", "still kept")
    gone = blob_of(at(60 * S_US, removal(row), entries))
    assert (gone.status, gone.removed_at, gone.is_live) == ("removed", START_US + 60 * S_US, False)


@pytest.mark.requirement("DL-26")
def test_a_removal_that_comes_late_does_not_end_a_blob_that_was_uploaded_again() -> None:
    entries = Entries()
    row = blob_of(at(0, upload(), entries))
    at(59 * S_US, upload("u2"), entries)
    refused(at(60 * S_US, removal(row), entries), "illegal_transition", "still kept")
    at(70 * S_US, upload("u3", object=f"{DIGEST}.2"), entries)
    refused(at(200 * S_US, removal(row), entries), "illegal_transition", "another object")


@pytest.mark.requirement("DL-26")
def test_a_removed_blob_can_be_stored_again_in_another_object_only() -> None:
    entries = Entries()
    row = blob_of(at(0, upload(), entries))
    at(60 * S_US, removal(row), entries)
    refused(at(61 * S_US, upload("u2"), entries), "illegal_transition", "the object was removed")
    again = blob_of(at(61 * S_US, upload("u3", object=f"{DIGEST}.2", content_type="text/plain"), entries))
    assert (again.status, again.content_type, again.removed_at) == ("stored", "text/plain", None)


@pytest.mark.requirement("DL-26")
def test_without_a_blob_there_is_nothing_to_remove() -> None:
    row = blob_of(at(0, upload(), Entries()))
    refused(at(60 * S_US, removal(row), Entries()), "unknown_stream", "no blob")


@pytest.mark.requirement("HO-03")
def test_a_transition_that_the_table_lacks_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = Entries()
    row = blob_of(at(0, upload(), entries))
    monkeypatch.setitem(registry.BLOB_TRANSITIONS, "stored", frozenset())  # type: ignore[arg-type]
    refused(at(60 * S_US, removal(row), entries), "after_terminal", "the blob is stored")


@pytest.mark.parametrize(
    "changed",
    [
        {"digest": "AB" * 32},
        {"digest": f"{DIGEST}\n"},
        {"bytes": -1},
        {"keep_s": 0},
        {"content_type": "text/html\r\nX: 1"},
        {"object": "../secret"},
        {"other": 1},
    ],
)
def test_a_malformed_upload_is_no_body(changed: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BlobStored.model_validate(storing(**changed))


def test_the_ledger_folds_to_the_same_state() -> None:
    row = blob_of(at(0, upload(), Entries()))
    made = [upload(), upload("u2", "bo"), removal(row), upload("u3", object=f"{DIGEST}.2")]
    accepted_and_refolded(
        as_read(record, offset, START_US + offset * 100 * S_US) for offset, record in enumerate(made)
    )


@pytest.mark.requirement("LM-03")
def test_the_bytes_of_a_blob_count_in_the_mailbox_until_its_message_ends() -> None:
    entries = mailbox_of("m1", blob=BLOB, body="ü")
    assert said(post_at(0, entries, "m2", bytes_most=8, body="ab")) == ("rejected", "mailbox_full")
    assert said(post_at(0, entries, "m2", bytes_most=9, body="ab")) == ("accepted", None)
    assert said(post_at(0, entries, "m3", bytes_most=13, body="", blob=BLOB)) == ("rejected", "mailbox_full")
    assert said(post_at(0, entries, "m3", bytes_most=14, body="", blob=BLOB)) == ("accepted", None)


@pytest.mark.requirement("DL-27")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"body": "see the blob"}, "unauthenticated_record"),
        ({"body": note_of_blob(4)}, "unauthenticated_record"),
        ({"blob": BLOB}, "unauthenticated_record"),
        ({"topic": "news"}, "unauthenticated_record"),
    ],
)
def test_the_file_bridge_posts_a_blob_for_a_long_text_alone(
    changed: dict[str, Any], reason: str | None
) -> None:
    blob = {**BLOB, "content_type": FILE_BLOB_TYPE}
    posted = Message.model_validate(message("m1", **{"blob": blob, "body": note_of_blob(5), **changed}))
    entries = Entries()
    settled = at(0, posted.record(door="file", principal="file"), entries)
    assert said(settled) == ("accepted" if reason is None else "rejected", reason)
    if reason is None:
        again = at(0, posted.record(door="file", principal="file"), entries)
        assert said(again)[0] == "duplicate" and row_of(settled).blob == DIGEST


def test_a_message_has_the_reference_in_its_rows() -> None:
    settled = post_at(0, Entries(), blob=BLOB)
    assert row_of(settled).blob == DIGEST
    (body,) = [one.row for one in settled.changes if isinstance(one.row, MessageBodyRow)]
    assert (body.blob_bytes, body.blob_type) == (5, "image/png")
    assert row_of(post_at(0, Entries())).blob is None
