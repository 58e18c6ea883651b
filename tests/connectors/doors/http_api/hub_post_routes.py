"""Each POST route of the hub with a request that it takes: what tests of all of them ask."""

from __future__ import annotations

import itertools

from tests.connectors.doors.http_api.hub_stack import MESSAGES, TASKS

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
# POST routes whose answers have ids, tokens or secrets that follow from the request: what makes the address,
# the body, and another content. None: there is no other content.
ROUTES = {
    JOBS: (lambda hub: JOBS, {"description": "a"}, {"description": "b"}),
    f"{JOBS}/{{job_id}}/secret": (
        lambda hub: f"{JOBS}/{_job(hub)}/secret",
        {"overlap_s": 1},
        {"overlap_s": 2},
    ),
    PRINCIPALS: (
        lambda hub: PRINCIPALS,
        {"principal": "ann", "role": "viewer"},
        {"principal": "ann", "role": "worker"},
    ),
    f"{AGENTS}/{{name}}/mqtt": (lambda hub: f"{AGENTS}/{fresh('by-mqtt')}/mqtt", {}, None),
    f"{LIMITS}/{{scope}}/{{name}}": (
        lambda hub: f"{LIMITS}/name/{fresh()}",
        {"pending_most": 1},
        {"pending_most": 2},
    ),
    MESSAGES: (
        lambda hub: MESSAGES,
        {"recipient": "hub", "type": "a", "payload": 1},
        {"recipient": "hub", "type": "a", "payload": 2},
    ),
    f"{WEBHOOKS}/{{name}}": (
        lambda hub: f"{WEBHOOKS}/{hub.principal('worker')[0]}",
        WEBHOOK,
        {"url": "https://example.org/b"},
    ),
    TASKS: (
        lambda hub: TASKS,
        {"agent_name": "idle", "description": "a"},
        {"agent_name": "idle", "description": "b"},
    ),
}
