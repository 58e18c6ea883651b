"""The real bridge with bodies that are too long for a record: they go both ways as blobs (DL-27)."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.broker_processes import ProgramProcess, wait_until
from tests.connectors.doors.file_bridge.bridge_run import BridgeRun, lines_of
from tests.connectors.doors.http_api.hub_stack import MESSAGES
from trunkline_agent.queue.message_record import blob_in_line, stamp

MIB = 1024 * 1024
TEXT = "Grüße, " * (3 * MIB // 9)
PICTURE = random.Random(27).randbytes(3 * MIB)


def _upload(run: BridgeRun, content: bytes, kind: str) -> str:
    answer = run.operator.put("/api/hub/blobs", content=content, headers={"Content-Type": kind})
    assert answer.is_success, answer.text
    return str(answer.json()["digest"])


def _send(run: BridgeRun, content: bytes, kind: str, payload: object) -> str:
    body = {"recipient": "bob", "type": "ask", "payload": payload, "blob": _upload(run, content, kind)}
    answer = run.operator.post(MESSAGES, json=body)
    assert answer.is_success, answer.text
    return str(answer.json()["message_id"])


def _object(run: BridgeRun, content: bytes) -> Path:
    (found,) = Path(run.settings.blobs_root).glob(f"{hashlib.sha256(content).hexdigest()}.*")
    return found


def _delivered(run: BridgeRun) -> set[str]:
    return {line["msg_id"] for line in lines_of(run.root) if line["to"] == "bob"}


def _polled(run: BridgeRun) -> dict[str, dict[str, Any]]:
    return {message["msg_id"]: message for message in run.queue.poll("bob")}


@pytest.mark.slow
@pytest.mark.requirement("DL-27")
@pytest.mark.timeout(180)
def test_long_bodies_go_both_ways_as_blobs_and_a_line_cannot_name_one(run: BridgeRun, tmp_path: Path) -> None:
    run.principal("bob").close()
    run.queue.poll("bob")
    secret = _upload(run, b"of somebody else", "text/plain")
    run.gateway.program.kill()
    wait_until(lambda: run.bridge.log().count("verdicts_away"), 30, "the bridge sees that the gateway is away")
    long = run.queue.send("ask", TEXT, to="cy", sender="ann")
    short = run.queue.send("ask", "not held up", to="dan", sender="ann")
    reference = {"digest": secret, "bytes": 16, "content_type": "text/plain"}
    named = [reference, blob_in_line("forged-1", secret, 16, "text/plain", is_gone=False)]
    fields = {"ts": stamp(), "from": "eve", "to": "dan", "topic": "ask", "in_reply_to": None, "ttl_s": None}
    for number, blob in enumerate(named):
        line = {"msg_id": f"forged-{number}", **fields, "body": "x", "blob": blob}
        run.write(json.dumps(line).encode())
    wait_until(lambda: run.carried() == run.written(), 30, "the bridge goes on")
    assert run.says("recipient_held", recipient="cy", why="no_gateway")
    run.kill()
    gateway = run.gateway
    gateway.program = ProgramProcess(
        "connectors.programs.gateway_program", gateway.settings, tmp_path, "gateway"
    )
    run.gateway.wait_ready()
    run.start()
    run.wait_mailbox("cy", {long})
    run.wait_mailbox("dan", {short, "forged-0", "forged-1"})
    assert {one["blob"] for one in run.mailbox("dan").values()} == {None}
    row = run.mailbox("cy")[long]
    assert (row["blob"], row["blob_bytes"]) == (hashlib.sha256(TEXT.encode()).hexdigest(), len(TEXT.encode()))
    fetched = run.operator.get(f"/api/hub/mailboxes/default/cy/messages/{long}/blob")
    assert fetched.text == TEXT and fetched.headers["content-type"] == "text/plain; charset=utf-8"

    text = _send(run, TEXT.encode(), "text/plain", {})
    wait_until(lambda: text in _delivered(run), 30, "the text is in the file")
    run.kill()
    picture = _send(run, PICTURE, "image/png", {"see": "this"})
    gone = _send(run, b"z" * MIB, "text/plain", {})
    damaged = _send(run, b"d" * MIB, "text/plain", {})
    _object(run, b"z" * MIB).unlink()
    _object(run, b"d" * MIB).write_bytes(b"e" * MIB)
    run.start()
    wait_until(lambda: {text, picture, gone} <= _delivered(run), 30, "all are in the file")
    # A content that does not have its digest waits, and the sender can mend it.
    wait_until(lambda: run.says("reader_waits", agent="bob"), 30, "the bridge says that it waits")
    assert damaged not in _delivered(run)
    _upload(run, b"d" * MIB, "text/plain")
    wait_until(lambda: damaged in _delivered(run), 30, "the damaged one was mended")
    got = _polled(run)
    assert got[damaged]["body"] == "d" * MIB
    assert got[text]["body"] == TEXT and got[text]["_body_source"] == "side-file"
    assert json.loads(got[picture]["body"]) == {"see": "this"}
    assert Path(got[picture]["_blob_path"]).read_bytes() == PICTURE
    assert "was removed before" in got[gone]["body"] and "_blob_error" in got[gone]
    assert len([line for line in lines_of(run.root) if line["to"] == "bob"]) == 4
    accepted = [one for (_, one, said), count in run.verdicts().items() if said == "accepted" and count == 1]
    assert {long, short, text, picture, gone} <= set(accepted)
