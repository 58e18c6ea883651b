"""Blobs at two gateways (DL-25, DL-26, LM-03): whole or refused, and removed after their last message."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.broker_processes import LOOPBACK, BrokerProcess, wait_until
from tests.connectors.doors.http_api.hub_stack import MESSAGES, HubStack, hub_settings, said

pytestmark = pytest.mark.kafka

BLOBS = "/api/hub/blobs"
MIB = 1024 * 1024


# Long enough for an upload and a message on a busy machine: half of it must be left.
KEEP_S = 6
MOST = 6 * MIB


@pytest.fixture(scope="module")
def hub(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubStack]:
    """Two gateways that keep blobs for a few seconds only."""
    folder = tmp_path_factory.mktemp("blobs")
    settings = hub_settings(kafka_broker, folder)
    limits = settings.limits.model_copy(update={"blob_bytes": MOST, "blob_keep_s": KEEP_S})
    stack = HubStack(settings.model_copy(update={"limits": limits}), folder)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


def content(size: int, seed: int = 0) -> bytes:
    """Bytes of this length, the same for the same seed."""
    return random.Random(seed).randbytes(size)


def digest_of(given: bytes) -> str:
    """The SHA-256 in hex."""
    return hashlib.sha256(given).hexdigest()


def upload(client: httpx.Client, given: bytes, kind: str = "image/png", **parameters: str) -> httpx.Response:
    """Upload a content; the answer."""
    return client.put(BLOBS, content=given, headers={"Content-Type": kind}, params=parameters)


def stored(client: httpx.Client, given: bytes) -> str:
    """Upload a content that is taken; its digest."""
    answer = upload(client, given)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["digest"], answer.json()["bytes"]) == (digest_of(given), len(given))
    return str(answer.json()["digest"])


def send(client: httpx.Client, recipient: str, digest: str, **more: Any) -> httpx.Response:
    """Send a message that refers to a blob; the answer."""
    body = {"recipient": recipient, "type": "note", "payload": {"n": 1}, "blob": digest, **more}
    return client.post(MESSAGES, json=body)


def blob_path(name: str, message_id: str) -> str:
    """The path of a message's blob."""
    return f"/api/hub/mailboxes/default/{name}/messages/{message_id}/blob"


def objects(hub: HubStack) -> list[Path]:
    """The objects in the folder of the blobs."""
    return [path for path in Path(hub.settings.blobs_root).rglob("*") if path.is_file()]


def object_of(hub: HubStack, digest: str) -> Path:
    """The only object of a blob."""
    (found,) = [path for path in objects(hub) if path.name.startswith(digest)]
    return found


@pytest.mark.requirement("DL-25")
def test_the_recipient_gets_the_blob_whole_at_another_gateway(hub: HubStack) -> None:
    name, token = hub.principal("worker")
    given = content(5 * MIB + 7)
    digest = stored(hub.operator, given)
    sent = send(hub.other, name, digest)
    assert sent.status_code == 200, sent.text
    mine = hub.client(token)
    (message,) = mine.get(MESSAGES, params={"wait": 5}).json()["messages"]
    assert message["blob"] == {"digest": digest, "bytes": len(given), "content_type": "image/png"}
    assert message["payload"] == {"n": 1}
    path = blob_path(name, message["id"])
    head = hub.client(token, 1).head(path)
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(given)))
    answer = hub.client(token, 1).get(path)
    assert answer.status_code == 200 and answer.content == given
    assert answer.headers["content-type"] == "image/png"
    _, stranger = hub.principal("worker")
    assert hub.client(stranger).get(path).status_code == 403
    assert object_of(hub, digest).stat().st_size == len(given)


@pytest.mark.requirement("HH-23")
def test_a_part_of_a_blob_is_fetched_and_a_download_goes_on_where_it_ended(hub: HubStack) -> None:
    name, token = hub.principal("worker")
    given = content(2 * MIB + 7, 31)
    sent = send(hub.operator, name, stored(hub.operator, given))
    mine, path = hub.client(token), blob_path(name, sent.json()["message_id"])
    whole = mine.get(path)
    etag = whole.headers["etag"]
    assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
    size = len(given)
    for asked, start, end in (
        ("bytes=5-", 5, size),
        ("bytes=0-0", 0, 1),
        (f"bytes=10-{MIB + 20}", 10, MIB + 21),
        (f"bytes=3-{10 * size}", 3, size),
        ("bytes=-4", size - 4, size),
        (f"bytes=-{2 * size}", 0, size),
    ):
        for more in ({}, {"If-Range": etag}):
            part = mine.get(path, headers={"Range": asked, **more})
            assert (part.status_code, part.content) == (206, given[start:end]), asked
            assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
            assert part.headers["etag"] == etag
        head = mine.head(path, headers={"Range": asked})
        assert (head.status_code, head.headers["content-length"]) == (206, str(end - start))
    for ignored in ("bytes=1-2,4-5", "bytes=5-2", "bytes=-", "items=0-1", "bytes=x-", f"bytes={'9' * 30}-"):
        assert mine.get(path, headers={"Range": ignored}).status_code == 200, ignored
    other = mine.get(path, headers={"Range": "bytes=5-", "If-Range": '"other"'})
    assert (other.status_code, other.content) == (200, given)
    for outside in (f"bytes={size}-", "bytes=-0"):
        refused = mine.get(path, headers={"Range": outside})
        assert (refused.status_code, refused.headers["content-range"]) == (416, f"bytes */{size}")
        assert refused.json()["reason"] == "range_not_satisfiable"
    for known in (etag, f'"x", W/{etag}', "*"):
        unchanged = mine.get(path, headers={"If-None-Match": known})
        assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    assert mine.get(path, headers={"If-None-Match": '"x"'}).status_code == 200


@pytest.mark.requirement("HH-22")
def test_an_upload_with_a_coding_or_of_a_part_is_refused(hub: HubStack) -> None:
    before = objects(hub)
    for headers, status in (({"Content-Encoding": "gzip"}, 415), ({"Content-Range": "bytes 0-4/9"}, 400)):
        answer = hub.operator.put(BLOBS, content=b"bytes", headers={"Content-Type": "text/plain", **headers})
        assert answer.status_code == status, answer.text
    assert objects(hub) == before
    charset = {"Content-Type": "text/plain; charset=latin-1"}
    assert hub.operator.put(BLOBS, content=b"\xe4", headers=charset).status_code == 200


@pytest.mark.requirement("DL-25")
def test_an_upload_is_refused_with_a_reason_and_leaves_nothing(hub: HubStack) -> None:
    before, given = len(objects(hub)), content(MOST + 1, 1)
    assert said(upload(hub.operator, given)) == (413, "too_large")
    assert said(hub.operator.put(BLOBS, content=iter([given[:MOST], given[MOST:]]))) == (413, "too_large")
    assert said(upload(hub.operator, b"stars", digest=digest_of(b"moon"))) == (400, "malformed")
    assert said(upload(hub.operator, b"stars", digest="ab")) == (400, "malformed")
    assert said(upload(hub.client(""), b"stars")) == (401, "unauthorized")
    assert len(objects(hub)) == before
    assert upload(hub.operator, b"stars", digest=digest_of(b"stars")).status_code == 200


@pytest.mark.requirement("DL-25")
def test_an_upload_that_ends_too_early_leaves_nothing(hub: HubStack) -> None:
    before = len(objects(hub))
    gateway = hub.gateways[0]
    head = f"PUT {BLOBS} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {gateway.operator_token}\r\n"
    with socket.create_connection((LOOPBACK, gateway.settings.gateway.port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: {4 * MIB}\r\n\r\n".encode() + content(2 * MIB, 2))
        wait_until(lambda: len(objects(hub)) > before, what="the draft")
    wait_until(lambda: len(objects(hub)) == before, what="no draft")


@pytest.mark.requirement("DL-25")
def test_a_message_cannot_refer_to_an_unknown_blob(hub: HubStack) -> None:
    name, _ = hub.principal("worker")
    assert said(send(hub.operator, name, digest_of(b"never uploaded"))) == (404, "not_found")
    assert said(send(hub.operator, name, "AB" * 32)) == (400, "malformed")
    plain = hub.operator.post(MESSAGES, json={"recipient": name, "type": "note"}).json()["message_id"]
    assert said(hub.operator.get(blob_path(name, plain))) == (404, "not_found")
    assert said(hub.operator.get(blob_path(name, "nothing"))) == (404, "not_found")


@pytest.mark.requirement("DL-25")
def test_all_recipients_of_a_broadcast_and_of_a_topic_get_the_blob(hub: HubStack) -> None:
    name, token = hub.principal("worker")
    mine = hub.client(token)
    assert mine.post("/api/hub/topics/pictures/subscribe").status_code == 200
    digest = stored(hub.other, given := content(MIB, 3))
    body = {"type": "note", "payload": None, "blob": digest}
    assert hub.operator.post("/api/hub/topics/pictures", json=body).status_code == 200
    assert hub.client(token, 1).post(f"{MESSAGES}/broadcast", json=body).status_code == 200
    (published,) = mine.get(MESSAGES, params={"wait": 10}).json()["messages"]
    assert published["blob"]["digest"] == digest
    assert hub.client(token, 1).get(blob_path(name, published["id"])).content == given
    at_operator = hub.operator.get(MESSAGES, params={"wait": 10}).json()["messages"]
    assert [one["blob"]["digest"] for one in at_operator] == [digest]


@pytest.mark.requirement("DL-25")
def test_a_damaged_or_lost_blob_is_not_handed_out_as_whole_and_a_new_upload_repairs_it(hub: HubStack) -> None:
    name, _ = hub.principal("worker")
    digest = stored(hub.operator, given := content(2 * MIB, 4))
    path = blob_path(name, send(hub.operator, name, digest).json()["message_id"])
    kept = object_of(hub, digest)
    kept.write_bytes(given[:-1] + bytes([given[-1] ^ 1]))
    with pytest.raises(httpx.RemoteProtocolError):
        hub.operator.get(path)
    stored(hub.operator, given)
    assert hub.operator.get(path).content == given
    for one in objects(hub):
        if one.name.startswith(digest):
            one.unlink()
    assert said(hub.operator.get(path)) == (410, "blob_gone")
    stored(hub.operator, given)
    assert hub.operator.get(path).content == given


@pytest.mark.requirement("DL-26")
def test_a_blob_is_removed_some_time_after_its_last_message_and_can_be_stored_again(hub: HubStack) -> None:
    (ann, of_ann), (bo, of_bo) = hub.principal("worker"), hub.principal("worker")
    digest = stored(hub.operator, given := content(MIB, 5))
    for name in (ann, bo):
        assert send(hub.operator, name, digest).status_code == 200
    (taken,) = hub.client(of_ann).get(MESSAGES).json()["messages"]
    assert hub.client(of_ann, 1).get(blob_path(ann, taken["id"])).content == given
    (last,) = hub.client(of_bo).get(MESSAGES).json()["messages"]
    path = blob_path(bo, last["id"])
    assert hub.client(of_bo, 1).get(path).content == given
    old = object_of(hub, digest)
    wait_until(lambda: not old.exists(), KEEP_S + 15, "the deletion of the object")
    assert said(hub.client(of_bo).get(path)) == said(hub.other.get(path)) == (410, "blob_gone")
    assert hub.other.head(path).status_code == 410
    assert said(send(hub.other, bo, digest)) == (409, "blob_gone")
    stored(hub.other, given)
    again = send(hub.operator, bo, digest).json()["message_id"]
    assert hub.client(of_bo).get(blob_path(bo, again)).content == given
    assert len([one for one in hub.log() if one.type == "blob.removed" and digest in one.stream]) >= 1


@pytest.mark.requirement("LM-03")
def test_the_bytes_of_a_blob_count_in_the_limits(hub: HubStack) -> None:
    (name, _), (sender, token) = hub.principal("worker"), hub.principal("worker")
    limits = {name: {"bytes_most": MIB}, sender: {"bytes_per_minute": MIB}}
    for one, most in limits.items():
        assert hub.operator.post(f"/api/hub/limits/name/{one}", json=most).status_code == 200
    digest = stored(hub.operator, content(MIB - 10, 6))
    sent = send(hub.operator, name, digest, payload="more than ten bytes")
    assert said(sent) == (429, "mailbox_full")
    mine = hub.client(token)
    assert upload(mine, content(MIB - 10, 7)).status_code == 200
    refused = upload(mine, content(MIB // 2, 8))
    assert said(refused) == (429, "rate_limited") and int(refused.headers["Retry-After"]) >= 1
