"""An agent sends at a real gateway: messages, questions, answers, topics, schedules, blobs, its status."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import one_of, post
from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import MessageRejected, NoReply, NotFound, Refused, TrunklineError, UsageError
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, SEQ_CONFLICT, UNKNOWN_RECIPIENT


def taken(agent, **options):
    """The next message of an agent's mailbox, taken for good."""
    found = agent.receive(lease_s=None, wait_s=10, **options)
    assert found is not None
    return found


@pytest.mark.requirement("AG-12")
@pytest.mark.requirement("DL-42")
@pytest.mark.requirement("DL-43")
def test_a_message_is_sent_with_all_its_fields(joined):
    sender, recipient = joined(), joined()
    about = {"thread": "t-1", "in_reply_to": "m-1", "subject": "a subject ☃", "priority": "high"}
    sent = sender.send(recipient.name, "a kind", {"x": [1, "ä"]}, **about)
    assert sent.is_delivered and sent.verdict == ACCEPTED
    counted = recipient.count()
    assert (counted.high, counted.normal, counted.low, counted.total) == (1, 0, 0, 1)
    found = taken(recipient)
    assert (found.id, found.sender, found.recipient) == (sent.message_id, sender.name, recipient.name)
    assert (found.type, found.payload) == ("a kind", {"x": [1, "ä"]})
    assert (found.thread, found.in_reply_to, found.reference) == ("t-1", "m-1", None)
    assert found.subject == "a subject ☃"
    with pytest.raises(TypeError, match="no field 'subjekt'"):
        sender.send(recipient.name, "note", subjekt="x")
    later = sender.send(recipient.name, "note", 1, deliver_after_s=1, expires_in_s=3600)
    assert not later.is_delivered and recipient.receive(lease_s=None, wait_s=0) is None
    assert taken(recipient).id == later.message_id


@pytest.mark.requirement("AG-12")
def test_what_the_hub_refuses_is_an_error_with_its_reason(joined):
    agent, other = joined(), joined()
    with pytest.raises(NotFound) as failed:
        agent.send("nobody-of-this-name", "note")
    assert failed.value.reason == UNKNOWN_RECIPIENT
    first = agent.send(other.name, "note", 1, key="k")
    again = agent.send(other.name, "note", 1, key="k")
    assert (again.message_id, again.verdict) == (first.message_id, DUPLICATE)
    with pytest.raises(MessageRejected) as rejected:
        agent.send(other.name, "note", 2, key="k")
    assert rejected.value.reason == SEQ_CONFLICT and rejected.value.exit_code == 4
    for wrong in (
        {"priority": "urgent"},
        {"expires_in_s": -1},
        {"key": "a b"},
        {"key": ""},
        {"subject": "a\nb"},
    ):
        with pytest.raises(UsageError):
            agent.send(other.name, "note", 1, **wrong)
    for payload in (float("nan"), {1, 2}, "\ud800"):
        with pytest.raises(UsageError, match="cannot be JSON"):
            agent.send(other.name, "note", payload)


@pytest.mark.requirement("AG-11")
def test_a_question_gets_its_reply_and_takes_no_other_message(joined):
    asker, answerer = joined(), joined()

    def answer():
        message = answerer.receive(wait_s=10)
        with answerer.handling(message):
            # The second message of the asker's mailbox, before the reply.
            answerer.send(asker.name, "note", "not the reply")
            answerer.reply_to(message, {"sum": sum(message.payload)})

    thread = threading.Thread(target=answer)
    thread.start()
    reply = asker.ask(answerer.name, "ask", [6, 7], timeout_s=20, thread="sums")
    thread.join()
    assert (reply.payload, reply.type, reply.thread, reply.sender) == (
        {"sum": 13},
        "answer",
        "sums",
        answerer.name,
    )
    other = taken(asker)
    assert other.payload == "not the reply" and asker.receive(wait_s=0) is None


@pytest.mark.requirement("AG-11")
def test_a_question_without_a_reply_in_time_is_no_reply_and_the_late_one_is_in_the_mailbox(joined):
    asker, answerer = joined(), joined()
    began = time.monotonic()
    with pytest.raises(NoReply, match="no reply came within") as failed:
        asker.ask(answerer.name, "ask", 1, timeout_s=0.5, key="q")
    assert time.monotonic() - began < 8 and failed.value.exit_code == 5
    question = answerer.receive(wait_s=10)
    with answerer.handling(question):
        answerer.reply_to(question, 2)
    assert question.id == failed.value.message_id
    # The same key is the same question, whose reply is there now.
    assert asker.ask(answerer.name, "ask", 1, timeout_s=5, key="q").payload == 2
    with pytest.raises(NoReply):
        asker.ask(answerer.name, "ask", 3, timeout_s=0)


@pytest.mark.requirement("AG-12")
def test_a_topic_delivers_to_its_subscribers(joined):
    agent, reader = joined(), joined()
    topic = f"builds-{agent.name}-{reader.name}"
    with pytest.raises(NotFound):
        agent.publish(topic, "built", 1)
    reader.subscribe(topic)
    published = agent.publish(topic, "built", {"ok": True}, key="build-1")
    assert (published.recipients, published.verdict) == (1, ACCEPTED)
    assert agent.publish(topic, "built", {"ok": True}, key="build-1").message_id == published.message_id
    found = taken(reader)
    assert (found.topic, found.payload) == (topic, {"ok": True})
    reader.unsubscribe(topic)
    reader.unsubscribe(topic)
    assert agent.publish(topic, "built", 2).recipients == 0


@pytest.mark.requirement("AG-12")
def test_a_schedule_is_set_replaced_listed_and_removed(joined):
    agent, other = joined(), joined()
    name = f"nightly-{agent.name}"
    made = agent.schedule(name, other.name, "tick", {"n": 1}, every_s=1)
    assert (made.name, made.recipient, made.type, made.every_s, made.status) == (
        name,
        other.name,
        "tick",
        1,
        "active",
    )
    assert taken(other).payload == {"n": 1}
    changed = agent.schedule(
        name, other.name, "tick", {"n": 2}, cron="0 3 * * *", missed="latest", priority="low"
    )
    assert (changed.cron, changed.every_s) == ("0 3 * * *", None) and changed.next_run_at is not None
    assert [one.name for one in agent.schedules()] == [name]
    with pytest.raises(Refused):
        other.unschedule(name)
    assert agent.unschedule(name).status == "removed" and agent.schedules() == []
    with pytest.raises(UsageError, match="either cron or every_s"):
        agent.schedule(name, other.name, "tick")
    with pytest.raises(UsageError):
        agent.schedule(name, other.name, "tick", cron="often")


@pytest.mark.requirement("AG-12")
def test_an_agent_discovers_others_and_reports_its_status(hub, joined):
    name = f"spawned-{time.monotonic_ns()}"
    asked = {"task": "count", "agent_name": name, "capabilities": ["count"]}
    answer = hub.operator.post("/api/hub/participants/spawn", json=asked)
    assert answer.status_code == 201, answer.text
    delegator = joined("delegator")
    found = one_of([one for one in delegator.discover("count") if one.name == name])
    assert (found.task, found.capabilities) == ("count", ("count",)) and found.status == "initializing"
    assert delegator.discover("no-such-capability") == []
    hub.operator.post(f"/api/hub/participants/{name}/stop")
    # The agent of a task may discover, too.
    task = hub.submit("idle")
    agent = joined(credentials=Credentials("idle", HubAccess(hub.gateways[0].url, task.token)))
    assert name not in [one.name for one in agent.discover()]
    sent = agent.status("working", "step 3")
    entries = hub.operator.get("/api/hub/audit").json()["entries"]
    assert any(one["type"] == "status" and one["recipient"] == "hub" for one in entries) and sent.message_id
    hub.operator.post(f"/api/hub/tasks/{task.id}/cancel", json={})


@pytest.mark.requirement("AG-13")
def test_a_large_content_goes_as_a_blob_and_is_checked(joined, tmp_path):
    sender, recipient = joined(), joined()
    content = bytes(range(256)) * 20_000
    reference = sender.upload(content)
    assert (reference.bytes, reference.content_type) == (len(content), "application/octet-stream")
    path = tmp_path / "report.txt"
    path.write_text("the report")
    named = sender.upload(path)
    assert named.content_type == "text/plain" and sender.upload(path) == named
    sender.send(recipient.name, "report", {"n": 1}, blob=reference)
    sender.send(recipient.name, "report", {"n": 2}, blob=named.digest)
    sender.send(recipient.name, "report", {"n": 3})
    first, second, third = (taken(recipient) for _ in range(3))
    assert first.reference == reference and recipient.blob_of(first) == content
    assert recipient.blob_of(second) == b"the report"
    with pytest.raises(NotFound, match="no blob"):
        recipient.blob_of(third)
    second.reference = reference
    with pytest.raises(TrunklineError) as failed:
        recipient.blob_of(second)
    assert failed.value.reason == "damaged_blob"
    with pytest.raises(NotFound, match="no file"):
        sender.upload(tmp_path / "none")
    with pytest.raises(UsageError):
        sender.upload(tmp_path)


@pytest.mark.requirement("AG-10")
def test_a_repeated_handling_sends_nothing_twice(hub, joined):
    agent, other = joined(), joined()
    topic = f"said-{agent.name}"
    other.subscribe(topic)
    post(hub.operator, agent.name, {"n": 1})

    def handle(answer):
        message = agent.receive(wait_s=10)
        with agent.handling(message):
            sent = [
                agent.reply_to(message, answer),
                agent.reply_to(message, "and another one"),
                agent.send(other.name, "note", "the same"),
                agent.send(other.name, "note", "the same"),
                agent.send(other.name, "note", answer),
                agent.send(other.name, "note", answer, key="the-place-counts"),
                agent.publish(topic, "note", "the same"),
            ]
            if message.attempt == 1:
                raise RuntimeError("before the acknowledgement")
        return sent

    with pytest.raises(RuntimeError):
        handle("first")
    sent = handle("second")
    assert [one.verdict for one in sent] == [DUPLICATE] * 4 + [ACCEPTED] + [DUPLICATE] * 2
    assert [one.message_id is None for one in sent] == [True, False, False, False, False, True, False]
    wait_until(lambda: len(read(hub, other.name)) == 6, what="the copy of the topic")
    assert sorted(read(hub, other.name)) == ["first", "first", "second", "the same", "the same", "the same"]
    answers = [one["payload"] for one in hub.operator.get("/api/hub/messages").json()["messages"]]
    assert answers == ["first", "and another one"]
    # Outside of a handling, each call is a new message.
    assert agent.send(other.name, "note", "x").message_id != agent.send(other.name, "note", "x").message_id


@pytest.mark.requirement("AG-10")
def test_a_loop_without_blocks_is_a_handling_too(hub, joined):
    agent, other = joined(), joined()
    post(hub.operator, agent.name, {"n": 1})
    sent = []
    for _ in range(2):
        found = agent.iterate(wait_s=10)
        next(found)
        sent.append(agent.send(other.name, "note", "the same"))
        found.close()
    outside = agent.send(other.name, "note", "the same")
    assert [one.verdict for one in sent] == [ACCEPTED, DUPLICATE] and sent[0].message_id == sent[1].message_id
    assert outside.message_id != sent[0].message_id


def read(hub, name):
    """The payloads of a mailbox."""

    shown = hub.operator.get(f"/api/hub/mailboxes/default/{name}").json()["messages"]
    return [json.loads(one["body"]) for one in shown]
