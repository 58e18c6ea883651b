"""Checks of the rules that both libraries share: handlings, texts, refusals, statuses, other agents."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Final

from connectors.plumbing.gateway_client.gateway_client import path_of
from connectors.tools.conformance.check import Checks
from connectors.tools.conformance.client_process import ClientProcess, ClientRefused
from connectors.tools.conformance.http_proxy import Fault
from connectors.tools.conformance.hub_checks import SEND, drained, leased, posted
from connectors.tools.conformance.scene import CALL_S, CheckFailed, Scene, expect
from connectors.tools.conformance.vector_checks import vectors
from trunkline_agent.hub.derived_keys import Handling
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
    """Check that a handling that is repeated after a kill sends equal contents once, by the shared key."""
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
    """Check that each refusal has the kind of the table that both libraries share, and keeps its reason."""
    client = scene.agent(scene.principal(), patience_s=0.3)
    wrong = []
    for one in vectors("hub")["refusals"]:
        body = {name: one[name] for name in ("reason",) if one[name]} | {"message": "by the conformance kit"}
        scene.http.plant(Fault("POST", SEND, answer=(one["status"], {}, body), times=1000))
        try:
            client.call("send", CALL_S, to="anybody", type="note", payload={})
            found, reason = "success", one["reason"]
        except ClientRefused as error:
            found, reason = error.kind, error.reason
        scene.http.heal()
        wanted = _KINDS[one["error_of_a_message"]]
        if found != wanted or (one["reason"] and reason != one["reason"]):
            wrong.append(f"{one['status']} {one['reason']}: expected {wanted}, found {found} ({reason})")
    if wrong:
        raise CheckFailed("; ".join(wrong))


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
    sent: dict[str, Any] = json.loads((scene.http.exchanges("POST", SEND) or [_nothing()])[-1].body)
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


def _nothing() -> Any:
    raise CheckFailed("the client sent nothing")
