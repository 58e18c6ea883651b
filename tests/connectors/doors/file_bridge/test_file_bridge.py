"""File queue and mailboxes, joined by the real bridge over real Kafka and a real gateway (FQ-15 to FQ-17)."""

from __future__ import annotations

import random
import shutil

import pytest

from tests.broker_processes import wait_until
from tests.connectors.agent_sdk.agent_queue.expired_messages import send_gone
from tests.connectors.doors.file_bridge.bridge_run import BridgeRun, lines_of
from tests.connectors.doors.http_api.hub_stack import MESSAGES, one_of
from trunkline_agent.queue import Queue

SESSIONS, EACH = 4, 60


@pytest.mark.requirement("FQ-15")
def test_a_line_is_in_its_recipients_mailbox_with_all_that_it_says(run: BridgeRun) -> None:
    short = run.queue.send("ask", "is it green?", to="operator", sender="ann", ttl_s=600, reply_to="q-1")
    run.wait_mailbox("operator", {short})
    long = run.queue.send("answer", "ü" * 5000, to="operator", sender="bob")
    run.wait_mailbox("operator", {short, long})
    rows = run.mailbox("operator")
    told = {name: rows[short][name] for name in ("sender", "kind", "body", "content_type", "in_reply_to")}
    assert told == {
        "sender": "ann",
        "kind": "ask",
        "body": "is it green?",
        "content_type": "text/plain",
        "in_reply_to": "q-1",
    }
    # A program that may write to the files may write any sender's name.
    assert rows[short]["from_verified"] is False
    assert rows[short]["expires_at"] > rows[short]["sent_at"]
    assert rows[long]["body"] == "ü" * 5000
    drained = run.operator.get(MESSAGES).json()["messages"]
    assert [message["payload"] for message in drained] == [{"text": "is it green?"}, {"text": "ü" * 5000}]


@pytest.mark.requirement("FQ-15")
@pytest.mark.timeout(180)
def test_killed_again_and_again_and_with_expire_under_its_eyes_each_line_counts_once(run: BridgeRun) -> None:
    sent: dict[str, set[str]] = {}
    for turn in range(3):
        for number in range(SESSIONS):
            session = f"s{number}"
            for _ in range(EACH // 3):
                kept = run.queue.send("ask", "stays", to="bo", sender="ann", session=session)
                send_gone(run.queue, "ask", "goes", to="cy", sender="ann", session=session)
                sent.setdefault(session, set()).add(kept)
            if turn % 2:
                run.queue.expire(session)
        run.kill()
        run.queue.expire(f"s{turn}")
        run.start()
    for session, ids in sent.items():
        run.wait_mailbox("bo", ids, session)
    verdicts = run.verdicts()
    accepted = {key: count for key, count in verdicts.items() if key[2] == "accepted"}
    assert set(accepted.values()) == {1}
    for session, ids in sent.items():
        posted = {message_id for stream, message_id, _ in accepted if stream == f"mailbox/{session}/bo"}
        assert posted == ids
    assert {verdict for _, _, verdict in verdicts} <= {"accepted", "duplicate"}
    # Starting over from nothing changes nothing.
    run.kill()
    shutil.rmtree(run.settings.data_path / "file_bridge", ignore_errors=True)
    for cursor in run.root.glob("sessions/*/cursors/trunkline-bridge.cursor"):
        cursor.unlink()
    run.start()
    again = {key: count for key, count in run.verdicts().items() if key[2] == "accepted"}
    assert again == accepted


@pytest.mark.requirement("FQ-15")
def test_what_is_for_everybody_reaches_each_consumer_also_one_that_comes_later(run: BridgeRun) -> None:
    run.queue.poll("bo")
    first = run.queue.send("broadcast", "all hands", sender="ann")
    run.wait_mailbox("bo", {first})
    assert run.mailbox("bo")[first]["broadcast_id"] == first
    run.queue.poll("cy", topics=["status"])
    run.wait_mailbox("cy", {first})
    second = run.queue.send("status", "done", to="all", sender="ann")
    for name in ("bo", "cy"):
        run.wait_mailbox(name, {first, second})
    assert run.mailbox("trunkline-bridge") == {}


@pytest.mark.requirement("FQ-16")
def test_what_a_poll_has_taken_is_claimed_and_what_it_left_out_is_not(run: BridgeRun) -> None:
    taken = {run.queue.send("ask", str(number), to="bo", sender="ann") for number in range(3)}
    left_out = run.queue.send("status", "busy", to="bo", sender="ann")
    assert len(run.queue.poll("bo", topics=["ask"])) == 3
    held = run.mailbox

    def claimed() -> bool:
        return {key for key, row in held("bo").items() if row["status"] == "claimed"} == taken

    wait_until(claimed, 20, "the polls are claims")
    assert held("bo")[left_out]["status"] == "unread"
    row = held("bo")[sorted(taken)[0]]
    assert (row["handed_to"], row["handed_at"] is not None) == ("file/unverified", True)


@pytest.mark.requirement("FQ-17")
def test_what_comes_by_http_is_in_the_agents_file_once_and_does_not_come_back(run: BridgeRun) -> None:
    bob = run.principal("bob")
    assert run.queue.poll("bob") == []
    ids = []
    for number in range(6):
        payload = {"step": number, "long": "x" * (5000 if number % 2 else 1)}
        answer = run.operator.post(MESSAGES, json={"recipient": "bob", "type": "note", "payload": payload})
        ids.append(answer.json()["message_id"])
        if number in (1, 3):
            run.kill()
            run.start()
    wait_until(lambda: len(lines_of(run.root)) == 6, 20, "all are in the file")
    found = run.queue.poll("bob")
    assert sorted(message["msg_id"] for message in found) == sorted(ids)
    assert {(message["from"], message["to"], message["topic"]) for message in found} == {
        ("operator", "bob", "ask")
    }
    wait_until(
        lambda: {row["status"] for row in run.mailbox("bob").values()} == {"claimed"}, 20, "the poll is a claim"
    )
    # Also when the bridge starts over from nothing.
    run.kill()
    shutil.rmtree(run.settings.data_path / "file_bridge", ignore_errors=True)
    (run.root / "sessions" / "default" / "cursors" / "trunkline-bridge.cursor").unlink(missing_ok=True)
    run.start()
    assert len(lines_of(run.root)) == 6
    assert {verdict for _, _, verdict in run.verdicts()} == {"accepted"}
    assert bob.get(MESSAGES).json()["messages"] == []
    bob.close()


@pytest.mark.requirement("FQ-15")
def test_a_complete_line_that_is_no_message_is_kept_as_refused_and_the_others_go_on(run: BridgeRun) -> None:
    run.queue.send("ask", "before", to="bo", sender="ann")
    hostile = [b"not json", b'{"msg_id": "../x"}', b"\xff\xfe", b"{}"]
    with (run.root / "sessions" / "default" / "messages.jsonl").open("ab") as file:
        file.write(b"\n".join(hostile) + b"\n")
    after = run.queue.send("ask", "after", to="cy", sender="ann")
    run.wait_mailbox("cy", {after})
    # These are in other partitions than what was waited for.
    wait_until(lambda: len(run.refused()) >= len(hostile), 20, "the lines are refused")
    assert sorted(run.refused()) == sorted(hostile)
    wait_until(lambda: run.mailbox("bo"), 20, "the first is there")
    assert one_of(list(run.mailbox("bo").values()))["body"] == "before"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_thousand_lines_in_twenty_sessions_count_once_though_the_bridge_is_killed_ten_times(
    run: BridgeRun,
) -> None:
    draw, kills, ids = random.Random(20261122), 10, set()
    queue = Queue(run.root, fsync=False)
    for turn in range(kills):
        for _ in range(5_000):
            session = f"s{draw.randrange(20)}"
            ids.add((session, queue.send("ask", "x" * 100, to="bo", sender="ann", session=session)))
        # It is in the middle of carrying them when it is killed.
        before = run.carried()
        wait_until(lambda before=before: run.carried() > before, 30, "the bridge carries")
        run.kill()
        assert run.carried() < run.written()
        queue.expire(f"s{turn}")
        run.bridge = run.started()
    run.bridge.wait_ready(300)

    def posted() -> dict[tuple[str, str], int]:
        accepted = {key: count for key, count in run.verdicts().items() if key[2] == "accepted"}
        return {
            (stream.split("/")[1], message_id): count for (stream, message_id, _), count in accepted.items()
        }

    wait_until(lambda: len(run.mailbox("bo", "s0")) > 0, 60, "the gateway has something")
    assert posted() == dict.fromkeys(ids, 1)
