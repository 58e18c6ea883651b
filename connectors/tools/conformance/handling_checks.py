"""Checks of the rules that both libraries share: handlings, texts, refusals, statuses, other agents."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
import uuid
from functools import partial
from typing import Any, Final

from connectors.plumbing.gateway_client.gateway_client import path_of
from connectors.tools.conformance.client_process import ClientProcess, ClientRefused
from connectors.tools.conformance.http_proxy import Fault
from connectors.tools.conformance.hub_checks import SEND, drained, leased, posted
from connectors.tools.conformance.scene import CALL_S, CheckFailed, Checks, Scene, expect, expect_error
from connectors.tools.conformance.vector_checks import vectors
from trunkline_agent.hub.hub_requests import Handling
from trunkline_agent.mcp.signing import new_key_pair

CHECKS: Final = Checks()
_LEASE_S: Final = 2
_WAIT_S: Final = 2
_TEXT: Final = "cannot log in with sk-live-hunter2"
# Payloads that look like others: each is what it is, at both ends.
_ALIKE: Final = (
    {"text": "42"},
    {"text": "true"},
    {"text": '{"a":1}'},
    "42",
    "true",
    "null",
    "",
    42,
    True,
)
# The errors of the library as the kinds of the protocol.
_KINDS: Final = {
    "UsageError": "usage",
    "Refused": "refused",
    "MessageRejected": "refused",
    "NotFound": "not_found",
    "RateLimited": "rate_limited",
    "BackboneUnreachable": "unreachable",
    "TrunklineError": "failed",
}


@CHECKS.add("handlings")
def repeated_handlings_send_once(scene: Scene) -> None:
    """Check that handling a message again after a kill sends nothing a second time.

    Two equal messages of one handling have different keys. Both libraries derive them in the same way from the
    handled message, the content and its number.
    """
    ann, bo = scene.principal(), scene.principal()
    message_id = posted(scene.hub(bo), ann.name, {"n": 1})

    def handle(client: ClientProcess, *numbers: int) -> None:
        for n in numbers:
            fields = {"to": bo.name, "type": "note", "payload": {"n": n}}
            client.call("send", CALL_S, **fields, while_handling=message_id)

    first = scene.agent(ann)
    leased(first, lease_s=_LEASE_S)
    handle(first, 1, 1)
    first.kill()
    second = scene.agent(ann)
    leased(second, lease_s=_LEASE_S)
    handle(second, 1, 1, 2)
    second.call("ack", CALL_S, message_id=message_id)
    found = sorted(one["payload"]["n"] for one in drained(scene.hub(bo), 5))
    expect(found, [1, 1, 2], "the messages of two handlings")
    sent = scene.http.exchanges("POST", SEND)[0]
    body = json.dumps({"recipient": bo.name, "type": "note", "payload": {"n": 1}}).encode()
    wanted = Handling(message_id, 1).content_key("message", body).text
    expect(sent.headers.get("idempotency-key"), wanted, "the key that follows from message and content")


@CHECKS.add("handlings")
def repeated_handlings_reply_once(scene: Scene) -> None:
    """Check that a message whose handler was killed after its reply is answered once, by the shared key."""
    ann, bo = scene.principal(), scene.principal()
    message_id = posted(scene.hub(bo), ann.name, {"n": 1})
    for attempt in (1, 2):
        client = scene.agent(ann)
        leased(client, lease_s=_LEASE_S)
        client.call("reply", CALL_S, message_id=message_id, type="answer", payload={"attempt": attempt})
        if attempt == 1:
            client.kill()
    client.call("ack", CALL_S, message_id=message_id)
    expect([one["payload"] for one in drained(scene.hub(bo), 5)], [{"attempt": 1}], "the replies")
    found = scene.http.exchanges("POST", SEND)[0].headers.get("idempotency-key")
    expect(found, Handling(message_id, 1).reply_key().text, "the key of the first reply")


@CHECKS.add("handlings")
def failures_hide_their_text(scene: Scene) -> None:
    """Check that the text of a handler's exception, which may have a secret, is in no request to the hub."""
    ann, bo = scene.principal(), scene.principal()
    message_id = posted(scene.hub(bo), ann.name, {"n": 1})
    client = scene.agent(ann)
    leased(client)
    client.call("fail", CALL_S, message_id=message_id, text=_TEXT)
    given_back = scene.http.exchanges("POST", f"{SEND}/nack")
    expect(len(given_back), 1, "the number of requests that give the message back")
    texts = [one.body.decode("utf-8", "replace") for one in scene.http.exchanges("POST", ".*")]
    if shown := [text for text in texts if "hunter2" in text]:
        raise CheckFailed(f"the text of the exception is in a request: {shown[0]}")


@CHECKS.add("hub")
def texts_stay_texts(scene: Scene) -> None:
    """Check that payloads that look like numbers, words or JSON arrive as they are, and are sent so."""
    ann, bo = scene.principal(), scene.principal()
    client, kit = scene.agent(ann), scene.hub(bo)
    got = []
    for payload in _ALIKE:
        message_id = posted(kit, ann.name, payload)
        got.append(leased(client)["payload"])
        client.call("ack", message_id=message_id)
        client.call("send", CALL_S, to=bo.name, type="note", payload=payload)
    wanted = [json.dumps(one) for one in _ALIKE]
    expect([json.dumps(one) for one in got], wanted, "the payloads that the client got")
    sent = [json.dumps(one["payload"]) for one in drained(kit, 5)]
    expect(sent, wanted, "the payloads that the client sent")


@CHECKS.add("hub")
def refusals_follow_the_table(scene: Scene) -> None:
    """Check that each refusal has the kind of the shared table, keeps its reason, and is repeated or not."""
    client = scene.agent(scene.principal(), patience_s=0.3)
    wrong = []
    for one in vectors("hub")["refusals"]:
        body = {name: one[name] for name in ("reason",) if one[name]} | {"message": "by the conformance kit"}
        scene.http.plant(Fault("POST", SEND, answer=(one["status"], {}, body), times=1000))
        before = len(scene.http.exchanges("POST", SEND))
        try:
            client.call("send", CALL_S, to="anybody", type="note", payload={})
            found, reason = "success", one["reason"]
        except ClientRefused as error:
            found, reason = error.kind, error.reason
        scene.http.heal()
        requests = len(scene.http.exchanges("POST", SEND)) - before
        wanted = _KINDS[one["error_of_a_message"]]
        if found != wanted or (one["reason"] and reason != one["reason"]):
            wrong.append(f"{one['status']} {one['reason']}: expected {wanted}, found {found} ({reason})")
        elif (requests > 1) != one["is_repeated"]:
            wrong.append(f"{one['status']} {one['reason']}: {requests} requests")
    if wrong:
        raise CheckFailed("; ".join(wrong))


@CHECKS.add("hub")
def answers_of_others_are_no_success(scene: Scene) -> None:
    """Check that an answer 200 without the fields of the hub, as from another server, is an error."""
    client = scene.agent(scene.principal())
    scene.http.plant(Fault("POST", SEND, answer=(200, {}, {"hello": "world"})))
    call = lambda: client.call("send", CALL_S, to="anybody", type="note", payload={})  # noqa: E731  used once
    expect_error("failed", call, "an answer of another server")


@CHECKS.add("hub")
def impossible_numbers_are_usage(scene: Scene) -> None:
    """Check that a lease of no time, or of more than a day, is `usage`, and no request."""
    client = scene.agent(scene.principal())
    for lease_s in (0, 86_401):
        call = partial(client.call, "lease", CALL_S, wait_s=0.1, lease_s=lease_s)
        expect_error("usage", call, f"a lease of {lease_s} s")
    expect(scene.http.exchanges("GET", SEND), [], "requests")


@CHECKS.add("hub")
def reasons_follow_the_table(scene: Scene) -> None:
    """Check that the reason with which a message is given back is sent as one line of 500 characters."""
    ann, bo = scene.principal(), scene.principal()
    client, kit = scene.agent(ann), scene.hub(bo)
    for one in vectors("hub")["reasons"]:
        message_id = posted(kit, ann.name, {})
        leased(client)
        client.call("nack", CALL_S, message_id=message_id, error=one["reason"])
        sent = _last_body(scene, f"{SEND}/nack")
        expect(sent.get("reason"), one["sent"], one["name"])
        leased(client)
        client.call("ack", CALL_S, message_id=message_id)


@CHECKS.add("hub")
def no_payload_is_null(scene: Scene) -> None:
    """Check that a message that is sent without a payload has the payload null, and no other field."""
    client = scene.agent(scene.principal())
    client.call("send", CALL_S, to="hub", type="note")
    sent = _last_body(scene, SEND)
    expect(sent, {"recipient": "hub", "type": "note", "payload": None}, "the message")


@CHECKS.add("schedules")
def schedules(scene: Scene) -> None:
    """Check that an agent sets schedules, lists its own active ones by name, and removes one once."""
    ann, bo = scene.principal(), scene.principal()
    first, client = scene.agent(bo), scene.agent(ann)
    names = [f"{who.name}-{n}" for who, n in ((ann, 2), (ann, 1), (bo, 1))]
    message = {"to": bo.name, "type": "tick", "payload": {}, "every_s": 3600}
    for name, agent in zip(names, (client, client, first), strict=True):
        agent.call("schedule", CALL_S, name=name, **message)
    shown = {"recipient": bo.name, "type": "tick", "cron": None, "every_s": 3600, "status": "active", "runs": 0}
    wanted = [{"name": name, **shown} for name in sorted(names[:2])]
    found = client.call("schedules", CALL_S).get("schedules") or []
    expect([{field: one.get(field) for field in wanted[0]} for one in found], wanted, "the schedules")
    client.call("unschedule", CALL_S, name=names[0])
    found = client.call("schedules", CALL_S).get("schedules") or []
    expect([one.get("name") for one in found], names[1:2], "the schedules after one was removed")
    call = lambda: client.call("unschedule", CALL_S, name=names[0])  # noqa: E731  used once
    expect_error("refused", call, "the removal of a removed schedule")


@CHECKS.add("blobs")
def blobs(scene: Scene) -> None:
    """Check that a large content arrives as it is, and that another one under its digest is an error."""
    ann, bo = scene.principal(), scene.principal()
    sender, client = scene.agent(bo), scene.agent(ann)
    content = os.urandom(300_000)
    digest = hashlib.sha256(content).hexdigest()
    written = base64.b64encode(content).decode("ascii")
    stored = sender.call("upload", CALL_S, content_base64=written, content_type="image/png")
    expect(stored, {"digest": digest, "bytes": len(content), "content_type": "image/png"}, "the stored blob")
    sender.call("send", CALL_S, to=ann.name, type="note", payload={}, blob=digest)
    message_id = leased(client)["id"]
    scene.http.plant(Fault("GET", ".*/blob", answer=(200, {}, "another content")))

    def call() -> Any:
        return client.call("blob", CALL_S, message_id=message_id)

    expect(expect_error("failed", call, "another content").reason, "damaged_blob", "the reason")
    expect(call().get("content_base64") == written, True, "whether the content is that of the sender")


@CHECKS.add("hub")
def send_waits_until_a_date(scene: Scene) -> None:
    """Check that a Retry-After with a date is waited for, in each of the three forms of HTTP, all in UTC."""
    ann, bo = scene.principal(), scene.principal()
    client = scene.agent(ann)
    answer = {"reason": "unreachable", "message": "by the conformance kit"}
    forms = ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y")
    for form in forms:
        # The clock of dates has whole seconds.
        until = time.gmtime(time.time() + _WAIT_S + 1)
        said = time.strftime(form, until)
        scene.http.plant(Fault("POST", SEND, answer=(503, {"Retry-After": said}, answer)))
        client.call("send", CALL_S, to=bo.name, type="note", payload={"form": form})
        first, second = (one.at for one in scene.http.exchanges("POST", SEND)[-2:])
        if not _WAIT_S - 0.1 <= second - first <= _WAIT_S + 4:
            waited = second - first
            raise CheckFailed(
                f"sent again after {waited:.2f} s, and Retry-After was {said}, in {_WAIT_S} to 3 s"
            )


@CHECKS.add("discovery")
def reports_its_status(scene: Scene) -> None:
    """Check that a status is a message of the type status to the hub, with state and text."""
    client = scene.agent(scene.principal())
    client.call("status", CALL_S, state="working", text="step 3")
    sent = _last_body(scene, SEND)
    wanted = {"recipient": "hub", "type": "status", "payload": {"status": "working", "text": "step 3"}}
    expect({name: sent.get(name) for name in wanted}, wanted, "the message")


@CHECKS.add("discovery")
def discovers_by_capability(scene: Scene) -> None:
    """Check that agents are found by a capability and a status, and no others."""
    client = scene.agent(scene.principal())
    names = [f"conformance-{uuid.uuid4().hex[:12]}" for _ in range(2)]
    capability = f"can-{names[0]}"
    for name, able in zip(names, ([capability], []), strict=True):
        _, key = new_key_pair()
        asked = {"agent_name": name, "public_key": key, "task": "is found", "capabilities": able}
        scene.operator.post(path_of("participants"), asked)
    try:
        found = client.call("discover", CALL_S, capability=capability).get("agents") or []
        wanted = {"name": names[0], "task": "is found", "capabilities": [capability]}
        shown = [{field: one.get(field) for field in wanted} for one in found]
        expect(shown, [wanted], "the agents with a capability")
        both = {one.get("name") for one in client.call("discover", CALL_S).get("agents") or []}
        if not set(names) <= both:
            raise CheckFailed(f"all agents: {names} are missing in {sorted(map(str, both))}")
    finally:
        for name in names:
            scene.operator.post(path_of("participants", name, "stop"))
    stopped = client.call("discover", CALL_S, capability=capability, status="stopped").get("agents") or []
    expect([one.get("name") for one in stopped], [names[0]], "the stopped agents with a capability")
    left = client.call("discover", CALL_S, capability=capability).get("agents")
    expect(left, [], "the agents with a capability that have not stopped")


def _last_body(scene: Scene, path: str) -> dict[str, Any]:
    """Return the JSON of the newest request to a path."""
    exchanges = scene.http.exchanges("POST", path)
    if not exchanges:
        raise CheckFailed(f"the client sent no request to {path}")
    found: dict[str, Any] = json.loads(exchanges[-1].body)
    return found
