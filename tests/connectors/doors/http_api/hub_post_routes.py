"""Each POST route of the hub with a request that it takes: what tests of all of them ask."""

from __future__ import annotations

import itertools

from connectors.hub.serving.identities import request_uuid
from tests.connectors.doors.http_api.hub_stack import MESSAGES, TASKS, TOKENS
from trunkline_agent.mcp.signing import new_key_pair

JOBS, SESSIONS, PRINCIPALS = "/api/hub/jobs", "/api/hub/sessions", "/api/hub/principals"
PARTICIPANTS, MAILBOXES = "/api/hub/participants", "/api/hub/mailboxes"
AGENTS, LIMITS, TOPICS = "/api/hub/agents", "/api/hub/limits", "/api/hub/topics"
SCHEDULES, WEBHOOKS = "/api/hub/schedules", "/api/hub/webhooks"
_numbers = itertools.count(1)


def fresh(kind="x"):
    """A name that nothing has yet."""
    return f"{kind}-{next(_numbers)}"


def _job(hub):
    return hub.operator.post(JOBS, json={"description": "x"}).json()["job_id"]


def _session(hub, *ends):
    name = fresh("session")
    for path, body in ((SESSIONS, {"session": name}), *((f"{SESSIONS}/{name}/{end}", {}) for end in ends)):
        assert hub.operator.post(path, json=body).is_success
    return name


def _principal(hub):
    return hub.principal("viewer")[0]


def _participant(hub):
    """Name and key of one that takes part."""
    body = {"agent_name": fresh("agent"), "public_key": new_key_pair()[1]}
    told = hub.operator.post(PARTICIPANTS, json=body).json()
    return told["id"], told["keys"][0]["key_id"]


def _mqtt_agent(hub):
    name = fresh("by-mqtt")
    assert hub.operator.post(f"{AGENTS}/{name}/mqtt").status_code == 201
    return name


def _token_id(hub):
    return hub.token_of(hub.submit("idle").id)["token_id"]


def _topic(hub):
    """A topic with a subscriber."""
    name = fresh("topic")
    assert hub.operator.post(f"{TOPICS}/{name}/subscribe", json={}).is_success
    return name


def _to_be_read(hub):
    """The route, once the operator has the message that `READ` names."""
    body = {"recipient": "operator", "type": "a"}
    assert hub.operator.post(MESSAGES, json=body, headers={"Idempotency-Key": "to-be-read"}).is_success
    return f"{MESSAGES}/read"


def dead_message(hub):
    """A dead message in the mailbox of a new worker: the names in the path of its replay."""
    name, token = hub.principal("worker")
    worker = hub.client(token)
    message_id = hub.operator.post(MESSAGES, json={"recipient": name, "type": "a"}).json()["message_id"]
    for _ in range(hub.settings.gateway.max_attempts):
        lease_id = worker.get(MESSAGES, params={"lease": 60}).json()["lease_id"]
        named = {"lease_id": lease_id, "message_ids": [message_id]}
        assert worker.post(f"{MESSAGES}/nack", json=named).json()["done"] == [message_id]
    return {"realm": "default", "name": name, "message_id": message_id}


def message_with_blob(hub):
    """A message with a blob in the mailbox of a new worker: the names in the path of its blob."""
    name, _ = hub.principal("worker")
    digest = hub.operator.put("/api/hub/blobs", content=f"for {name}").json()["digest"]
    sent = hub.operator.post(MESSAGES, json={"recipient": name, "type": "a", "blob": digest}).json()
    return {"realm": "default", "name": name, "message_id": sent["message_id"]}


MADE = {"replay": dead_message, "blob": message_with_blob}
"""The functions that make the thing of a route, by the last part of the route."""


def _leased(hub, how):
    """The route that ends or extends a lease, once the operator has the lease that `lease_named` names."""
    named = lease_named(how)
    body = {"recipient": "operator", "type": "a"}
    assert hub.operator.post(MESSAGES, json=body, headers={"Idempotency-Key": f"to-{how}"}).is_success
    asked = {"lease": 3600, "limit": 1000}
    lease = hub.operator.get(MESSAGES, params=asked, headers={"X-Request-ID": f"to-{how}"}).json()
    assert lease["lease_id"] == named["lease_id"]
    return f"{MESSAGES}/{how}"


def lease_named(how):
    """The lease and the message that a request of this kind is about."""
    lease_id = str(request_uuid("operator", f"drain/to-{how}"))
    return {"lease_id": lease_id, "message_ids": [str(request_uuid("operator", f"to-{how}"))]}


def new_schedule(hub):
    """The path of a new schedule."""
    path = f"{SCHEDULES}/{fresh('schedule')}"
    assert hub.operator.post(path, json=SCHEDULE).is_success
    return path


def new_webhook(hub, *ends):
    """The path of the webhook of a new worker, which is set and then has these ends."""
    path = f"{WEBHOOKS}/{hub.principal('worker')[0]}"
    for end in ("", *ends):
        body = {} if end else WEBHOOK
        assert hub.operator.post(f"{path}{end}", json=body).is_success
    return path


WEBHOOK = {"url": "https://example.org/a"}
SCHEDULE = {"recipient": "hub", "type": "a", "every_s": 3600}
# The bodies of routes for which the least that the schema allows is not enough: a schedule needs one of two
# fields, and a webhook's URL has a form.
LEAST = {f"{SCHEDULES}/{{name}}": SCHEDULE, f"{WEBHOOKS}/{{name}}": WEBHOOK}
READ = {"message_ids": [str(request_uuid("operator", "to-be-read"))]}
# Routes without an idempotency key: a pump's requests name messages and leases by ids of their own, and the
# event of a job has its seq. XML is tested in test_xml_messages.py.
OTHER_POSTS = {f"/api/hub/pump/{what}" for what in ("started", "lease", "settle", "history")}
# A test of a webhook and a report of the load over MQTT record nothing.
OTHER_POSTS |= {
    "/messages",
    f"{JOBS}/{{job_id}}/events",
    f"{WEBHOOKS}/{{name}}/test",
    "/api/hub/mqtt-load",
}
# Each POST route: what makes the request's address, its body, and another content. None: what is asked for is
# the same by what it says (docs/explanation/guarantees.md), so that there is no other content.
ROUTES = {
    JOBS: (lambda hub: JOBS, {"description": "a"}, {"description": "b"}),
    f"{JOBS}/pick": (lambda hub: _job(hub) and f"{JOBS}/pick", {"session": "picker"}, None),
    f"{JOBS}/{{job_id}}/assign": (lambda hub: f"{JOBS}/{_job(hub)}/assign", {"session": "assigned"}, None),
    f"{JOBS}/{{job_id}}/cancel": (lambda hub: f"{JOBS}/{_job(hub)}/cancel", {"reason": "a"}, {"reason": "b"}),
    f"{JOBS}/{{job_id}}/secret": (
        lambda hub: f"{JOBS}/{_job(hub)}/secret",
        {"overlap_s": 1},
        {"overlap_s": 2},
    ),
    SESSIONS: (lambda hub: SESSIONS, {"session": "made"}, {"session": "made", "description": "b"}),
    f"{SESSIONS}/{{name}}/stop": (
        lambda hub: f"{SESSIONS}/{_session(hub)}/stop",
        {"reason": "a"},
        {"reason": "b"},
    ),
    f"{SESSIONS}/{{name}}/resume": (
        lambda hub: f"{SESSIONS}/{_session(hub, 'stop')}/resume",
        {},
        {"host": "h"},
    ),
    PRINCIPALS: (
        lambda hub: PRINCIPALS,
        {"principal": "ann", "role": "viewer"},
        {"principal": "ann", "role": "worker"},
    ),
    f"{PRINCIPALS}/{{name}}/revoke": (lambda hub: f"{PRINCIPALS}/{_principal(hub)}/revoke", {}, None),
    PARTICIPANTS: (
        lambda hub: PARTICIPANTS,
        {"agent_name": "joins", "public_key": new_key_pair()[1]},
        {"agent_name": "joins", "public_key": new_key_pair()[1]},
    ),
    f"{PARTICIPANTS}/spawn": (
        lambda hub: f"{PARTICIPANTS}/spawn",
        {"task": "a"},
        {"task": "b"},
    ),
    f"{PARTICIPANTS}/{{name}}/stop": (lambda hub: f"{PARTICIPANTS}/{_participant(hub)[0]}/stop", {}, None),
    f"{PARTICIPANTS}/{{name}}/keys": (
        lambda hub: f"{PARTICIPANTS}/{_participant(hub)[0]}/keys",
        {"public_key": new_key_pair()[1]},
        {"public_key": new_key_pair()[1]},
    ),
    f"{PARTICIPANTS}/{{name}}/keys/{{key_id}}/remove": (
        lambda hub: "{}/{}/keys/{}/remove".format(PARTICIPANTS, *_participant(hub)),
        {},
        None,
    ),
    f"{AGENTS}/{{name}}/mqtt": (lambda hub: f"{AGENTS}/{fresh('by-mqtt')}/mqtt", {}, None),
    f"{AGENTS}/{{name}}/mqtt/remove": (lambda hub: f"{AGENTS}/{_mqtt_agent(hub)}/mqtt/remove", {}, None),
    f"{MAILBOXES}/{{realm}}/{{name}}/clear": (lambda hub: f"{MAILBOXES}/default/{fresh()}/clear", {}, None),
    f"{MAILBOXES}/{{realm}}/{{name}}/messages/{{message_id}}/replay": (
        lambda hub: f"{MAILBOXES}/{{realm}}/{{name}}/messages/{{message_id}}/replay".format(
            **dead_message(hub)
        ),
        {},
        None,
    ),
    f"{LIMITS}/{{scope}}/{{name}}": (
        lambda hub: f"{LIMITS}/name/{fresh()}",
        {"pending_most": 1},
        {"pending_most": 2},
    ),
    f"{MESSAGES}/broadcast": (
        lambda hub: f"{MESSAGES}/broadcast",
        {"type": "a", "payload": 1},
        {"type": "a", "payload": 2},
    ),
    f"{MESSAGES}/read": (_to_be_read, READ, None),
    f"{MESSAGES}/ack": (lambda hub: _leased(hub, "ack"), lease_named("ack"), None),
    f"{MESSAGES}/nack": (lambda hub: _leased(hub, "nack"), lease_named("nack"), None),
    f"{MESSAGES}/extend": (lambda hub: _leased(hub, "extend"), {**lease_named("extend"), "lease": 60}, None),
    MESSAGES: (
        lambda hub: MESSAGES,
        {"recipient": "hub", "type": "a", "payload": 1},
        {"recipient": "hub", "type": "a", "payload": 2},
    ),
    f"{TOPICS}/{{topic}}": (
        lambda hub: f"{TOPICS}/{_topic(hub)}",
        {"type": "a", "payload": 1},
        {"type": "a", "payload": 2},
    ),
    f"{TOPICS}/{{topic}}/subscribe": (
        lambda hub: f"{TOPICS}/{fresh('topic')}/subscribe",
        {"subscriber": "operator"},
        {"subscriber": "hub"},
    ),
    f"{TOPICS}/{{topic}}/unsubscribe": (
        lambda hub: f"{TOPICS}/{_topic(hub)}/unsubscribe",
        {"subscriber": "operator"},
        {"subscriber": "hub"},
    ),
    f"{SCHEDULES}/{{name}}": (
        lambda hub: f"{SCHEDULES}/{fresh('schedule')}",
        SCHEDULE,
        {**SCHEDULE, "every_s": 7200},
    ),
    f"{SCHEDULES}/{{name}}/remove": (lambda hub: f"{new_schedule(hub)}/remove", {}, None),
    f"{WEBHOOKS}/{{name}}": (
        lambda hub: f"{WEBHOOKS}/{hub.principal('worker')[0]}",
        WEBHOOK,
        {"url": "https://example.org/b"},
    ),
    f"{WEBHOOKS}/{{name}}/pause": (
        lambda hub: f"{new_webhook(hub)}/pause",
        {"reason": "a"},
        {"reason": "b"},
    ),
    f"{WEBHOOKS}/{{name}}/resume": (lambda hub: f"{new_webhook(hub, '/pause')}/resume", {}, None),
    f"{WEBHOOKS}/{{name}}/remove": (lambda hub: f"{new_webhook(hub)}/remove", {}, None),
    TASKS: (
        lambda hub: TASKS,
        {"agent_name": "idle", "description": "a"},
        {"agent_name": "idle", "description": "b"},
    ),
    f"{TASKS}/{{task_id}}/complete": (
        lambda hub: f"{TASKS}/{hub.submit('idle').id}/complete",
        {"result": "a"},
        {"result": "b"},
    ),
    f"{TASKS}/{{task_id}}/fail": (
        lambda hub: f"{TASKS}/{hub.submit('idle').id}/fail",
        {"error": "a"},
        {"error": "b"},
    ),
    f"{TASKS}/{{task_id}}/cancel": (
        lambda hub: f"{TASKS}/{hub.submit('idle').id}/cancel",
        {"reason": "a"},
        {"reason": "b"},
    ),
    f"{TOKENS}/{{token_id}}/revoke": (
        lambda hub: f"{TOKENS}/{_token_id(hub)}/revoke",
        {"reason": "a"},
        {"reason": "b"},
    ),
}
