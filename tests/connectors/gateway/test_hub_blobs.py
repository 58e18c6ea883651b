"""Blobs at two gateways (DL-25, DL-26, LM-03): whole or refused, and removed after their last message."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.broker_processes import wait_until
from tests.connectors.gateway.hub_stack import MESSAGES, HubStack

pytestmark = pytest.mark.kafka

BLOBS = "/api/hub/blobs"
MIB = 1024 * 1024


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
    folder = Path(hub.settings.blobs_root)
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


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
    wait_until(lambda: len(objects(hub)) == 1, what="one object")
