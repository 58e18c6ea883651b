"""Checks of an agent's calls at the hub: retries, keys, refusals, topics, questions, replies, and leases."""

from __future__ import annotations

import time
from typing import Any, Final

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.tools.conformance.client_process import ClientProcess
from connectors.tools.conformance.http_proxy import Exchange, Fault
from connectors.tools.conformance.scene import (
    CALL_S,
    CheckFailed,
    Checks,
    Principal,
    Scene,
    expect,
    expect_error,
    wait_hit,
)
from trunkline_agent.wire.message_fields import DESCRIPTION, MESSAGE_FIELDS

CHECKS: Final = Checks()
SEND: Final = "/api/hub/messages"
_RETRY_AFTER_S: Final = 2
_ASK_S: Final = 2.0
_FIELDS: Final = ("sender", "type", "payload", "attempt", "topic", *(one.name for one in MESSAGE_FIELDS))


def drained(hub: GatewayClient, wait_s: float = 0.0, limit: int = 100) -> list[dict[str, Any]]:
    """Take the messages of a mailbox for good, and return them. It waits `wait_s` for the first one."""
    answer = hub.get(path_of("messages"), {"wait": wait_s, "limit": limit}, wait_s=wait_s)
    return list(answer["messages"])


def posted(hub: GatewayClient, to: str, payload: object, **more: object) -> str:
    """Send a message as the kit, and return its id."""
    body = {"recipient": to, "type": "conformance", "payload": payload, **more}
    return str(hub.post(path_of("messages"), body)["message_id"])


def keys_of(exchanges: list[Exchange]) -> set[str | None]:
    """Return the idempotency keys of requests."""
    return {one.headers.get("idempotency-key") for one in exchanges}


@CHECKS.add("hub")
def sends_and_receives(scene: Scene) -> None:
    """Check that a message has recipient, type and payload as they were given, also nasty texts and numbers."""
    ann, bo = scene.principal(), scene.principal()
    client = scene.agent(ann)
    payload: dict[str, Any] = {
        "text": "größer 😀 \u2028 \x7f",
        "numbers": [0, -1, 2**53 - 1, 0.5],
        "none": None,
        "": [[], {}],
    }
    answer = client.call("send", CALL_S, to=bo.name, type="note", payload=payload)
    found = drained(scene.hub(bo), 5)
    expect([one["payload"] for one in found], [payload], "the payload")
    expect((found[0]["sender"], found[0]["type"]), (ann.name, "note"), "sender and type")
    expect(answer.get("message_id"), found[0]["id"], "the message_id of the answer")
    client.leave()


@CHECKS.add("hub")
def send_retries_a_cut_request(scene: Scene) -> None:
    """Check that a message whose request was cut before the hub got it is sent again, more than once."""
    _check_send(scene, Fault("POST", SEND, times=2))


@CHECKS.add("hub")
def send_keeps_its_idempotency_key(scene: Scene) -> None:
    """Check that a request whose answer was lost is repeated with the same Idempotency-Key: one message."""
    _check_send(scene, Fault("POST", SEND, forward=True))


@CHECKS.add("hub")
def send_waits_for_retry_after(scene: Scene) -> None:
    """Check that the answer 503 is repeated, and not before its Retry-After is over."""
    answer = {"reason": "unreachable", "message": "by the conformance kit"}
    headers = {"Retry-After": str(_RETRY_AFTER_S)}
    _check_send(scene, Fault("POST", SEND, answer=(503, headers, answer)))
    first, second = (one.at for one in scene.http.exchanges("POST", SEND)[:2])
    # The clock of a client may be a little coarse.
    if second - first < _RETRY_AFTER_S - 0.05:
        waited = second - first
        raise CheckFailed(f"sent again after {waited:.2f} s, and the answer had Retry-After: {_RETRY_AFTER_S}")


def _check_send(scene: Scene, fault: Fault) -> None:
    ann, bo = scene.principal(), scene.principal()
    client, hub = scene.agent(ann), scene.hub(bo)
    scene.http.plant(fault)
    client.call("send", CALL_S, to=bo.name, type="note", payload={"n": 1})
    found = [one["payload"] for one in drained(hub, 5)]
    expect(found, [{"n": 1}], "the messages in the mailbox")
    attempts = scene.http.exchanges("POST", SEND)
    if None in keys_of(attempts) or len(attempts) < 2:
        raise CheckFailed(f"{len(attempts)} requests, with the keys {keys_of(attempts)}")


@CHECKS.add("hub")
def send_has_a_new_key_for_each_message(scene: Scene) -> None:
    """Check that two messages have two idempotency keys: both are in the mailbox, in order."""
    ann, bo = scene.principal(), scene.principal()
    client = scene.agent(ann)
    for n in (1, 2):
        client.call("send", CALL_S, to=bo.name, type="note", payload={"n": n})
    expect([one["payload"]["n"] for one in drained(scene.hub(bo), 5)], [1, 2], "the messages in the mailbox")


@CHECKS.add("hub")
def refusals_have_their_kind(scene: Scene) -> None:
    """Check that an unknown recipient is `not_found`, with the hub's reason, after one request."""
    client = scene.agent(scene.principal())
    error = expect_error(
        "not_found",
        lambda: client.call("send", CALL_S, to="nobody-has-this-name", type="note", payload={}),
        "a message to an unknown recipient",
    )
    expect(error.reason, "unknown_recipient", "the reason")
    expect(len(scene.http.exchanges("POST", SEND)), 1, "the number of requests")


@CHECKS.add("hub")
def rate_limits_are_reported(scene: Scene) -> None:
    """Check that a refusal by a limit is `rate_limited` when the patience is over, with retry_after_s."""
    bo = scene.principal()
    scene.operator.post(path_of("limits", "name", bo.name), {"pending_most": 1})
    posted(scene.operator, bo.name, {})
    client = scene.agent(scene.principal(), patience_s=1.0)
    error = expect_error(
        "rate_limited",
        lambda: client.call("send", CALL_S, to=bo.name, type="note", payload={}),
        "a message to a full mailbox",
    )
    expect(error.reason, "mailbox_full", "the reason")
    if not isinstance(error.retry_after_s, int | float) or error.retry_after_s <= 0:
        raise CheckFailed(f"retry_after_s: expected a number of seconds, found {error.retry_after_s!r}")


@CHECKS.add("hub")
def an_absent_hub_is_unreachable(scene: Scene) -> None:
    """Check that a call ends as `unreachable` when the hub stays away for longer than the patience."""
    ann, bo = scene.principal(), scene.principal()
    client = scene.agent(ann, patience_s=1.0)
    scene.http.plant(Fault("POST", SEND, times=1000))
    call = lambda: client.call("send", 10.0, to=bo.name, type="note", payload={})  # noqa: E731  used once
    expect_error("unreachable", call, "a message without a hub")
    scene.http.heal()
    client.call("send", CALL_S, to=bo.name, type="note", payload={"n": 2})
    expect([one["payload"] for one in drained(scene.hub(bo), 5)], [{"n": 2}], "the messages in the mailbox")


@CHECKS.add("topics")
def topics(scene: Scene) -> None:
    """Check that a subscriber gets what is published to its topic, with the topic's name."""
    ann, bo = scene.principal(), scene.principal()
    topic = f"topic-{ann.name}"
    client = scene.agent(ann)
    client.call("subscribe", topic=topic)
    kit = scene.hub(bo)
    kit.post(path_of("topics", topic), {"type": "built", "payload": {"n": 1}})
    got = leased(client)
    expect((got["payload"], got["topic"], got["sender"]), ({"n": 1}, topic, bo.name), "the copy")
    client.call("ack", message_id=got["id"])
    kit.post(path_of("topics", topic, "subscribe"), {})
    client.call("unsubscribe", topic=topic)
    scene.http.plant(Fault("POST", f"/api/hub/topics/{topic}", forward=True))
    client.call("publish", CALL_S, topic=topic, type="built", payload={"n": 2})
    expect([one["payload"] for one in drained(kit, 5)], [{"n": 2}], "the copies of the other subscriber")
    expect(client.call("lease", wait_s=0.5, lease_s=5).get("message"), None, "a message without a subscription")


@CHECKS.add("hub")
def replies_correlate(scene: Scene) -> None:
    """Check that a reply goes to the sender, in the thread, and names the message that it answers."""
    ann, bo = scene.principal(), scene.principal()
    client, kit = scene.agent(ann), scene.hub(bo)
    # The second question is asked while the first one is open.
    described = {one.name: f"a {one.name}" for one in DESCRIPTION}
    first = posted(kit, ann.name, {"n": 1}, thread="t-1", **described)
    one = leased(client)
    expect({name: one.get(name) for name in described}, described, "the description")
    client.call("reply", CALL_S, message_id=one["id"], type="answer", payload={"n": 10})
    client.call("ack", message_id=one["id"])
    found = drained(kit, 5)
    fields = [(got.get("in_reply_to"), got.get("thread"), got["payload"], got["type"]) for got in found]
    expect(fields, [(first, "t-1", {"n": 10}, "answer")], "the reply")


@CHECKS.add("ask")
def ask_returns_the_reply_to_it(scene: Scene) -> None:
    """Check that a question returns its own reply, not another message, also when its answer was lost."""
    ann, bo = scene.principal(), scene.principal()
    client, kit = scene.agent(ann), scene.hub(bo)
    posted(kit, ann.name, {"decoy": 1})
    lost = scene.http.plant(Fault("POST", SEND, forward=True))
    client.begin("ask", CALL_S, to=bo.name, type="ask", payload={"n": 6}, wait_s=10.0)
    questions = drained(kit, 10)
    expect([one["payload"] for one in questions], [{"n": 6}], "the question")
    posted(kit, ann.name, {"decoy": 2}, in_reply_to="another-question")
    posted(kit, ann.name, {"n": 42}, in_reply_to=questions[0]["id"])
    reply = client.finish().get("reply") or {}
    expect((reply.get("payload"), reply.get("in_reply_to")), ({"n": 42}, questions[0]["id"]), "the reply")
    wait_hit(lost.hit, "the question")
    expect(drained(kit), [], "further questions")
    left = [one["payload"] for one in drained(scene.hub(ann))]
    expect(left, [{"decoy": 1}, {"decoy": 2}], "the other messages, which stay in the mailbox")


@CHECKS.add("ask")
def ask_ends_without_a_reply(scene: Scene) -> None:
    """Check that a question without a reply ends as `no_reply` when its time is over."""
    ann, bo = scene.principal(), scene.principal()
    client = scene.agent(ann)
    call = lambda: client.call("ask", 10.0, to=bo.name, type="ask", payload={}, wait_s=_ASK_S)  # noqa: E731
    expect_error("no_reply", call, "a question that nobody answers")


def leased(client: Any, wait_s: float = 8.0, lease_s: int = 30) -> dict[str, Any]:
    """Let the client lease a message, and return it. Raises CheckFailed when it gets none."""
    message = client.call("lease", wait_s + CALL_S, wait_s=wait_s, lease_s=lease_s).get("message")
    if not isinstance(message, dict) or not isinstance(message.get("id"), str):
        raise CheckFailed(f"lease: expected a message within {wait_s:g} s, found {message!r}")
    missing = [name for name in _FIELDS if name not in message]
    if missing:
        raise CheckFailed(f"lease: the message lacks {', '.join(missing)}")
    return message


# Long enough for a client on a busy machine to extend it in time.
_LEASE_S: Final = 3
# Gateways end a lease up to a second late.
_REDELIVERY_S: Final = 10.0


def _lease(hub: GatewayClient, wait_s: float) -> dict[str, Any] | None:
    """Lease the next message as the kit, for a minute. None: none came in time."""
    query = {"wait": wait_s, "lease": 60, "limit": 1}
    found = hub.get(path_of("messages"), query, wait_s=wait_s)["messages"]
    return dict(found[0]) if found else None


def _given(scene: Scene) -> tuple[ClientProcess, GatewayClient, str, Principal]:
    """Return a client, its mailbox as the kit sees it, the id of a message in it, and its principal."""
    ann, bo = scene.principal(), scene.principal()
    message_id = posted(scene.hub(bo), ann.name, {"n": 1})
    return scene.agent(ann), scene.hub(ann), message_id, ann


@CHECKS.add("hub")
def acknowledges(scene: Scene) -> None:
    """Check that an acknowledged message never comes again, also when the answer to the ack was lost."""
    client, mailbox, message_id, _ = _given(scene)
    got = leased(client, lease_s=_LEASE_S)
    expect((got["id"], got["attempt"], got["payload"]), (message_id, 1, {"n": 1}), "the message")
    scene.http.plant(Fault("POST", f"{SEND}/ack", forward=True))
    client.call("ack", CALL_S, message_id=message_id)
    expect(_lease(mailbox, _LEASE_S + 1.5), None, "a message after its acknowledgement")


@CHECKS.add("hub")
def gives_back(scene: Scene) -> None:
    """Check that a message that was given back is handed out again at once, as the second attempt."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=60)
    client.call("nack", CALL_S, message_id=message_id, error="no disk space")
    again = _lease(mailbox, _REDELIVERY_S) or {}
    expect((again.get("id"), again.get("attempt")), (message_id, 2), "the message and its attempt")


@CHECKS.add("hub")
def settles_once(scene: Scene) -> None:
    """Check that a refused ack can be called again, that a repeated one does nothing, and a nack is usage."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=_LEASE_S)
    scene.http.plant(Fault("POST", f"{SEND}/ack", answer=(403, {}, {"reason": "policy", "message": "not now"})))
    expect_error("refused", lambda: client.call("ack", CALL_S, message_id=message_id), "a refused ack")
    client.call("ack", CALL_S, message_id=message_id)
    client.call("ack", CALL_S, message_id=message_id)
    expect_error("usage", lambda: client.call("nack", CALL_S, message_id=message_id, error="no"), "a late nack")
    expect(_lease(mailbox, _LEASE_S + 1.5), None, "a message after its acknowledgement")


@CHECKS.add("hub")
def killed_before_ack(scene: Scene) -> None:
    """Check that a message is handed out again when the client is killed after the lease, before the ack."""
    client, _, message_id, ann = _given(scene)
    leased(client, lease_s=_LEASE_S)
    client.kill()
    other = scene.agent(ann)
    again = leased(other, _REDELIVERY_S)
    expect((again["id"], again["attempt"]), (message_id, 2), "the message and its attempt")
    other.call("ack", message_id=message_id)


@CHECKS.add("hub")
def lease_is_repeated_not_renewed(scene: Scene) -> None:
    """Check that a lease whose answer was lost is asked for with the same X-Request-ID: attempt 1, at once."""
    ann, bo = scene.principal(), scene.principal()
    message_id = posted(scene.hub(bo), ann.name, {"n": 1})
    client = scene.agent(ann)
    scene.http.plant(Fault("GET", SEND, forward=True))
    got = leased(client, 4.0, lease_s=60)
    expect((got["id"], got["attempt"]), (message_id, 1), "the message and its attempt")
    client.call("ack", message_id=message_id)


@CHECKS.add("hub")
def lost_leases_are_reported(scene: Scene) -> None:
    """Check that the ack of a client that was stopped until another one had its message is `lease_lost`."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=_LEASE_S)
    client.pause()
    again = _lease(mailbox, _REDELIVERY_S)
    client.resume()
    if again is None:
        raise CheckFailed("the lease of a stopped client did not end")
    expect_error("lease_lost", lambda: client.call("ack", CALL_S, message_id=message_id), "a late ack")


@CHECKS.add("extend")
def extends(scene: Scene) -> None:
    """Check that an extended lease lasts longer: no other client gets the message meanwhile."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=_LEASE_S)
    client.call("extend", CALL_S, message_id=message_id, lease_s=30)
    # The lease must not be extended by the client itself.
    client.pause()
    found = _lease(mailbox, _LEASE_S + 2.0)
    client.resume()
    expect(found, None, "a message under an extended lease")
    client.call("ack", CALL_S, message_id=message_id)


@CHECKS.add("keeps_leases")
def keeps_leases(scene: Scene) -> None:
    """Check that the lease of a message that is not settled is extended until the ack."""
    client, mailbox, message_id, _ = _given(scene)
    leased(client, lease_s=_LEASE_S)
    expect(_lease(mailbox, 2 * _LEASE_S + 1.0), None, "a message that is still at work")
    client.call("ack", CALL_S, message_id=message_id)


@CHECKS.add("ends_long_handlings")
def ends_long_handlings(scene: Scene) -> None:
    """Check that a message that is handled for longer than longest_s comes again, and its ack is late."""
    client, mailbox, message_id, _ = _given(scene)
    client.call("lease", CALL_S, wait_s=8.0, lease_s=60, longest_s=1.0)
    again = _lease(mailbox, _REDELIVERY_S) or {}
    expect((again.get("id"), again.get("attempt")), (message_id, 2), "the message and its attempt")
    expect_error("lease_lost", lambda: client.call("ack", CALL_S, message_id=message_id), "a late ack")


@CHECKS.add("hub")
def an_empty_mailbox_is_waited_for(scene: Scene) -> None:
    """Check that a lease waits for a message that comes later, and returns null when none comes in time."""
    ann, bo = scene.principal(), scene.principal()
    client, kit = scene.agent(ann), scene.hub(bo)
    started = time.monotonic()
    expect(client.call("lease", wait_s=1.0, lease_s=30).get("message"), None, "a message of an empty mailbox")
    took = time.monotonic() - started
    if took < 0.9:
        raise CheckFailed(f"lease with wait_s 1 returned after {took:.2f} s")
    client.begin("lease", CALL_S, wait_s=15.0, lease_s=30)
    scene_message = posted(kit, ann.name, {"n": 1})
    message = client.finish().get("message") or {}
    expect(message.get("id"), scene_message, "the message")
    client.call("ack", CALL_S, message_id=scene_message)
    expect(drained(scene.hub(ann)), [], "the mailbox")
