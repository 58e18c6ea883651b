"""When a blob is removed (DL-26): not while a message refers to it, and some time after that."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.hub.blobs.blob_keeper import BlobKeeper
from connectors.hub.blobs.blob_store import BlobStore
from schemas.fold.settled import AppliedChange
from schemas.streams.blob.blobs import BlobRow, BlobStored
from schemas.streams.mailboxes.mailbox_bodies import MailboxClaim
from schemas.streams.mailboxes.message import Message
from schemas.streams.topic.topic_registry import (
    Publication,
    Subscription,
    TopicDelivery,
)
from schemas.wire.record import OutgoingRecord
from tests.broker_processes import wait_until
from tests.connectors.folded_log import FoldedLog
from tests.schemas.hub_records import DIGEST, publication, storing
from tests.schemas.job_records import KEYRING
from tests.schemas.stream_records import as_read, message
from trunkline_agent.errors import BackboneUnreachable

pytestmark = pytest.mark.requirement("DL-26")

S_US = 1_000_000
KEEP_S = 60
BLOB = {"digest": DIGEST, "bytes": 5, "content_type": "image/png"}
BY: dict[str, Any] = {"door": "http", "principal": "bo"}


class Log(FoldedLog):
    """A log that is read as a live view, with the keeper that follows it. Times are seconds from now."""

    def __init__(self, folder: Path) -> None:
        super().__init__(KEYRING)
        self.offset = 0
        self.begun_at = time.time_ns() // 1000
        self.is_behind = False
        # Called when the live view catches up with the log, for records that come then.
        self.arriving: Callable[[], None] = lambda: None
        self.appended: list[OutgoingRecord] = []
        self.store = BlobStore(str(folder), folder)
        self.keeper = BlobKeeper(self, self.appended.append, self.store)  # type: ignore[arg-type]
        # The keeper keeps all for a while after its start, and this one started long ago.
        self.keeper._begun_at = 0

    def put(self, made: OutgoingRecord, at_s: float = 0) -> None:
        """Settle a record, which must be accepted, and report its changes to the keeper."""
        self.offset += 1
        settled = self.add(as_read(made, self.offset, self.begun_at + round(at_s * S_US)))
        assert settled.verdict == "accepted", settled.why
        for change in settled.changes:
            self.keeper.on_change(AppliedChange(change.view, change.key, self.offset, change.row))

    def live(self, row_type: type[Any]) -> list[Any]:
        """Return the live rows of a type, as `LiveView.live`."""
        return [row for _, _, row in self.rows[row_type.VIEW].values() if row.is_live]

    def catch_up(self, timeout_s: float) -> None:
        """Fail if the live view is behind, as `LiveView.catch_up`."""
        if self.is_behind:
            raise BackboneUnreachable("not settled in time")
        self.arriving()

    def upload(self, at_s: float = 0, request_id: str = "u1", **changed: Any) -> None:
        """Store the blob."""
        body = BlobStored.model_validate(storing(request_id, keep_s=KEEP_S, **changed))
        self.put(body.record(**BY), at_s)

    def post(self, message_id: str = "m1", at_s: float = 0) -> None:
        """Post a message that refers to the blob."""
        posted = Message.model_validate(message(message_id, blob=BLOB))
        self.put(posted.record(**BY), at_s)

    def take(self, request_id: str, limit: int, at_s: float) -> None:
        """Take messages for good."""
        self.put(MailboxClaim(to="bo", request_id=request_id, limit=limit).record(**BY), at_s)

    @property
    def row(self) -> BlobRow:
        """The blob."""
        found = self.get(BlobRow, DIGEST)
        assert isinstance(found, BlobRow)
        return found

    def ends_after_s(self) -> float | None:
        """Return after how many seconds the blob ends; None while a message refers to it."""
        moment = self.keeper.moment_of(self.row)
        return None if moment is None else (moment - self.begun_at) / S_US


def test_a_blob_without_a_message_ends_some_time_after_its_upload(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.upload(-10)
    assert log.ends_after_s() == KEEP_S - 10
    log.upload(-5, "u2")
    assert log.ends_after_s() == KEEP_S - 5


def test_a_blob_stays_while_a_message_refers_to_it_and_some_time_after_the_last(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.upload(-1000)
    log.post("m1", -990)
    log.post("m2", -980)
    assert log.ends_after_s() is None
    log.take("r1", 1, -20)
    assert log.ends_after_s() is None
    log.take("r2", 1, -10)
    assert log.ends_after_s() == KEEP_S - 10


def test_a_message_to_a_topic_keeps_the_blob_until_its_copies_are_posted(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.upload(-1000)
    log.put(Subscription(topic="news", subscriber="bo", request_id="s1").record(**BY), -999)
    published = Publication.model_validate(publication(blob=BLOB))
    log.put(published.record(**BY), -990)
    assert log.ends_after_s() is None
    log.put(TopicDelivery(topic="news", message_id="p1").record(ce_id="d1", **BY), -10)
    assert log.ends_after_s() == KEEP_S - 10


def test_a_restarted_gateway_keeps_all_blobs_for_their_time_again(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.upload(-1000)
    assert log.ends_after_s() == KEEP_S - 1000
    again = BlobKeeper(log, log.appended.append, log.store)  # type: ignore[arg-type]
    assert (again.moment_of(log.row) or 0) > time.time_ns() // 1000 + (KEEP_S - 5) * S_US
    log.post("m1", -990)
    later = BlobKeeper(log, log.appended.append, log.store)  # type: ignore[arg-type]
    later.open()
    try:
        assert later.moment_of(log.row) is None
    finally:
        later.close()


@pytest.mark.requirement("DL-25")
def test_a_new_message_may_refer_to_a_blob_that_does_not_end_soon(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.upload(-KEEP_S / 2 + 5)
    assert log.keeper.is_usable(log.row)
    log = Log(tmp_path)
    log.upload(-KEEP_S / 2 - 5)
    assert not log.keeper.is_usable(log.row)
    log.post("m1", -1)
    assert log.keeper.is_usable(log.row)


@pytest.mark.long
def test_the_keeper_removes_a_blob_and_then_deletes_its_object(tmp_path: Path) -> None:
    log = Log(tmp_path)
    draft = log.store.new_draft()
    draft.write(b"stars")
    name = log.store.keep(draft)
    draft.close()
    log.upload(-1000, object=name)
    log.post("m1", -990)
    log.keeper.open()
    try:
        time.sleep(0.7)
        assert log.appended == []
        log.take("r1", 1, -KEEP_S - 1)
        wait_until(lambda: bool(log.appended), 5, "the removal")
        assert log.store.size(name) == 5
        log.put(log.appended[0])
        wait_until(lambda: log.store.size(name) is None, 5, "the deletion of the object")
    finally:
        log.keeper.close()


def test_a_gateway_that_is_behind_the_log_removes_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.upload(-1000)
    log.is_behind = True
    record = log.keeper.record_of(log.row, log.begun_at)
    log.keeper._append_removal(record)
    assert log.appended == []
    log.is_behind = False
    log.keeper._append_removal(record)
    assert [one.type for one in log.appended] == ["blob.removed"]


def test_a_message_that_came_at_the_last_moment_keeps_the_blob(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.upload(-1000)
    record = log.keeper.record_of(log.row, log.begun_at)
    log.post("m1")
    log.keeper._append_removal(record)
    assert log.appended == []


def test_the_sweep_deletes_objects_of_no_blob_alone(tmp_path: Path) -> None:
    log = Log(tmp_path)
    names = []
    for _ in range(2):
        draft = log.store.new_draft()
        draft.write(b"stars")
        names.append(log.store.keep(draft))
        draft.close()
    log.upload(object=names[0])
    log.keeper.sweep(60)
    assert [log.store.size(name) for name in names] == [5, 5]
    log.is_behind = True
    log.keeper.sweep(-1)
    assert [log.store.size(name) for name in names] == [5, 5]
    log.is_behind = False
    log.arriving = lambda: log.upload(0, "u2", object=names[1])
    log.keeper.sweep(-1)
    assert [log.store.size(name) for name in names] == [5, 5]
    log.arriving = lambda: None
    log.keeper.sweep(-1)
    assert [log.store.size(name) for name in names] == [None, 5]
