"""Mailboxes over MQTT, end to end: gateway, bridge, brokers, and the client for agents."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import jsonschema
import pytest
from paho.mqtt.client import MQTTMessage

from connectors.doors.http_api.contracts.json_schemas import payload_schema
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_access import add_principal, register, server_events
from tests.connectors.doors.mqtt_bridge.agents.mail_run import MailRun, body_of
from tests.mqtt_wire import listening, publish_all
from trunkline_agent.errors import MessageRejected, UsageError
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.agent_message import sign_said
from trunkline_agent.wire.mqtt_password import mqtt_password
from trunkline_agent.wire.strict_json import canonical

pytestmark = pytest.mark.requirement("JE-26")


def fresh(name: str) -> str:
    """A name that nothing has yet."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.mark.requirement("CM-07")
def test_what_is_sent_by_http_is_on_the_inbox_with_sender_kind_and_body_and_is_claimed(run: MailRun) -> None:
    builder = run.agent(fresh("builder"))
    with builder:
        sent = run.post(builder.name, {"n": 1}, "ask")
        (message,) = builder.wait(1)
        run.wait_status(builder.name, [sent])
    assert (message.message_id, message.sender, message.from_verified) == (sent, "operator", True)
    assert (message.kind, body_of(message)) == ("ask", {"n": 1})
    assert message.fields["priority"] == "normal"
    row = run.mailbox(builder.name)[sent]
    assert row["handed_to"] == f"mqtt/{builder.name}"


@pytest.mark.requirement("CM-07")
def test_what_an_agent_says_is_posted_with_its_name_and_its_id(run: MailRun) -> None:
    name, reader = fresh("speaker"), fresh("reader")
    hugo = run.principal(reader)
    speaker = run.agent(name)
    with speaker as client:
        receipt = client.send(reader, "note", {"b": 2, "a": "ü"}, message_id="m-1", priority="high")
        client.send(reader, "note", "plain text", in_reply_to="m-1", thread="t-1")
    assert (receipt.verdict, receipt.message_id, receipt.seq) == ("accepted", "m-1", 1)
    wait_until(lambda: len(run.mailbox(reader)) == 2, 30, "both are posted")
    row = run.mailbox(reader)["m-1"]
    assert (row["sender"], row["from_verified"], row["priority"]) == (name, True, "high")
    assert (row["kind"], row["body"], row["content_type"]) == ("note", '{"a":"ü","b":2}', "application/json")
    other = next(row for one, row in run.mailbox(reader).items() if one != "m-1")
    assert (other["body"], other["content_type"]) == ("plain text", "text/plain")
    assert (other["in_reply_to"], other["thread"]) == ("m-1", "t-1")
    drained = hugo.get("/api/hub/messages").json()["messages"]
    assert [(one["sender"], one["payload"]) for one in drained] == [
        (name, {"a": "ü", "b": 2}),
        (name, {"text": "plain text"}),
    ]
    hugo.close()


@pytest.mark.requirement("CT-03")
def test_the_payloads_at_the_broker_are_as_the_contracts_say(run: MailRun, tmp_path: Path) -> None:
    dora, ann, bob = fresh("dora"), run.agent(fresh("ann")), run.agent(fresh("bob"))
    mailboxes = run.settings.mqtt.model_copy(update={"topic_prefix": run.settings.mqtt.agents_prefix})
    with run.gateway.client(add_principal(run.operator, dora, "delegator")) as delegator:
        job = register(delegator)
    with listening(mailboxes, "#") as mail, listening(run.settings.mqtt, f"{job['job_id']}/#") as events:
        with ann as speaks, bob:
            speaks.send(bob.name, "note", {"n": 1}, priority="high", expires_in_s=600)
            bob.wait(1)
        Job(job["job_id"], job["secret"], mqtt=run.settings.mqtt, state_dir=tmp_path).started("")
        wanted = {"mqtt.outbox_message", "mqtt.inbox_message", "mqtt.message_receipt", "mqtt.confirmation"}
        wait_until(lambda: wanted <= set(map(contract_of, mail)) and len(events) >= 2, 30, "one of each")
    seen = [contract_of(one) for one in (*mail, *events)]
    assert {"mqtt.job_event", "mqtt.job_receipt"} <= set(seen)


def contract_of(message: MQTTMessage) -> str:
    """The name of the schema for a message's topic and form. Fails if the payload is not valid."""
    payload, end = json.loads(message.payload), message.topic.rpartition("/")[2]
    form = "inbox_message" if "from" in payload else "message_receipt"
    said = "confirmation" if "confirms" in payload else "outbox_message"
    names = {"events": "job_event", "receipts": "job_receipt", "outbox": said, "inbox": form}
    jsonschema.validate(payload, payload_schema(f"mqtt.{names[end]}"))
    return f"mqtt.{names[end]}"


def test_agents_talk_to_each_other_in_order_and_each_message_counts_once(run: MailRun) -> None:
    ann, bob = run.agent(fresh("ann")), run.agent(fresh("bob"))
    with ann as speaks, bob:
        sent = [speaks.send(bob.name, "count", n).message_id for n in range(30)]
        bob.wait(30)
        run.wait_status(bob.name, [str(one) for one in sent])
    assert bob.ids() == sent
    assert [message.sender for message in bob.got] == [ann.name] * 30


@pytest.mark.requirement("DL-22")
def test_an_agent_sends_and_gets_delayed_messages_after_their_time(run: MailRun) -> None:
    ann, bob = run.agent(fresh("ann")), run.agent(fresh("bob"))
    with ann as speaks, bob:
        late = speaks.send(bob.name, "note", "late", deliver_after_s=1.5, expires_in_s=600).message_id
        now = speaks.send(bob.name, "note", "now").message_id
        bob.wait(1)
        assert (bob.ids(), run.mailbox(bob.name)[str(late)]["status"]) == ([now], "delayed")
        bob.wait(2)
    assert bob.ids() == [now, late]
    run.wait_status(bob.name, [str(late)])
    row = run.mailbox(bob.name)[str(late)]
    assert row["handed_at"] >= row["deliver_at"]


@pytest.mark.requirement("DL-21")
def test_an_agents_message_expires_while_its_recipient_is_away(run: MailRun) -> None:
    ann, away = run.agent(fresh("ann")), run.agent(fresh("away"))
    with ann as speaks:
        sent = speaks.send(away.name, "note", "soon over", expires_in_s=1.0).message_id
        with pytest.raises(UsageError, match="would expire before it is delivered"):
            speaks.send(away.name, "note", "never", expires_in_s=1.0, deliver_after_s=2.0)
    run.wait_status(away.name, [str(sent)], "expired")


def test_a_message_waits_until_its_agent_is_there_and_comes_in_order(run: MailRun) -> None:
    late = run.agent(fresh("late"))
    sent = [run.post(late.name, n) for n in range(25)]
    # The bridge has tried.
    other = run.agent(fresh("other"))
    with other:
        run.post(other.name, "is served")
        other.wait(1)
    assert {row["status"] for row in run.mailbox(late.name).values()} == {"unread"}
    with late:
        late.wait(25)
        run.wait_status(late.name, sent)
    assert late.ids() == sent


def test_while_an_agent_is_away_the_broker_keeps_what_comes_and_nothing_is_lost_or_out_of_order(
    run: MailRun,
) -> None:
    agent = run.agent(fresh("away"))
    with agent:
        first = run.post(agent.name, 0)
        agent.wait(1)
    sent = [run.post(agent.name, n) for n in range(1, 8)]
    with agent:
        agent.wait(8)
        run.wait_status(agent.name, sent)
    assert agent.ids() == [first, *sent]


def test_a_message_whose_callback_fails_comes_again(run: MailRun) -> None:
    agent = run.agent(fresh("clumsy"))
    failures = [RuntimeError("once")]
    received = agent._receive

    def clumsy(message: object) -> None:
        if failures:
            raise failures.pop()
        received(message)  # type: ignore[arg-type]

    agent._receive = clumsy  # type: ignore[method-assign, assignment]
    with agent:
        sent = [run.post(agent.name, n) for n in range(3)]
        agent.wait(3)
    assert agent.ids() == sent


def test_what_is_no_message_on_an_inbox_is_passed_over_and_what_comes_next_is_received(
    run: MailRun, caplog: pytest.LogCaptureFixture
) -> None:
    agent = run.agent(fresh("unshaken"))
    strange = (b"no JSON", b"[]", b"{}", b'{"from": 1}', b'{"from": "a", "message_id": 2}', b'{"from": null}')
    mqtt = run.settings.mqtt.model_copy(update={"topic_prefix": run.settings.mqtt.agents_prefix})
    with agent:
        publish_all(mqtt, [(f"{agent.name}/inbox", payload) for payload in strange])
        sent = run.post(agent.name, "after it")
        agent.wait(1)
    assert agent.ids() == [sent]
    assert caplog.text.count("skipped an inbox payload") == len(strange)


def test_who_is_not_known_gets_nothing_and_the_sender_is_told(run: MailRun) -> None:
    agent = run.agent(fresh("asks"))
    with agent as client:
        receipt = client.send("nobody-at-all", "ask", "?", message_id="lost-1")
        (told,) = agent.wait(1)
    assert receipt.verdict == "accepted"
    assert (told.kind, told.sender, told.fields["in_reply_to"]) == ("undeliverable", "trunkline", "lost-1")
    assert body_of(told) == {"message_id": "lost-1", "to": "nobody-at-all", "reason": "unknown_recipient"}
    assert run.mailbox("nobody-at-all") == {}


def test_a_message_id_that_is_taken_is_told_back(run: MailRun) -> None:
    reader = fresh("reader")
    run.principal(reader).close()
    ann, eve = run.agent(fresh("ann")), run.agent(fresh("eve"))
    with ann as first, eve as second:
        first.send(reader, "note", "mine", message_id="same")
        wait_until(lambda: run.mailbox(reader), 30, "the first")
        second.send(reader, "note", "forged", message_id="same")
        (told,) = eve.wait(1)
    assert body_of(told) == {"message_id": "same", "to": reader, "reason": "seq_conflict"}
    assert run.mailbox(reader)["same"]["body"] == "mine"


def test_one_id_may_go_to_several_recipients(run: MailRun) -> None:
    names = [fresh("one"), fresh("two")]
    for name in names:
        run.principal(name).close()
    speaker = run.register(fresh("speaker"))
    payloads = [
        canonical(
            sign_said(
                {"message_id": "m", "to": name, "kind": "k", "body": "b", "seq": seq}, speaker.mqtt.secret
            )
        )
        for seq, name in enumerate(names, 1)
    ]
    run.say(speaker.name, *payloads)
    for name in names:
        wait_until(lambda name=name: "m" in run.mailbox(name), 30, "it is there")


def test_hostile_input_has_its_row_and_reason_and_only_the_signed_one_is_posted(run: MailRun) -> None:
    reader = fresh("reader")
    run.principal(reader).close()
    agent = run.register(fresh("watched"))
    name, secret = agent.name, agent.mqtt.secret
    said = {"message_id": "good", "to": reader, "kind": "note", "body": "hello", "seq": 2}
    good = canonical(sign_said(said, secret))
    cases = [
        (b"", "malformed"),
        (b"\xff", "malformed"),
        (b"[1]", "malformed"),
        (b'{"seq":1,"seq":1}', "malformed"),
        (canonical(sign_said({**said, "schema_version": 2}, secret)), "schema_version"),
        (canonical(sign_said({**said, "to": "../etc"}, secret)), "malformed"),
        (canonical(sign_said({**said, "priority": "urgent"}, secret)), "malformed"),
        (canonical(said), "bad_signature"),
        (canonical(sign_said(said, "another secret")), "bad_signature"),
        (canonical({**sign_said(said, secret), "body": "changed"}), "bad_signature"),
        (canonical(sign_said({**said, "data": {"auth_token": "t"}}, secret)), "secret_in_event"),
        (canonical(sign_said({**said, "body": "x" * 300_000}, secret)), "too_large"),
        (good, "accepted"),
        (good + b" ", "duplicate"),
        (canonical(sign_said({**said, "body": "other"}, secret)), "seq_conflict"),
        (canonical(sign_said({**said, "message_id": "late", "seq": 1}, secret)), "accepted"),
    ]
    mqtt = run.settings.mqtt.model_copy(update={"topic_prefix": run.settings.mqtt.agents_prefix})
    with listening(mqtt, f"{name}/inbox") as inbox:
        run.say(name, *(payload for payload, _ in cases))
        wait_until(lambda: len(inbox) == len(cases), 30, "a receipt for each")
    receipts = [json.loads(message.payload) for message in inbox]
    found = [one["reason"] or one["verdict"] for one in receipts]
    assert found == [expected for _, expected in cases]
    assert {(one["kind"], one["schema_version"], "from" in one) for one in receipts} == {("receipt", 1, False)}
    wait_until(lambda: set(run.mailbox(reader)) == {"good", "late"}, 30, "what counts is posted")
    assert run.mailbox(reader)["good"]["body"] == "hello"


def test_nobody_speaks_under_a_name_that_is_not_registered_or_is_none(run: MailRun) -> None:
    stranger = fresh("stranger")
    said = canonical(sign_said({"message_id": "m", "to": "hub", "kind": "k", "body": "b", "seq": 1}, "s"))
    run.say(stranger, said)
    run.say("bad name", said)

    def logged() -> list[tuple[str, str]]:
        return [(stream, verdict) for stream, verdict, value in run.log("agent.said") if value == said]

    wait_until(lambda: len(logged()) >= 2, 30, "both are in the log")
    assert sorted(logged()) == [(f"agent/{stranger}", "rejected"), ("refused/mqtt", "rejected")]


def test_an_agent_that_was_removed_is_not_believed_and_gets_nothing_until_it_is_registered_anew(
    run: MailRun,
) -> None:
    agent = run.agent(fresh("gone"))
    with agent as client:
        client.send("hub", "note", 1)
        assert run.operator.post(f"/api/hub/agents/{agent.name}/mqtt/remove").json()["status"] == "removed"
        with pytest.raises(MessageRejected, match="after_terminal"):
            client.send("hub", "note", 2)
        unknown = run.operator.post("/api/hub/messages", json={"recipient": agent.name, "type": "x"})
        assert (unknown.status_code, unknown.json()["reason"]) == (404, "unknown_recipient")
    again = run.agent(agent.name)
    assert again.credentials.mqtt.secret != agent.credentials.mqtt.secret
    with again as client:
        assert client.send("hub", "note", 3).seq == 1


@pytest.mark.requirement("CM-04")
def test_the_same_request_has_the_same_answer_and_another_one_is_refused(run: MailRun) -> None:
    name, key = fresh("told"), {"Idempotency-Key": fresh("key")}
    path = f"/api/hub/agents/{name}/mqtt"
    first, again = run.operator.post(path, headers=key), run.operator.post(path, headers=key, json={})
    assert (first.status_code, again.status_code, first.json()) == (201, 201, again.json())
    assert [one.headers["Trunkline-Verdict"] for one in (first, again)] == ["accepted", "duplicate"]
    told = first.json()
    assert (told["username"], told["inbox"], told["outbox"]) == (f"agent.{name}", *run.topics(name))
    other = run.operator.post(path)
    assert (other.status_code, other.json()["reason"]) == (409, "illegal_transition")
    assert run.operator.post(f"{path}/remove").status_code == 200
    late = run.operator.post(path, headers=key)
    assert (late.status_code, late.json()["reason"]) == (409, "seq_conflict")
    unknown = run.operator.post(f"/api/hub/agents/{fresh('nobody')}/mqtt/remove")
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "unknown_stream")
    assert run.operator.post("/api/hub/agents/hub/mqtt").json()["reason"] == "malformed"
    shown = run.operator.get("/api/hub/mqtt-agents").json()["agents"]
    assert [row["status"] for row in shown if row["agent_name"] == name] == ["removed"]
    assert told["secret"] not in str(shown)


def test_the_secret_is_in_no_stream_that_is_followed_and_in_no_log(run: MailRun) -> None:
    with run.operator.stream("GET", "/api/hub/events", params={"type": "agent.mqtt_registered"}) as followed:
        events = server_events(followed)
        next(events)
        credentials = run.register(fresh("secretive"))
        settled = next(events)
    assert settled.data["body"]["agent_name"] == credentials.name
    assert "sealed_secret" not in settled.data["body"]
    password = mqtt_password(credentials.mqtt.secret, f"agent.{credentials.name}")
    said = run.bridge.log() + run.gateway.program.log() + str(settled.data)
    assert credentials.mqtt.secret not in said
    assert password not in said


@pytest.mark.parametrize(
    ("notify", "told"),
    [
        (None, ["job.completed"]),
        (["permission"], ["job.permission_required"]),
        (["permission", "end"], ["job.permission_required", "job.completed"]),
        ([], []),
    ],
)
def test_who_registers_a_job_is_told_what_it_asked_for(
    run: MailRun, tmp_path: Path, notify: list[str] | None, told: list[str]
) -> None:
    dora = fresh("dora")
    with run.gateway.client(add_principal(run.operator, dora, "delegator")) as delegator:
        job = register(delegator, **({} if notify is None else {"notify": notify}))
    publisher = Job(job["job_id"], job["secret"], mqtt=run.settings.mqtt, state_dir=tmp_path)
    publisher.publish("started", "")
    publisher.publish("permission_required", "may I go on?")
    publisher.publish("completed", "")
    forged = {"schema_version": 1, "seq": 9, "job_id": job["job_id"], "event": "permission_required"}
    forged |= {"timestamp": "2026-11-21T10:00:00Z", "detail": "forged", "data": {}}
    publish_all(run.settings.mqtt, [(f"{job['job_id']}/events", canonical(forged))])
    agent = run.agent(fresh("after"))
    with agent as client:
        # Records derived from earlier ones are in the mailbox by the time that this message is.
        client.send(dora, "note", "now")
        wait_until(lambda: any(row["kind"] == "note" for row in run.mailbox(dora).values()), 30, "the note")
    wait_until(lambda: len(run.mailbox(dora)) == len(told) + 1, 30, "all that it is told")
    found = {row["kind"]: row for row in run.mailbox(dora).values()}
    assert sorted(found) == sorted([*told, "note"])
    if "job.permission_required" in told:
        body = json.loads(found["job.permission_required"]["body"])
        assert body == {"job_id": job["job_id"], "seq": 2, "detail": "may I go on?"}
        assert found["job.permission_required"]["sender"] == "trunkline"
