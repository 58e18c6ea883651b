"""`trunkline messages` as a user runs it, against a real gateway."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from tests.broker_processes import wait_until
from tests.connectors.cli.conftest import CommandLine, json_of
from trunkline_agent.hub.plans import Answer, Request
from trunkline_agent.hub.sync_connection import SyncConnection

HOSTILE = "red bidi \u202e zero\u200b"


@pytest.mark.requirement("HH-06")
@pytest.mark.requirement("CM-06")
def test_a_payload_comes_from_an_argument_a_file_or_standard_input_and_is_drained_as_it_was_sent(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "question.json"
    file.write_text('["from", {"a": "file"}]')
    to = ("messages", "send", "operator")
    sent = [
        trunkline.json(*to, "k1", '{"n": 1}', "--subject", "tea for two"),
        trunkline.json(*to, "k2", f"@{file}"),
        json_of(trunkline.run(*to, "k3", "--json", "-", stdin='"from standard input"')),
        trunkline.json(*to, "k4", "--text", HOSTILE),
        trunkline.json(*to, "k5"),
    ]
    assert all(answer["delivered"] for answer in sent)
    assert trunkline.json("messages", "count") == {"high": 0, "normal": 5, "low": 0, "total": 5}
    table = trunkline.call("messages", "peek").stdout
    for answer in sent:
        assert answer["message_id"] in table
    assert " SUBJECT " in table and " tea for two " in table
    drained = trunkline.call("messages", "drain", "--limit", "4", "--request-id", "d-1")
    assert drained.returncode == 0
    assert "4 taken, 1 left; the same again: --request-id d-1" in drained.stderr
    assert '{"text": "red bidi \\u202e zero\\u200b"}' in drained.stdout
    assert "\u202e" not in drained.stdout
    again = trunkline.json("messages", "drain", "--limit", "4", "--request-id", "d-1")
    assert [(m["type"], m["payload"]) for m in again["messages"]] == [
        ("k1", {"n": 1}),
        ("k2", ["from", {"a": "file"}]),
        ("k3", "from standard input"),
        ("k4", {"text": HOSTILE}),
    ]
    assert [m["id"] for m in again["messages"]] == [answer["message_id"] for answer in sent[:4]]
    rest = trunkline.json("messages", "drain")
    assert ([(m["type"], m["payload"]) for m in rest["messages"]], rest["left"]) == ([("k5", {})], 0)
    assert trunkline.call("messages", "drain").returncode == 3
    assert trunkline.json("messages", "drain")["messages"] == []
    peeked = trunkline.json("messages", "peek", "default/operator")
    assert {m["status"] for m in peeked["messages"]} == {"claimed"}


@pytest.mark.requirement("HH-06")
def test_the_same_request_id_is_the_same_message_and_a_payload_that_cannot_be_read_is_not_sent(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    send = ("messages", "send", "operator", "ask", "--request-id", "m-1", "--json")
    assert json_of(trunkline.call(*send, "[1]")) == json_of(trunkline.call(*send, "[1]"))
    assert trunkline.call(*send, "[2]").returncode == 4
    for wrong in ("{", '{"a": 1, "a": 2}', f"@{tmp_path}/none.json", f"@{tmp_path}"):
        done = trunkline.call("messages", "send", "operator", "ask", wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert "PAYLOAD: " in done.stderr
    assert "--text" in trunkline.call("messages", "send", "operator", "ask", "plain words").stderr
    assert trunkline.call("messages", "send", "operator", "ask", "[1]", "--text", "x").returncode == 2
    assert trunkline.call("messages", "send", "operator", "ask", "[1]", "[2]").returncode == 2
    assert trunkline.call("messages", "send", "operator", "ask", "--colour", "red").returncode == 2
    assert hub.get(path_of("mailboxes", "default", "operator"))["total"] == 1


@pytest.mark.requirement("HH-06")
@pytest.mark.requirement("CM-04")
@pytest.mark.parametrize("given", [(), ("--request-id", "d-7")])
def test_a_drain_whose_answer_was_lost_is_given_again(
    hub: GatewayClient, trunkline: CommandLine, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    trunkline.call("messages", "send", "operator", "ask", "--text", "first")
    answered, asked = SyncConnection.answer, []

    def losing(connection: SyncConnection, request: Request, until: float) -> Answer:
        answer = answered(connection, request, until)
        if request.method == "GET":
            asked.append(request.headers["X-Request-ID"])
        if len(asked) == 1 and request.method == "GET":
            raise ConnectionResetError("the answer was lost")
        return answer

    monkeypatch.setattr(SyncConnection, "answer", losing)
    drained = trunkline.json("messages", "drain", *given)
    assert [m["payload"] for m in drained["messages"]] == [{"text": "first"}]
    assert asked == [drained["request_id"]] * 2
    assert given in ((), ("--request-id", drained["request_id"]))


@pytest.mark.requirement("HH-08")
@pytest.mark.requirement("HH-09")
def test_the_audit_shows_what_was_delivered_and_what_was_refused(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    assert trunkline.call("messages", "audit").returncode == 3
    assert trunkline.json("messages", "audit") == {"entries": [], "left": 0}
    told = trunkline.json("messages", "send", "operator", "ask")
    refused = trunkline.call("messages", "send", "stranger", "ask")
    assert (refused.returncode, "unknown_recipient" in refused.stderr) == (3, True)
    assert trunkline.call("messages", "send", "operator", " ").returncode == 4
    # A refusal is recorded after it has been answered.
    wait_until(lambda: len(hub.get(path_of("audit"))["entries"]) == 3, what="the refusals' records")
    rows = trunkline.call("messages", "audit").stdout.splitlines()[1:]
    assert [row.split()[1:3] for row in rows] == [
        ["delivered", "operator"],
        ["rejected", "operator"],
        ["rejected", "operator"],
    ]
    assert told["message_id"] in rows[0]
    assert "unknown_recipient" in rows[1]
    assert "policy" in rows[2]
    (last,) = trunkline.json("messages", "audit", "--limit", "1")["entries"]
    assert (last["verdict"], last["reason"]) == ("rejected", "policy")


@pytest.mark.requirement("HH-06")
@pytest.mark.requirement("HH-09")
def test_who_drains_is_said_by_the_token_and_nobody_looks_into_anothers_mailbox(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    token = hub.post(path_of("principals"), {"principal": "bo", "role": "worker"})["token"]
    assert trunkline.call("messages", "send", "bo", "ask", "--text", "for Bo").returncode == 0
    assert trunkline.call("messages", "drain").returncode == 3
    peeked = trunkline.call("messages", "peek", "bo", TRUNKLINE_TOKEN=token)
    assert peeked.returncode == 0
    assert " unread " in peeked.stdout
    assert '{"text":"for Bo"}' in peeked.stdout
    assert trunkline.call("messages", "peek", TRUNKLINE_TOKEN=token).returncode == 4
    for no_mailbox in ("../jobs", "default/..", "a/b/c", "/"):
        assert trunkline.call("messages", "peek", no_mailbox).returncode == 2
    assert trunkline.call("messages", "peek", "nobody").returncode == 3
    drained = trunkline.json("messages", "drain", TRUNKLINE_TOKEN=token)
    assert [(m["recipient"], m["payload"]) for m in drained["messages"]] == [("bo", {"text": "for Bo"})]
    assert "claimed" in trunkline.call("messages", "peek", "default/bo").stdout


@pytest.mark.requirement("DL-21")
@pytest.mark.requirement("DL-22")
def test_a_message_is_sent_with_a_delay_an_expiry_and_a_priority(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    hub.post(path_of("principals"), {"principal": "cy", "role": "worker"})
    to = ("messages", "send", "cy", "note", "--text", "tea")
    later = trunkline.call(*to, "--after", "1h", "--expires", "2h", "--priority", "high")
    assert later.returncode == 0 and "is stored, and comes later into the mailbox of cy" in later.stdout
    assert trunkline.json(*to, "--after", "1h")["delivered"] is False
    assert trunkline.json(*to, "--expires", "1s")["delivered"] is True
    rows = trunkline.json("messages", "peek", "cy", "--status", "delayed")["messages"]
    assert [(row["priority"], row["expires_at"] is None) for row in rows] == [("high", False), ("normal", True)]

    def expired() -> bool:
        return len(trunkline.json("messages", "peek", "cy", "--status", "expired")["messages"]) == 1

    wait_until(expired, 20, "the message has expired")
    refused = trunkline.call(*to, "--after", "2h", "--expires", "1h")
    assert refused.returncode == 2 and "would expire before it is delivered" in refused.stderr
    assert trunkline.call(*to, "--priority", "urgent").returncode == 2
    assert trunkline.call("messages", "broadcast", "news", "--after", "1h", "--expires", "1d").returncode == 0
    assert trunkline.json("messages", "clear", "cy")["cleared"] == 2


@pytest.mark.requirement("DL-25")
def test_a_file_is_sent_as_a_blob_and_saved_by_its_recipient(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    file, saved = tmp_path / "stars.png", tmp_path / "saved.png"
    file.write_bytes(given := bytes(range(256)) * 20_000)
    sent = trunkline.json("messages", "send", "operator", "picture", "--blob", str(file))
    (message,) = trunkline.json("messages", "drain")["messages"]
    digest = hashlib.sha256(given).hexdigest()
    assert message["blob"] == {"digest": digest, "bytes": len(given), "content_type": "image/png"}
    done = trunkline.call("messages", "blob", "operator", sent["message_id"], "--out", str(saved))
    assert (done.returncode, saved.read_bytes()) == (0, given)
    assert f"{len(given)} bytes are in {saved}" in done.stdout
    unknown = trunkline.call("messages", "blob", "operator", "nothing", "--out", str(tmp_path / "none"))
    assert unknown.returncode == 3 and not list(tmp_path.glob("none*"))
    missing = trunkline.call("messages", "send", "operator", "picture", "--blob", str(tmp_path / "none"))
    assert missing.returncode == 2 and "--blob: cannot read" in missing.stderr


@pytest.mark.requirement("LM-11")
def test_a_drain_goes_on_until_it_has_all_that_it_was_asked_for(
    hub: GatewayClient, trunkline: CommandLine
) -> None:
    # Beyond `limits.answer_bytes`, 8 MiB.
    body = {"recipient": "operator", "type": "note", "payload": "x" * 250_000}
    ids = [hub.post(path_of("messages"), body)["message_id"] for _ in range(36)]

    drained = trunkline.json("messages", "drain", "--limit", "35")

    assert ([one["id"] for one in drained["messages"]], drained["left"]) == (ids[:35], 1)
    assert [one["id"] for one in trunkline.json("messages", "drain")["messages"]] == ids[35:]
