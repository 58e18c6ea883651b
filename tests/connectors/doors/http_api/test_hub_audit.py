"""The audit log of messages, and what is told to whoever watches over the gateway."""

from __future__ import annotations

import re

import pytest

from connectors.hub.services.audit_log import why_refused
from tests.broker_processes import wait_until
from tests.connectors.doors.http_api.hub_stack import AUDIT, MESSAGES, TASKS, one_of, post

A_UUID = "71bafd82-93f4-4b8b-9397-2ffdb87e3c00"


def entries(client, sender=None, **params):
    """The audit log, of one sender if that is given."""
    answer = client.get(AUDIT, params=params)
    assert answer.status_code == 200, answer.text
    return [one for one in answer.json()["entries"] if sender in (None, one["sender"])]


@pytest.mark.requirement("HH-08")
def test_delivered_and_rejected_messages_are_in_the_audit_log_of_both_gateways(hub):
    name, token = hub.principal("delegator")
    delegator, key = hub.client(token), {"Idempotency-Key": f"audit-{name}"}
    delivered = post(delegator, "idle", {"text": "canary-payload"}, **key)
    assert delivered.status_code == 200
    expected = [("delivered", None)]
    for answer, status, reason in (
        (post(delegator, "idle", "other", **key), 409, "seq_conflict"),
        (post(delegator, "nobody"), 404, "unknown_recipient"),
        (post(delegator, "idle", kind=""), 403, "policy"),
        (delegator.post(MESSAGES, json={"recipient": "idle"}), 400, "malformed"),
    ):
        assert answer.status_code == status
        expected.append(("rejected", reason))
    for client in (hub.operator, hub.other):
        found = wait_until(
            lambda client=client: len(e := entries(client, name)) == 5 and e, what="five entries"
        )
        assert sorted((e["verdict"], str(e["reason"])) for e in found) == sorted(
            (verdict, str(reason)) for verdict, reason in expected
        )
        taken = one_of([e for e in found if e["verdict"] == "delivered"])
        assert (taken["recipient"], taken["type"]) == ("idle", "note")
        assert taken["message_id"] == delivered.json()["message_id"]
        assert "canary-payload" not in str(found)
        assert all(e["at"].endswith("Z") for e in found)
    # The same again is the same message.
    assert post(hub.client(token, 1), "idle", {"text": "canary-payload"}, **key).status_code == 200
    post(delegator, "idle", "the next")
    wait_until(lambda: len(entries(hub.operator, name)) == 6, what="one entry more")


@pytest.mark.requirement("HO-20")
def test_an_agent_whose_capabilities_leave_out_sending_is_refused_and_audited_at_every_gateway(hub):
    task = hub.submit("quiet")
    for gateway in (0, 1):
        agent = hub.client(task.token, gateway)
        answer = post(agent, "idle")
        assert (answer.status_code, answer.json()["reason"]) == (403, "policy")
        assert agent.post(f"{MESSAGES}/broadcast", json={"type": "note"}).status_code == 200
    for client in (hub.operator, hub.other):
        found = wait_until(lambda client=client: len(e := rejected(client, "quiet")) == 2 and e, what="entries")
        assert {(e["reason"], e["why"]) for e in found} == {
            ("policy", "the capabilities of the task's token do not include message.send")
        }
    # Its other rights are as they were.
    assert hub.client(task.token).post(f"{TASKS}/{task.id}/complete", json={}).status_code == 200


def rejected(client, sender):
    """Return the sender's messages that were refused."""
    return [one for one in entries(client, sender) if one["verdict"] == "rejected"]


@pytest.mark.requirement("HB-04")
def test_a_refused_message_is_in_the_audit_log_with_recipient_and_type_where_they_could_be_read(hub):
    name, token = hub.principal("delegator")
    delegator, kind = hub.client(token), 'a "strange" type: x'
    for body, status in (
        ({"recipient": "nobody", "type": kind, "payload": "canary"}, 404),
        ({"recipient": "idle", "type": ""}, 403),
        ({"recipient": "idle"}, 400),
        ({"type": "unknown-field", "payloud": "canary"}, 400),
        ({"recipient": "../x", "type": ["canary"]}, 400),
    ):
        assert delegator.post(MESSAGES, json=body).status_code == status
    named = [("nobody", kind), ("idle", ""), ("idle", None), (None, "unknown-field"), (None, None)]
    with hub.add_gateway().client() as started_later:
        for client in (hub.operator, hub.other, started_later):
            found = wait_until(lambda client=client: len(e := entries(client, name)) == 5 and e, what="entries")
            assert sorted(((e["recipient"], e["type"]) for e in found), key=str) == sorted(named, key=str)
            assert {e["verdict"] for e in found} == {"rejected"} and "canary" not in str(found)
            unknown = one_of([e["why"] for e in found if e["reason"] == "unknown_recipient"])
            assert unknown == "no recipient of this name is known"


@pytest.mark.requirement("HH-08")
def test_a_message_without_a_right_or_a_token_is_in_the_audit_log(hub):
    viewer, token = hub.principal("viewer")
    assert post(hub.client(token), "idle").status_code == 403
    assert post(hub.client("no-such-token"), "idle").status_code == 401
    for sender, reason in ((viewer, "policy"), ("anonymous", "unauthorized")):
        found = one_of(wait_until(lambda sender=sender: entries(hub.operator, sender), what="the entry"))
        assert (found["verdict"], found["reason"]) == ("rejected", reason)


@pytest.mark.requirement("HH-08")
def test_a_drain_that_was_refused_is_no_message(hub):
    viewer, token = hub.principal("viewer")
    assert hub.client(token).get(MESSAGES).status_code == 403
    wait_until(lambda: hub.refusals(viewer), what="the row of the refusal")
    # The later entry has arrived, so an earlier one would have, too.
    post(hub.operator, "idle", "later")
    wait_until(lambda: entries(hub.operator, "operator"), what="the message")
    assert entries(hub.operator, viewer) == []


@pytest.mark.requirement("HH-08")
def test_the_newest_hundred_are_in_memory_and_a_setting_says_how_many(hub):
    delegator = hub.client(hub.principal("delegator")[1])
    sent = [post(delegator, "idle", number).json()["message_id"] for number in range(110)]
    for client in (hub.operator, hub.other):
        wait_until(lambda client=client: entries(client)[-1]["message_id"] == sent[-1], what="the last")
        assert [e["message_id"] for e in entries(client)] == sent[-100:]
        assert [e["message_id"] for e in entries(client, limit=3)] == sent[-3:]
        assert client.get(AUDIT, params={"limit": 0}).status_code == 400


@pytest.mark.requirement("HH-08")
@pytest.mark.requirement("HH-10")
def test_a_gateway_that_starts_shows_the_newest_of_what_was_before_as_many_as_it_is_told(hub):
    delegator = hub.client(hub.principal("delegator")[1])
    for recipient in ("nobody", "idle", "lazy", "hub", "operator"):
        post(delegator, recipient, "earlier")
    sent = [post(delegator, ("idle", "lazy", "hub")[n % 3], n).json()["message_id"] for n in range(9)]
    with hub.add_gateway(audit_messages=6).client() as client:
        before = entries(client)
        later = [post(client, "idle", n).json()["message_id"] for n in range(7)]
        assert [e["message_id"] for e in entries(client)] == later[-6:]
    assert [e["at"] for e in before] == sorted(e["at"] for e in before)
    assert [e["message_id"] for e in before] == sent[-6:]


@pytest.mark.requirement("HH-13")
def test_health_and_readiness_are_told_without_a_token(hub):
    stranger = hub.client("")
    for path in ("/healthz", "/readyz"):
        answer = stranger.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert stranger.get("/readyz").json()["status"] == "ready"


@pytest.mark.requirement("HH-13")
def test_metrics_count_requests_verdicts_lag_and_what_waits_in_mailboxes(hub):
    name, token = hub.principal("delegator")
    for number in range(3):
        assert post(hub.client(token), name, number).status_code == 200
    assert post(hub.client(token), "nobody").status_code == 404
    wait_until(lambda: hub.refusals(name), what="the row of the refusal")
    answer = hub.operator.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [line for line in answer.text.splitlines() if line and not line.startswith("#")]
    assert samples and all(re.fullmatch(r"[a-zA-Z_:][\w:]*(\{.*\})? \S+( \d+)?", line) for line in samples)
    for what in ("request", "verdict", "lag", "mailbox"):
        assert [line for line in samples if what in line.split("{")[0].lower()], what
    assert [line for line in samples if "verdict" in line and 'reason="unknown_recipient"' in line]
    depth = one_of([line for line in samples if "mailbox" in line.split("{")[0] and f'{name}"' in line])
    assert float(depth.rsplit(" ", 1)[1]) == 3
    hub.client(token).get(MESSAGES)
    assert f'{name}"' not in hub.operator.get("/metrics").text


@pytest.mark.requirement("HH-13")
def test_metrics_say_nothing_that_a_stranger_has_sent(hub):
    stranger = hub.client("canary-token")
    for method, path in (
        ("GET", "/canary-path"),
        ("CANARY", MESSAGES),
        ("POST", f"{TASKS}/canary-task/cancel"),
    ):
        assert stranger.request(method, path, json={"canary-key": 1}).status_code >= 400
    assert stranger.get(f"{MESSAGES}?canary=1", headers={"X-Request-ID": "canary"}).status_code == 401
    found = hub.operator.get("/metrics")
    assert found.status_code == 200 and "canary" not in found.text.lower()


@pytest.mark.requirement("CM-05")
@pytest.mark.parametrize(
    "value",
    [A_UUID, A_UUID.replace("-", ""), "aB3_-" * 8 + "xyz"],
    ids=["a task's", "without dashes", "a principal's"],
)
def test_what_may_be_a_token_is_not_noted_as_recipient_or_type_of_a_refused_message(value):
    assert why_refused({"recipient": value, "type": f"note {value}"}, "no") == "no"
    assert why_refused({"recipient": "bo", "type": "note"}, "no") == 'message to bo of type "note": no'
