"""Files of blobs beside the lines (DL-27): whole or not there, their own line's alone, removed with it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trunkline_agent.queue import Queue
from trunkline_agent.queue.message_record import blob_in_line, parse_line, reference, to_line

pytestmark = pytest.mark.requirement("DL-27")

DIGEST = "ab" * 32
RECORD: dict[str, Any] = {
    "msg_id": "m1",
    "ts": "2026-11-01T10:00:00.000000Z",
    "from": "ann",
    "to": "bo",
    "topic": "ask",
    "body": "look",
    "in_reply_to": None,
    "ttl_s": None,
}
BYTES = b"\x00\xff" * 50_000


def _with_blob(msg_id: str = "m1", **changed: Any) -> dict[str, Any]:
    blob = blob_in_line(msg_id, DIGEST, len(BYTES), "image/png", is_gone=False)
    return {**RECORD, "msg_id": msg_id, "blob": blob, **changed}


def _parts(end: BaseException | None = None) -> Iterator[bytes]:
    yield BYTES[:1000]
    yield BYTES[1000:]
    if end is not None:
        raise end


def _bodies(root: Path) -> Path:
    return root / "sessions" / "default" / "bodies"


@pytest.mark.parametrize("body", ["look", "l" * 5000])
def test_a_delivered_blob_is_a_file_beside_the_line(tmp_path: Path, body: str) -> None:
    queue = Queue(tmp_path)
    queue.deliver(_with_blob(body=body), "default", _parts())
    (polled,) = queue.poll("bo", session="default")
    assert polled["body"] == body and polled["blob"]["content_type"] == "image/png"
    assert Path(polled["_blob_path"]).read_bytes() == BYTES


@pytest.mark.parametrize("threshold", [0, 3584])
def test_delivered_parts_may_be_the_body(tmp_path: Path, threshold: int) -> None:
    queue = Queue(tmp_path, body_threshold=threshold)
    queue.deliver({**RECORD, "body": reference("m1")}, "default", iter([b"long ", b"text"]))
    (polled,) = queue.poll("bo", session="default")
    assert (polled["body"], polled["_body_source"]) == ("long text", "side-file")


def test_a_content_that_breaks_off_leaves_nothing_and_a_killed_one_does_no_harm(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    with pytest.raises(ZeroDivisionError):
        queue.deliver(_with_blob(), "default", _parts(ZeroDivisionError()))
    assert list(_bodies(tmp_path).iterdir()) == [] and queue.poll("bo", session="default") == []
    # A bridge that was killed in between leaves this, and its next delivery replaces it.
    (_bodies(tmp_path) / ".m1.blob.new").write_bytes(BYTES * 2)
    queue.deliver(_with_blob(), "default", _parts())
    assert [path.name for path in _bodies(tmp_path).iterdir()] == ["m1.blob"]
    assert len(queue.poll("bo", session="default")) == 1


class Killed(BaseException):
    """A kill of the process."""


@pytest.mark.parametrize(
    "step", ["content_written", "side_file_written", "before_append", "appended", "synced"]
)
def test_a_delivery_killed_anywhere_is_whole_or_can_be_repeated(tmp_path: Path, step: str) -> None:
    def kill(reached: str) -> None:
        if reached == step:
            raise Killed

    record = _with_blob(body="l" * 5000)
    with pytest.raises(Killed):
        Queue(tmp_path, step=kill).deliver(record, "default", _parts())
    queue = Queue(tmp_path)
    if step in ("content_written", "side_file_written", "before_append"):
        assert queue.tail(session="default") == []
        queue.deliver(record, "default", _parts())
    (polled,) = queue.poll("bo", session="default")
    assert polled["body"] == record["body"] and Path(polled["_blob_path"]).read_bytes() == BYTES


def test_an_expire_removes_the_blob_with_its_message_and_old_ones_of_no_line(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.deliver(_with_blob(ttl_s=0), "default", _parts())
    queue.deliver(_with_blob("m2"), "default", _parts())
    for name in ("m3.blob", ".m4.blob.new", "notes.pdf"):
        (_bodies(tmp_path) / name).write_bytes(b"x")
    day = time.time() - 2 * 24 * 3600
    for path in _bodies(tmp_path).iterdir():
        os.utime(path, (day, day))
    assert queue.expire("default") == 1
    assert {path.name for path in _bodies(tmp_path).iterdir()} == {"m2.blob", "notes.pdf"}


@pytest.mark.parametrize(
    "blob",
    [
        "m1.blob",
        {},
        {**_with_blob()["blob"], "file": "@file:m2.blob"},
        {**_with_blob()["blob"], "file": "@file:../m1.blob"},
        {**_with_blob()["blob"], "bytes": -1},
        {**_with_blob()["blob"], "bytes": True},
        {**_with_blob()["blob"], "content_type": 1},
        {**_with_blob()["blob"], "sha256": "AB" * 32},
        {**_with_blob()["blob"], "more": 1},
    ],
)
def test_a_field_blob_that_is_not_that_of_its_own_message_is_dropped(blob: object) -> None:
    assert parse_line(to_line({**RECORD, "blob": blob})[:-1]) == RECORD


def test_a_blob_that_is_missing_gone_or_of_another_length_is_an_error_in_the_message(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.deliver(_with_blob("m1"), "default", _parts())
    queue.deliver(_with_blob("m2"), "default", _parts())
    gone = blob_in_line("m3", DIGEST, 5, "image/png", is_gone=True)
    queue.deliver({**RECORD, "msg_id": "m3", "blob": gone}, "default")
    (_bodies(tmp_path) / "m1.blob").unlink()
    (_bodies(tmp_path) / "m2.blob").write_bytes(b"short")
    polled = queue.poll("bo", session="default")
    assert [message["_blob_error"] for message in polled] == [
        "the file of the blob is missing",
        "the file of the blob has another length",
        "the blob was removed before it came to the queue",
    ]
    assert all("_blob_path" not in message and message["body"] == "look" for message in polled)
