"""The answered message and the conversation are the same at every door, in and out (DL-06).

At the XML door a listener knows each conversation by an id of its own (XP-07).
"""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from connectors.hub.services.conversations import child_thread
from tests.broker_processes import wait_until
from tests.connectors.doors.file_bridge.bridge_run import lines_of
from tests.connectors.test_doors_to_doors import (
    ANSWERS,
    DOORS,
    FILE,
    HUB,
    MCP,
    MQTT,
    PERSON,
    READER,
    RELAYS,
    SENDER,
    XML,
    Doors,
    Seen,
    doors,
    note,
    text_of,
)
from trunkline_agent.mqtt.inbox_receiver import InboxMessage

__all__ = ["doors"]
pytestmark = pytest.mark.requirement("DL-06")

EIGHT = ["msg_id", "ts", "from", "to", "topic", "body", "in_reply_to", "ttl_s"]
# Each sender says whether it answers a message, and in which conversation.
GIVEN = [(None, None), ("q-1", None), (None, "talk.1"), ("q-2", "talk_2")]


def read_all(doors: Doors, door: str, count: int) -> list[Seen]:
    """Read until a reader has so many messages."""
    found: list[Seen] = []

    def has_come() -> bool:
        found.extend(doors.seen(door, READER[door]))
        return len(found) >= count

    wait_until(has_come, 40, f"{count} messages for {READER[door]}")
    return found


def is_uuid(text: str | None) -> bool:
    """Return whether it is a UUID in its usual form."""
    try:
        return text is not None and str(uuid.UUID(text)) == text
    except ValueError:
        return False


def test_what_a_message_answers_and_its_thread_are_the_same_at_each_door(doors: Doors) -> None:
    assert doors.read(FILE) == []
    for sender_door in DOORS:
        for door in DOORS:
            for number, given in enumerate(GIVEN):
                # The XML envelope has no field for the answered message, and only threads that it was given.
                about = (None, None) if sender_door == XML else given
                doors.send(sender_door, READER[door], f"{number} {text_of(sender_door, READER[door])}", *about)
    senders = {name: door for door, name in SENDER.items()}
    opaque: dict[tuple[str, int], str] = {}
    for door in DOORS:
        found = read_all(doors, door, len(DOORS) * len(GIVEN))
        assert len(found) == len(DOORS) * len(GIVEN)
        for one in found:
            sender_door = senders[one.got.sender]
            (number,) = [n for n in range(len(GIVEN)) if f"{n} {one.got.sender} to" in one.got.body]
            in_reply_to, thread = (None, None) if sender_door == XML else GIVEN[number]
            assert one.in_reply_to == in_reply_to, (sender_door, door)
            if XML in (sender_door, door):
                assert is_uuid(one.thread)
                opaque[f"{one.got.sender} {door}", number] = str(one.thread)
            else:
                assert one.thread == thread, (sender_door, door)
    # No two conversations have the same id: not of two senders, and not of two readers.
    assert len(set(opaque.values())) == len(opaque)


def test_lines_of_the_file_queue_have_a_thread_only_if_it_was_given(doors: Doors) -> None:
    reader = READER[FILE]
    assert doors.read(FILE) == []
    for sender_door in (HUB, FILE):
        doors.send(sender_door, reader, f"without {sender_door}")
        doors.send(sender_door, reader, f"with {sender_door}", None, "talk")
    wait_until(lambda: len(lines_of(doors.run.root)) >= 4, 30, "all lines")
    for line in lines_of(doors.run.root):
        assert list(line)[:8] == EIGHT
        rest = {name: value for name, value in line.items() if name not in EIGHT and name != "via"}
        assert rest == ({} if "without" in line["body"] else {"thread": "talk"})
    assert [set(message) - set(EIGHT) for message in doors.run.queue.tail()] == [
        {"thread"} if "with " in message["body"] else set() for message in doors.run.queue.tail()
    ]


def answer_of(doors: Doors, door: str, listener: str, thread: str | None) -> tuple[str, Any]:
    """Ask a listener by a door and wait for its answer; the id of the question, and what the asker got."""
    asker = SENDER[door]
    if door == HUB:
        answer = doors.hub[asker].ask(listener, "ask", {"text": "?"}, thread=thread, timeout_s=15)
        asked = [row for row in doors.run.mailbox(listener).values() if row["sender"] == asker]
        newest = max(asked, key=lambda row: row["posted_at"])
        return newest["message_id"], (answer.in_reply_to, answer.thread, answer.sender)
    if door == MCP:
        given = {} if thread is None else {"thread": thread}
        about = {"targetAgentId": listener, "message": "?", "timeoutSeconds": 15, **given}
        told = doors.tool(doors.agents[asker], "ask_agent", **about)
        reply = told["reply"]
        return told["messageId"], (reply["inReplyTo"], reply.get("thread"), reply["from"])
    before = len(doors.inbox)
    question = doors.send(door, listener, "?", None, thread)
    if door == FILE:
        found: list[Seen] = []
        wait_until(lambda: found.extend(doors.seen(FILE, asker)) or found, 30, "the answer in the file")
        return question, (found[0].in_reply_to, found[0].thread, found[0].got.sender)
    wait_until(lambda: len(doors.inbox) > before, 30, "the answer over MQTT")
    message: InboxMessage = doors.inbox[before]
    return question, (message.fields["in_reply_to"], message.fields["thread"], message.sender)


@pytest.mark.requirement("DL-07")
def test_an_asker_at_any_door_gets_a_listeners_answer_to_its_message_on_its_thread(
    doors: Doors,
) -> None:
    doors.run.queue.poll(SENDER[FILE])
    for door in (HUB, MCP, MQTT, FILE):
        # The one that relays has asked another listener before it answers.
        for listener in (ANSWERS, RELAYS):
            for thread in ("sums", None):
                question, got = answer_of(doors, door, listener, thread)
                assert got == (question, thread, listener), (door, listener, thread)


@pytest.mark.requirement("XP-07")
def test_a_thread_given_to_a_listener_names_one_conversation_of_its_sender(doors: Doors) -> None:
    for door, thread in ((HUB, "talk"), (HUB, "talk"), (HUB, "other"), (MQTT, "talk")):
        doors.send(door, READER[XML], f"on {thread}", None, thread)
    threads: dict[tuple[str, bool], set[str | None]] = {}
    for one in read_all(doors, XML, 4):
        threads.setdefault((one.got.sender, "on talk" in one.got.body), set()).add(one.thread)
    assert len(threads) == 3
    assert {len(found) for found in threads.values()} == {1}
    assert len(set().union(*threads.values())) == 3


@pytest.mark.requirement("XP-10")
def test_a_persons_answer_answers_the_askers_newest_message_also_when_it_is_sent_again(doors: Doors) -> None:
    operator = doors.run.operator

    def answer(thread: str, key: str) -> Any:
        to, told = f"<to>{SENDER[HUB]}</to>", f"<thread>{thread}</thread>{note('yes')}"
        document = f'<message xmlns="urn:trunkline:envelope:1">{to}{told}</message>'
        headers = {"Content-Type": "application/xml", "Idempotency-Key": key}
        sent = operator.post("/messages", content=document, headers=headers, params={"sender": PERSON})
        assert sent.status_code == 202, sent.text
        return sent.headers["Trunkline-Verdict"]

    doors.send(HUB, PERSON, "first", None, "talk")
    question = doors.send(HUB, PERSON, "second", None, "talk")
    thread = child_thread(doors.run.keyring, "talk", f"default/{SENDER[HUB]}", PERSON)
    assert answer(thread, "k1") == "accepted"
    third = doors.send(HUB, PERSON, "third", None, "talk")
    # The request that is repeated is still the answer to the second.
    assert answer(thread, "k1") == "duplicate"
    assert answer(thread, "k2") == "accepted"
    found = doors.seen(HUB, SENDER[HUB])
    assert [(one.got.sender, one.in_reply_to, one.thread) for one in found] == [
        (PERSON, question, "talk"),
        (PERSON, third, "talk"),
    ]


@pytest.mark.requirement("XP-07")
def test_an_asker_that_chooses_anothers_thread_gets_nothing_into_that_conversation(doors: Doors) -> None:
    doors.send(MQTT, ANSWERS, "?", None, "talk")
    secret = child_thread(doors.run.keyring, "talk", f"default/{SENDER[MQTT]}", ANSWERS)

    def said() -> list[Any]:
        body = {"listener": ANSWERS, "thread": secret, "limit": 100}
        return list(doors.run.operator.post("/api/hub/pump/history", json=body).json()["messages"])

    wait_until(lambda: len(said()) == 2, 30, "question and answer")
    before = said()
    question, got = answer_of(doors, HUB, ANSWERS, secret)
    assert got == (question, secret, ANSWERS)
    assert said() == before
