"""Mailboxes of agents that take part: the operator writes to all, clears one; what is over its time is gone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import duckdb
import httpx
import pytest

from connectors.log.publisher import Publisher
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import Record
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.mcp_tools.conftest import PARTICIPANTS, Agent, McpGateway
from tests.connectors.doors.mcp_tools.management.conftest import done, management, refused
from tests.connectors.folded_log import FoldedLog

MESSAGES, BROADCAST = "/api/hub/messages", "/api/hub/messages/broadcast"


def mailbox(operator: httpx.Client, name: str, realm: str = "default") -> list[dict[str, Any]]:
    """All messages of a mailbox."""
    return list(operator.get(f"/api/hub/mailboxes/{realm}/{name}").json()["messages"])


def joined(operator: httpx.Client, folder: Path, *names: str) -> list[Agent]:
    """Agents that take part."""
    return [Agent(name, folder).joined(operator) for name in names]


@pytest.mark.requirement("AM-05")
def test_a_broadcast_reaches_all_that_take_part_and_the_operator_but_not_its_sender(
    gateway: McpGateway, operator: httpx.Client, tmp_path: Path
) -> None:
    joined(operator, tmp_path, "ann", "bo", "gone")
    operator.post(f"{PARTICIPANTS}/gone/stop")
    ann = add_principal(operator, "board", "worker")
    body = {"type": "news", "payload": {"text": "soup"}}
    key = {"Idempotency-Key": "b-1"}
    first = operator.post(BROADCAST, json=body, headers=key)
    again = operator.post(BROADCAST, json=body, headers=key)
    assert (first.status_code, first.json()["recipients"]) == (200, 2)
    assert (again.json(), again.headers["Trunkline-Verdict"]) == (first.json(), "duplicate")
    changed = operator.post(BROADCAST, json={**body, "payload": 2}, headers=key)
    assert (changed.status_code, changed.json()["reason"]) == (409, "seq_conflict")
    for name in ("ann", "bo"):
        (found,) = mailbox(operator, name)
        said = {part: found[part] for part in ("sender", "kind", "body", "from_verified", "broadcast_id")}
        assert said == {
            "sender": "operator",
            "kind": "news",
            "body": '{"text":"soup"}',
            "from_verified": True,
            "broadcast_id": first.json()["broadcast_id"],
        }
    assert mailbox(operator, "gone") == mailbox(operator, "operator") == []
    with gateway.client(ann) as worker:
        assert worker.post(BROADCAST, json=body).json()["recipients"] == 3
    assert [message["sender"] for message in mailbox(operator, "operator")] == ["board"]
    assert mailbox(operator, "board") == []
    # A participant that joins after the first attempt gets it by the second.
    joined(operator, tmp_path, "late")
    assert operator.post(BROADCAST, json=body, headers=key).json()["recipients"] == 3
    assert (len(mailbox(operator, "late")), len(mailbox(operator, "ann"))) == (1, 2)


@pytest.mark.requirement("HB-10")
def test_the_operators_host_sends_a_message_and_reads_and_marks_the_answer(
    gateway: McpGateway, operator: httpx.Client, tmp_path: Path
) -> None:
    joined(operator, tmp_path, "ann", "bea")

    async def use() -> None:
        async with management(gateway.settings) as host:
            sent = await done(host, "send_message", targetAgentId="ann", message="hello", idempotencyKey="k")
            again = await done(host, "send_message", targetAgentId="ann", message="hello", idempotencyKey="k")
            assert again == sent
            assert (await refused(host, "send_message", targetAgentId="nobody", message="x"))[0] == "not_found"
            times = {"priority": "high", "ttlSeconds": 3600, "delaySeconds": 600}
            await done(host, "send_message", targetAgentId="bea", message="later", **times)
            (later,) = mailbox(operator, "bea")
            assert (later["priority"], later["status"]) == ("high", "delayed")
            assert later["expires_at"] is not None and later["deliver_at"] is not None
            own = (await done(host, "send_message", targetAgentId="operator", message="to me"))["messageId"]
            (found,) = (await done(host, "get_messages", unreadOnly=True))["messages"]
            assert (found["id"], found["from"], found["content"]) == (own, "operator", "to me")
            assert (found["kind"], found["status"], found["read"]) == ("message", "unread", False)
            nothing: dict[str, Any] = {"read": [], "notMarked": [], "unknown": []}
            assert await done(host, "mark_messages_read", messageIds=[]) == nothing
            for _ in range(2):
                marks = await done(host, "mark_messages_read", messageIds=[own, sent["messageId"]])
                assert marks == {"read": [own], "notMarked": [], "unknown": [sent["messageId"]]}
            assert (await done(host, "get_messages", unreadOnly=True))["messages"] == []
            (found,) = (await done(host, "get_messages"))["messages"]
            assert (found["id"], found["status"], found["read"]) == (own, "read", True)

    anyio.run(use)
    (message,) = mailbox(operator, "ann")
    assert (message["sender"], message["body"]) == ("operator", '{"text":"hello"}')


@pytest.mark.requirement("AM-05")
def test_a_broadcast_is_refused_like_a_message_and_then_reaches_nobody(
    gateway: McpGateway, operator: httpx.Client, tmp_path: Path
) -> None:
    joined(operator, tmp_path, "ann")
    viewer = add_principal(operator, "looker", "viewer")
    with gateway.client(viewer) as client:
        assert client.post(BROADCAST, json={"type": "news"}).status_code == 403
    with gateway.client("") as client:
        assert client.post(BROADCAST, json={"type": "news"}).status_code == 401
    for wrong in ({}, {"type": ""}, {"type": "x", "recipient": "ann"}, {"type": "x" * 129}):
        assert operator.post(BROADCAST, json=wrong).status_code == 400
    blank = operator.post(BROADCAST, json={"type": " "})
    assert (blank.status_code, blank.json()["reason"]) == (403, "policy")
    large = operator.post(BROADCAST, json={"type": "x", "payload": "x" * 300_000})
    assert (large.status_code, large.json()["reason"]) == (413, "too_large")
    assert mailbox(operator, "ann") == []


@pytest.mark.requirement("AM-05")
def test_the_operator_alone_clears_a_mailbox_and_no_other_is_touched(
    gateway: McpGateway, operator: httpx.Client, tmp_path: Path
) -> None:
    ann, _ = joined(operator, tmp_path, "ann", "bo")
    for name in ("ann", "ann", "ann", "bo"):
        operator.post(MESSAGES, json={"recipient": name, "type": "ask"})
    clear = "/api/hub/mailboxes/default/ann/clear"
    worker = add_principal(operator, "cleaner", "worker")
    with gateway.client(worker) as client:
        assert client.post(clear).status_code == 403
        assert client.post("/api/hub/mailboxes/default/cleaner/clear").status_code == 403
    key = {"Idempotency-Key": "c-1"}

    async def use() -> None:
        async with ann.client(gateway) as client:
            read = (await done(client, "get_my_messages"))["messages"][0]["id"]
            await done(client, "mark_read", messageIds=[read])
            cleared = await anyio.to_thread.run_sync(lambda: operator.post(clear, headers=key))
            assert (cleared.status_code, cleared.json()) == (200, {"cleared": 2})
            found = await done(client, "get_my_messages")
            # Messages that were read stay in the mailbox, and hinder no other.
            assert [message["id"] for message in found["messages"]] == [read]
            assert (found["statistics"]["total"], found["statistics"]["unread"]) == (1, 0)

    anyio.run(use)
    again = operator.post(clear, headers=key)
    assert (again.json(), again.headers["Trunkline-Verdict"]) == ({"cleared": 0}, "duplicate")
    assert operator.post(clear).json() == {"cleared": 0}
    assert [message["status"] for message in mailbox(operator, "bo")] == ["unread"]
    assert operator.post("/api/hub/mailboxes/other/ann/clear").json() == {"cleared": 0}
    assert operator.post("/api/hub/mailboxes/default/a b/clear").status_code == 400


@pytest.mark.requirement("AM-05")
def test_who_joins_has_a_mailbox_and_who_has_stopped_has_none(
    gateway: McpGateway, operator: httpx.Client, tmp_path: Path
) -> None:
    message = {"recipient": "ann", "type": "ask"}
    assert operator.post(MESSAGES, json=message).json()["reason"] == "unknown_recipient"
    ann, bo = joined(operator, tmp_path, "ann", "bo")
    assert operator.post(MESSAGES, json=message).status_code == 200
    operator.post(f"{PARTICIPANTS}/ann/stop")
    assert operator.post(MESSAGES, json=message).json()["reason"] == "unknown_recipient"

    async def use() -> None:
        async with bo.client(gateway) as client:
            found = await client.call_tool("send_to_agent", {"targetAgentId": ann.name, "message": "hello"})
            assert found.structured_content["reason"] == "unknown_recipient"
            sent = await done(client, "send_to_agent", targetAgentId="operator", message="hello")
            assert sent["messageId"] in {one["message_id"] for one in mailbox(operator, "operator")}

    anyio.run(use)


@pytest.mark.requirement("AM-08")
@pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream+sealed"])
def test_a_message_over_its_time_to_live_is_shown_and_handed_to_nobody_and_no_part_reads_a_body(
    gateway: McpGateway,
    operator: httpx.Client,
    backbone_settings: Settings,
    tmp_path: Path,
    content_type: str,
) -> None:
    (ann,) = joined(operator, tmp_path, "ann")
    sealed = "\x00\u2603 not for you {"

    def post(message_id: str, lives: timedelta) -> None:
        until = (datetime.now(UTC) + lives).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        message = {"message_id": message_id, "from": "bo", "to": "ann", "kind": "message", "body": sealed}
        said = Message.model_validate(message | {"content_type": content_type, "expires_at": until})
        with Publisher(backbone_settings) as publisher:
            publisher.append(said.record(door="mcp", principal="bo")).result(20)
        wait_until(lambda: message_id in {one["message_id"] for one in mailbox(operator, "ann")}, what="it")

    async def shown() -> list[tuple[str, str]]:
        async with ann.client(gateway) as client:
            found = (await done(client, "get_my_messages"))["messages"]
            return [(message["id"], message["content"]) for message in found]

    post("lasting", timedelta(hours=1))
    post("over", timedelta(seconds=-1))
    post("short", timedelta(seconds=3))
    assert {identity for identity, _ in anyio.run(shown)} <= {"lasting", "short"}
    wait_until(lambda: anyio.run(shown) == [("lasting", sealed)], what="the end of the short one")


@pytest.mark.requirement("AM-07")
def test_the_gateway_exports_the_messages_of_the_tables_by_itself(
    start_gateway: Callable[..., McpGateway], settings: Settings
) -> None:
    folded = FoldedLog(load_keyring(settings))
    said = {"message_id": "m-1", "from": "ann", "to": "bo", "kind": "message", "body": "hello"}
    posting = Message.model_validate(said).record(door="mcp", principal="ann")
    names, values = zip(*posting.headers(), strict=True)
    folded.add(Record("t", 0, 0, 1_790_000_000_000_000, posting.key, posting.value, names, values))
    folded.write_rows(settings)
    gateway = start_gateway(export_interval_ms=200)
    file = gateway.settings.data_path / "export" / "messages.parquet"
    wait_until(file.exists, what="the export")
    with duckdb.connect() as db:
        found = db.execute("SELECT id, from_agent, content FROM read_parquet(?)", [str(file)]).fetchall()
    assert found == [("m-1", "ann", "hello")]


@pytest.mark.requirement("AM-09")
def test_two_gateways_over_one_log_know_each_others_agents(
    start_gateway: Callable[..., McpGateway], tmp_path: Path
) -> None:
    one, other = start_gateway(), start_gateway()
    with one.client() as at_one, other.client() as at_other:
        (ann,) = joined(at_one, tmp_path, "ann")
        wait_until(lambda: at_other.get(f"{PARTICIPANTS}/ann").status_code == 200, what="ann")

        async def use() -> None:
            async with ann.client(other) as client:
                await done(client, "send_to_agent", targetAgentId="operator", message="hello")

        anyio.run(use)
        assert len(mailbox(at_other, "operator")) == 1
