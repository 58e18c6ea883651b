"""Records of tasks, agents and containers as tests make them: one good body for each record type."""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Final

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.keys.sealing import mqtt_agent_secret_purpose, webhook_secret_purpose
from schemas.streams.fold import settle
from tests.schemas.job_records import KEYRING, START_US, document_record
from trunkline_agent.wire.agent_message import confirmation, sign_said
from trunkline_agent.wire.signing import key_id_of

TASK_KEY: Final = b"task/t1"
AGENT_KEY: Final = b"agent/coder"
CONTAINER_KEY: Final = b"container/c1"
SCHEDULE_KEY: Final = b"schedule/tea"
WEBHOOK_KEY: Final = b"webhook/ann"
TASK_TOKEN_SHA256: Final = "fedcba9876543210" * 4
TASK_TOKEN_ID: Final = "fedcba987654"
HOUR_MS: Final = 3_600_000


def asked(request_id: str = "q1", **changed: Any) -> dict[str, Any]:
    """The body of a request about a task, with fields changed."""
    return {"schema_version": 1, "task_id": "t1", "request_id": request_id, **changed}


def task_creation(request_id: str = "q1", **changed: Any) -> dict[str, Any]:
    """The body of a task's creation, with fields changed."""
    return asked(request_id, **{"description": "count the stars", "agent_name": "coder", **changed})


def task_start(request_id: str = "q2", **changed: Any) -> dict[str, Any]:
    """The body of a task's start, with fields changed."""
    started = {"capabilities": ["read", "write"], "token_sha256": TASK_TOKEN_SHA256, "expiry_ms": HOUR_MS}
    return task_creation(request_id, **{**started, **changed})


def token_revocation(request_id: str = "q3", **changed: Any) -> dict[str, Any]:
    """The body of a token's revocation, with fields changed."""
    return asked(request_id, **{"token_id": TASK_TOKEN_ID, **changed})


def definition(**changed: Any) -> dict[str, Any]:
    """The body of an agent's definition, with fields changed."""
    body = {
        "schema_version": 1,
        "agent_name": "coder",
        "image": "python:3",
        "description": "writes programs",
        "capabilities": ["read", "write"],
        "hardened": True,
    }
    return {**body, **changed}


def container_change(state: str = "provisioning", **changed: Any) -> dict[str, Any]:
    """The body of a container's change, with fields changed."""
    body = {
        "schema_version": 1,
        "container": "c1",
        "state": state,
        "task_id": "t1",
        "agent_name": "coder",
        "backend": "process",
        "launcher": "gateway1",
    }
    return {**body, **changed}


def public_key(seed: str = "one") -> str:
    """Return a text in the form of a public key; the fold checks no more than the form."""
    inside = base64.b64encode(f"the key {seed}".encode()).decode()
    return f"-----BEGIN PUBLIC KEY-----\n{inside}\n-----END PUBLIC KEY-----\n"


def of_participant(request_id: str = "p1", **changed: Any) -> dict[str, Any]:
    """The body of a request about a participant, with fields changed."""
    return {"schema_version": 1, "agent_name": "coder", "request_id": request_id, **changed}


def joining(request_id: str = "p1", **changed: Any) -> dict[str, Any]:
    """The body of a participant's joining, with fields changed."""
    body = {"task": "count the stars", "capabilities": ["count"], "public_key": public_key(), "task_id": "t1"}
    return of_participant(request_id, **{**body, **changed})


def key_registration(request_id: str = "p2", **changed: Any) -> dict[str, Any]:
    """The body of a further key, with fields changed."""
    return of_participant(request_id, **{"public_key": public_key("two"), "overlap_ms": 60_000, **changed})


def call(signature: str = "ab" * 32, tool: str = "send_to_agent") -> dict[str, Any]:
    """The body of a call that changes something."""
    return {"schema_version": 1, "agent_name": "coder", "signature": signature, "tool": tool}


MQTT_SECRET: Final = "the secret of an agent over MQTT"


def mqtt_registration(request_id: str = "m1", **changed: Any) -> dict[str, Any]:
    """The body of a registration for MQTT, with fields changed."""
    sealed = KEYRING.seal(MQTT_SECRET.encode(), mqtt_agent_secret_purpose("coder"))
    return of_participant(request_id, **{"sealed_secret": sealed, **changed})


def saying(seq: int = 1, **changed: Any) -> dict[str, Any]:
    """Return an outbox message of the MQTT agent, signed after the fields were changed."""
    body = {"message_id": f"w{seq}", "to": "hub", "kind": "note", "body": "hello", "seq": seq}
    return sign_said({"schema_version": 1, **body, **changed}, MQTT_SECRET)


def confirming(*message_ids: str) -> dict[str, Any]:
    """Return the signed payload by which the MQTT agent confirms these messages, or one message."""
    return confirmation(message_ids or ("w1",), MQTT_SECRET)


TOPIC_KEY: Final = b"topic/news"


def of_topic(**fields: Any) -> dict[str, Any]:
    """The body of a record about the topic, with further fields."""
    return {"schema_version": 1, "topic": "news", **fields}


def publication(message_id: str = "p1", **changed: Any) -> dict[str, Any]:
    """The body of a message to the topic, with fields changed."""
    body = {"message_id": message_id, "from": "ann", "from_verified": True, "kind": "note", "body": "{}"}
    return of_topic(**{**body, **changed})


# Record type -> the key of its stream and a good body, of topics.
TOPIC_GOOD: Final[dict[str, tuple[bytes, dict[str, Any]]]] = {
    "topic.subscribed": (TOPIC_KEY, of_topic(subscriber="bo", request_id="s1")),
    "topic.published": (TOPIC_KEY, publication()),
    "topic.delivered": (TOPIC_KEY, of_topic(message_id="p1")),
    "topic.unsubscribed": (TOPIC_KEY, of_topic(subscriber="bo", request_id="s2")),
}


def schedule(request_id: str = "s1", **changed: Any) -> dict[str, Any]:
    """Return the body that sets a schedule, with fields changed; one whose new value is None is left out."""
    message = {"recipient": "bo", "kind": "remind", "body": '{"text":"tea"}'}
    body = {"schema_version": 1, "name": "tea", "request_id": request_id, "every_s": 60, **message, **changed}
    return {name: value for name, value in body.items() if value is not None}


def webhook(request_id: str = "w1", **changed: Any) -> dict[str, Any]:
    """Return the body that sets a webhook, with fields changed."""
    sealed = KEYRING.seal(b"whsec_c2VjcmV0", webhook_secret_purpose("ann"))
    return {**of_webhook(request_id), "url": "https://example.org/in", "sealed_secret": sealed, **changed}


def of_webhook(request_id: str = "w2", **changed: Any) -> dict[str, Any]:
    """Return the body of a request about a webhook, with fields changed."""
    return {"schema_version": 1, "name": "ann", "request_id": request_id, **changed}


def missed_run(run_at: int, **changed: Any) -> dict[str, Any]:
    """Return the body of a missed run of the schedule, with fields changed."""
    return {"schema_version": 1, "name": "tea", "revision": 1, "run_at": run_at, **changed}


def run(run_at: int, **changed: Any) -> dict[str, Any]:
    """Return the body of a run of the schedule, with fields changed."""
    message = {"sender": "ann", "recipient": "bo", "kind": "remind", "body": '{"text":"tea"}'}
    message |= {"content_type": "application/json", "priority": "normal"}
    return {**missed_run(run_at), **message, **changed}


DIGEST: Final = hashlib.sha256(b"stars").hexdigest()
BLOB_KEY: Final = f"blob/{DIGEST}".encode()


def of_blob(**fields: Any) -> dict[str, Any]:
    """The body of a record about the blob, with further fields."""
    return {"schema_version": 1, "digest": DIGEST, "object": f"{DIGEST}.1", **fields}


def storing(request_id: str = "u1", **changed: Any) -> dict[str, Any]:
    """The body of an upload of the blob, with fields changed."""
    body = {"request_id": request_id, "bytes": 5, "content_type": "image/png", "keep_s": 60}
    return of_blob(**{**body, **changed})


# Record type -> the key of its stream and a good body, of the pump's streams.
PUMP_GOOD: Final[dict[str, tuple[bytes, dict[str, Any]]]] = {
    "organism.loaded": (
        b"control/organism",
        {
            "schema_version": 1,
            "request_id": "load-1",
            "digest": "5e" * 32,
            "listeners": [{"name": "fast", "root_tag": "search"}],
        },
    ),
    "listener.added": (
        b"control/organism",
        {"schema_version": 1, "request_id": "add-1", "listener": {"name": "slow", "root_tag": "search"}},
    ),
    "listener.removed": (
        b"control/organism",
        {"schema_version": 1, "request_id": "remove-1", "name": "slow"},
    ),
    "thread.opened": (
        b"thread/t1",
        {
            "schema_version": 1,
            "thread": "t1",
            "parent_thread": "t0",
            "root_thread": "t0",
            "opened_by": "ann",
            "seen_by": "fast",
            "on_behalf_of": "ann",
            "kind": "search",
            "message_id": "m1",
        },
    ),
}

# Record type -> the key of its stream and a good body, in an order in which they can happen.
HUB_GOOD: Final[dict[str, tuple[bytes, dict[str, Any]]]] = {
    "task.created": (TASK_KEY, task_creation()),
    "task.started": (TASK_KEY, task_start()),
    "token.revoked": (TASK_KEY, token_revocation()),
    "task.completed": (TASK_KEY, asked("q4", result="7 stars")),
    "task.failed": (TASK_KEY, asked("q5", error="no telescope")),
    "task.cancelled": (TASK_KEY, asked("q6")),
    "agent.defined": (AGENT_KEY, definition()),
    "agent.removed": (AGENT_KEY, {"schema_version": 1, "agent_name": "coder"}),
    "agent.joined": (AGENT_KEY, joining()),
    "agent.key_registered": (AGENT_KEY, key_registration()),
    "agent.key_removed": (AGENT_KEY, of_participant("p3", key_id=key_id_of(public_key()))),
    "agent.updated": (AGENT_KEY, of_participant("p4", status="idle", capabilities=[])),
    "agent.called": (AGENT_KEY, call()),
    "agent.stopped": (AGENT_KEY, of_participant("p5")),
    "agent.mqtt_registered": (AGENT_KEY, mqtt_registration()),
    "agent.said": (AGENT_KEY, saying()),
    "agent.confirmed": (AGENT_KEY, confirming()),
    "agent.mqtt_removed": (AGENT_KEY, of_participant("m2")),
    "container.changed": (CONTAINER_KEY, container_change()),
    "schedule.set": (SCHEDULE_KEY, schedule()),
    "schedule.ran": (SCHEDULE_KEY, run(START_US + 60_000_000)),
    "schedule.missed": (SCHEDULE_KEY, missed_run(START_US + 60_000_000)),
    "schedule.refused": (SCHEDULE_KEY, {**missed_run(START_US + 60_000_000), "reason": "mailbox_full"}),
    "schedule.removed": (SCHEDULE_KEY, {"schema_version": 1, "name": "tea", "request_id": "s2"}),
    "blob.stored": (BLOB_KEY, storing()),
    "blob.removed": (BLOB_KEY, of_blob()),
    "webhook.set": (WEBHOOK_KEY, webhook()),
    "webhook.paused": (WEBHOOK_KEY, of_webhook(reason="broken")),
    "webhook.resumed": (WEBHOOK_KEY, of_webhook("w3")),
    "webhook.removed": (WEBHOOK_KEY, of_webhook("w4")),
    **PUMP_GOOD,
    **TOPIC_GOOD,
}
# The first record of each of these streams: it makes the stream known.
HUB_FIRST: Final = (
    "task.started",
    "agent.defined",
    "agent.joined",
    "agent.mqtt_registered",
    "container.changed",
    "topic.subscribed",
    "schedule.set",
    "blob.stored",
    "webhook.set",
)


def hub_told(entries: Entries, record_type: str, body: dict[str, Any], **changed: Any) -> Settled:
    """Settle one record of these streams. Without `ce_id` its id contains the request's id."""
    ce_id = changed.pop("ce_id", None) or f"{record_type} {body.get('request_id', '')}"
    key = changed.pop("key", None) or HUB_GOOD[record_type][0]
    return settle(
        document_record(body, record_type, key=key, ce_id=ce_id, **changed), entries, KEYRING, Entries()
    )
