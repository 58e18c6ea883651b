"""Long bodies of the file queue without a gateway: what waits, what is refused, what is posted (DL-27)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from connectors.doors.file_bridge.mailbox_follower import blob_of_message, is_body, line_with_blob
from connectors.doors.file_bridge.posting_rules import (
    BridgeRules,
    GatewayBlobs,
    KnownLimits,
    NotUploaded,
    Parts,
    body_in,
)
from connectors.doors.file_bridge.records import posting_of
from schemas.settings.settings import LimitSettings, Settings
from schemas.streams.blob.blobs import BlobReference
from schemas.streams.mailboxes.message_text import FILE_BLOB_TYPE, note_of_blob
from tests.connectors.doors.file_bridge.carriers import Log, NoVerdicts, carrier, killed
from tests.connectors.doors.file_bridge.test_bridge_records import LINE, SENT
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.queue import Queue
from trunkline_agent.queue.message_record import parse_line, to_line
from trunkline_agent.queue.session_files import SessionFolder

pytestmark = pytest.mark.requirement("DL-27")

MOST = 50_000
LONG = "ü" * MOST
LONG_BLOB = BlobReference(
    digest=hashlib.sha256(LONG.encode()).hexdigest(), bytes=2 * MOST, content_type=FILE_BLOB_TYPE
)


class Store:
    """Keeps what is uploaded."""

    record_most, blob_most = MOST, 10 * MOST

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def upload(self, parts: Parts) -> BlobReference:
        """Take a content."""
        self.texts.append(b"".join(parts()))
        digest = hashlib.sha256(self.texts[-1]).hexdigest()
        return BlobReference(digest=digest, bytes=len(self.texts[-1]), content_type=FILE_BLOB_TYPE)


def _away(tmp_path: Path) -> GatewayBlobs:
    limits = LimitSettings(payload_bytes=MOST, blob_bytes=10 * MOST)
    return GatewayBlobs(Settings(data_dir=tmp_path / "data", limits=limits), lambda: False)


def _bodies(log: Log) -> dict[str, dict[str, Any]]:
    return {
        record.ce_id: orjson.loads(record.value) for record in log.records if record.stream != "refused/file"
    }


def test_without_a_gateway_a_long_body_waits_in_its_order_and_others_do_not(tmp_path: Path) -> None:
    queue, log = Queue(tmp_path), Log()
    queue.send("ask", LONG, to="bo", sender="ann")
    queue.send("ask", "after", to="bo", sender="ann")
    free = queue.send("ask", "free", to="cy", sender="ann")
    carried = carrier(tmp_path, log.append, _away(tmp_path)).carry_some([])
    assert carried.held == {"bo": "no_gateway"} and list(_bodies(log)) == [free]
    again = carrier(tmp_path, log.append, _away(tmp_path)).carry_held("bo", [], 10)
    assert again.held == {"bo": "no_gateway"} and again.lines == 0
    store = Store()
    assert carrier(tmp_path, log.append, store).carry_held("bo", [], 10).lines == 2
    assert [body["body"] for body in _bodies(log).values()] == ["free", note_of_blob(2 * MOST), "after"]
    assert store.texts == [LONG.encode()]


def test_a_bridge_killed_after_the_upload_posts_the_same_record_again(tmp_path: Path) -> None:
    sent, log, store = Queue(tmp_path).send("ask", LONG, sender="ann"), Log(), Store()
    log.then = killed
    with pytest.raises(BackboneUnreachable):
        carrier(tmp_path, log.append, store).carry_some(["bo", "cy"])
    log.then = lambda: None
    carrier(tmp_path, log.append, store).carry_some(["bo", "cy"])
    first, second = log.records[:2], log.records[2:]
    assert [(one.stream, one.value) for one in first] == [(one.stream, one.value) for one in second]
    assert {one.ce_id for one in log.records} == {sent}
    assert orjson.loads(first[0].value)["blob"] == LONG_BLOB.model_dump()
    # Once for all recipients.
    assert len(store.texts) == 2


def test_a_side_file_that_is_no_text_is_refused_and_not_uploaded(tmp_path: Path) -> None:
    queue, log, store = Queue(tmp_path), Log(), _away(tmp_path)
    sent = queue.send("ask", LONG, to="bo", sender="ann")
    (tmp_path / "sessions" / "default" / "bodies" / f"{sent}.txt").write_bytes(b"\xff" * 2 * MOST)
    assert carrier(tmp_path, log.append, store).carry_some([]).held == {}
    assert [record.stream for record in log.records] == ["refused/file"]


def test_a_listener_gets_no_message_without_its_text(tmp_path: Path) -> None:
    queue, log, rules = Queue(tmp_path), Log(), BridgeRules(NoVerdicts())
    rules.known = KnownLimits([], {}, ["calculator"])
    for session in ("default", "other"):
        assert rules.takes_blobs(session, "calculator") == (session == "other")
    queue.send("ask", LONG, to="calculator", sender="ann")
    short = queue.send("ask", "short", to="calculator", sender="ann")
    carrier(tmp_path, log.append, Store(), rules).carry_some([])
    assert list(_bodies(log)) == [short] and log.records[0].stream == "refused/file"


def test_a_body_over_the_limit_of_blobs_is_left_to_the_log(tmp_path: Path) -> None:
    queue, log = Queue(tmp_path), Log()
    sent = queue.send("ask", "x" * (10 * MOST + 1), to="bo", sender="ann")
    carrier(tmp_path, log.append, _away(tmp_path)).carry_some([])
    assert len(_bodies(log)[sent]["body"]) == 10 * MOST + 1


@pytest.mark.parametrize(
    ("body", "is_blob"),
    [("x" * 40_000, False), ("x" * 46_000, True), ('"' * 22_000, False), ('"' * 23_000, True), (LONG, True)],
)
def test_a_body_is_long_by_its_length_in_json_wherever_the_line_has_it(
    tmp_path: Path, body: str, is_blob: bool
) -> None:
    queue = Queue(tmp_path, body_threshold=30_000)
    queue.send("ask", body, to="bo", sender="ann")
    store = Store()
    with SessionFolder(str(tmp_path), "default", create=False) as folder:
        message = parse_line((tmp_path / "sessions" / "default" / "messages.jsonl").read_bytes()[:-1])
        assert message is not None
        for line in (message, {**message, "body": body}):
            found = body_in(folder, line, store)
            assert (found.blob is not None) == is_blob and found.size == len(body.encode())
            if is_blob:
                with pytest.raises(NotUploaded):
                    body_in(folder, line, _away(tmp_path))


def test_a_posting_has_the_blob_of_the_bridge_and_none_of_the_line() -> None:
    forged = {**LINE, "blob": LONG_BLOB.model_dump()}
    assert "blob" not in orjson.loads(posting_of(forged, "default", "bo").value)
    other = BlobReference(digest="a" * 64, bytes=9, content_type=FILE_BLOB_TYPE)
    posted = orjson.loads(posting_of(forged, "default", "bo", None, other).value)
    assert posted["blob"] == other.model_dump() and posted["body"] == note_of_blob(9)


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("text/plain", "{}", True),
        ("text/markdown; charset=utf-8", "null", True),
        ("application/json", "", True),
        (FILE_BLOB_TYPE, note_of_blob(2 * MOST), True),
        ("text/plain", '{"n":1}', False),
        ("image/png", "{}", False),
    ],
)
def test_a_text_beside_which_nothing_is_said_is_the_body_of_the_line(
    kind: str, body: str, expected: bool
) -> None:
    shown = {"blob": LONG_BLOB.digest, "blob_bytes": 2 * MOST, "blob_type": kind}
    for message in (
        {**SENT, "body": body, **shown},
        {**SENT, "body": body, "blob": {**LONG_BLOB.model_dump(), "content_type": kind}},
    ):
        blob = blob_of_message(message)
        assert blob is not None and blob.content_type == kind
        assert is_body(message, blob) == expected


def test_a_line_says_that_its_blob_is_gone_in_its_body_if_it_has_no_other() -> None:
    for body in ("{}", "look"):
        record = {**LINE, "body": body}
        line = line_with_blob(record, {**SENT, "body": body}, LONG_BLOB, is_gone=True)
        assert parse_line(to_line(line)[:-1]) == line and line["blob"]["file"] is None
        assert ("was removed" in line["body"]) == (body == "{}")
        assert json.loads(to_line(line))["blob"]["sha256"] == LONG_BLOB.digest
