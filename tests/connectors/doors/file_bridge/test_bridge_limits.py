"""The real bridge with full mailboxes, rates, delays and priorities (LM-08, DL-21, DL-22)."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.file_bridge.bridge_run import BridgeRun, lines_of
from tests.connectors.doors.http_api.hub_stack import MESSAGES

FLOOD, ROOM = 200, 20


@pytest.mark.requirement("LM-08")
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_flood_waits_in_its_file_and_each_line_counts_once_when_there_is_room(run: BridgeRun) -> None:
    run.principal("bob").close()
    run.operator.post("/api/hub/limits/name/bob", json={"pending_most": ROOM}).raise_for_status()
    run.operator.post("/api/hub/limits/name/eve", json={"messages_per_minute": 60}).raise_for_status()
    sent = [run.queue.send("ask", str(number), to="bob", sender="ann") for number in range(FLOOD)]
    wait_until(lambda: len(run.mailbox("bob")) == ROOM, 20, "the mailbox is full")
    other = run.queue.send("ask", "not held up", to="operator", sender="ann")
    run.wait_mailbox("operator", {other})
    assert len(run.says("recipient_held", session="default", recipient="bob")) == 1
    # A reader takes messages from the file, and the bridge is killed, while most lines wait.
    taken = [message["msg_id"] for message in run.queue.poll("bob")]
    assert taken[:FLOOD] == sent
    run.kill()
    run.start()
    # Messages that were taken from the file are claimed in the mailbox, so there is room again.
    wait_until(lambda: set(run.mailbox("bob")) == set(sent), 60, "all lines are posted")
    run.wait_mailbox("bob", set(sent), status="claimed")
    verdicts = Counter(run.verdicts())
    accepted = {one: count for (_, one, said), count in verdicts.items() if said == "accepted"}
    assert {one: accepted.get(one) for one in sent} == dict.fromkeys(sent, 1)
    refused = sum(count for (_, _, said), count in verdicts.items() if said == "rejected")
    assert 0 < refused <= 2 * FLOOD
    # A sender above its rate waits, and costs no record meanwhile.
    many = [run.queue.send("ask", str(number), to="cy", sender="eve") for number in range(62)]
    wait_until(lambda: len(run.mailbox("cy")) >= 60, 20, "the first minute's worth")
    wait_until(lambda: set(run.mailbox("cy")) == set(many), 30, "the others follow at the rate")
    assert {count for (_, one, _), count in run.verdicts().items() if one in many} == {1}


@pytest.mark.requirement("DL-22")
@pytest.mark.requirement("DL-21")
def test_delays_priorities_and_expiry_go_both_ways(run: BridgeRun) -> None:
    run.principal("bob").close()
    run.queue.poll("bob")
    first = run.operator.post(MESSAGES, json={"recipient": "bob", "type": "ask", "payload": 1}).json()
    wait_until(
        lambda: run.written() and first["message_id"] == lines_of(run.root)[0]["msg_id"], 20, "in the file"
    )
    body = {"recipient": "bob", "type": "ask", "payload": 2, "priority": "high"}
    answer = run.operator.post(MESSAGES, json={**body, "deliver_after_s": 2, "expires_in_s": 100}).json()
    later = run.queue.send("ask", "x", to="operator", sender="ann", deliver_after_s=2, ttl_s=90, priority="low")
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        assert run.mailbox("operator") == {} and len(lines_of(run.root)) == 1
        time.sleep(0.2)
    # Nobody polls here before the bridge has appended the line.
    run.wait_mailbox("operator", {later})
    row = run.mailbox("operator")[later]
    assert row["priority"] == "low" and row["expires_at"] > row["sent_at"]
    wait_until(lambda: answer["message_id"] in {line["msg_id"] for line in lines_of(run.root)}, 20, "delivered")
    polled = run.queue.poll("bob")
    assert [message["msg_id"] for message in polled] == [answer["message_id"], first["message_id"]]
    assert polled[0]["priority"] == "high" and 95 < polled[0]["ttl_s"] < 105
    wait_until(lambda: {one["status"] for one in run.mailbox("bob").values()} == {"claimed"}, 20, "claimed")
    assert set(run.verdicts().values()) == {1}
