"""Random records of the smaller kinds of streams, for the random log. A function makes one record of a kind."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from connectors.doors.mqtt_bridge.bridge_records import incoming
from schemas.keys.sealing import Keyring, mqtt_agent_secret_purpose, webhook_secret_purpose
from schemas.settings.settings import MqttSettings
from schemas.streams.agents.mqtt_agents import (
    AgentMqttRegistered,
    AgentMqttRemoved,
)
from schemas.streams.blob import blobs
from schemas.streams.control import organism
from schemas.streams.schedule import schedule_registry as schedules
from schemas.streams.thread.threads import ThreadOpened
from schemas.streams.topic.topic_registry import (
    Publication,
    Subscription,
    TopicDelivery,
    Unsubscription,
)
from schemas.streams.webhook import webhooks
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.agent_message import sign_said
from trunkline_agent.wire.strict_json import canonical

DIGESTS = tuple(hashlib.sha256(bytes([number])).hexdigest() for number in range(5))
# No blob ends while the log is written, or gateways that follow the log would append records of their own.
_BLOBS_KEEP_S = (86_400, 31_536_000)


def blob_record(draw: random.Random) -> OutgoingRecord:
    """Return one record about one of few blobs."""
    digest = draw.choice(DIGESTS)
    at = {"digest": digest, "object": f"{digest}.{draw.randrange(3)}"}
    if draw.random() < 0.2:
        ce_id = f"removed-{draw.randrange(50)}"
        removed = blobs.BlobRemoved.model_validate(at)
        return removed.record(ce_id=ce_id, door="reactor", principal="reactor")
    upload = {
        "request_id": f"upload-{draw.randrange(300)}",
        "bytes": draw.choice([1, 1, 1, 2]),
        "content_type": draw.choice([None, "image/png", "text/html"]),
        "keep_s": draw.choice(_BLOBS_KEEP_S),
    }
    body = blobs.BlobStored.model_validate({**at, **upload})
    return body.record(door="http", principal=draw.choice(["ann", "bob"]))


def mqtt_agent_record(draw: random.Random, keyring: Keyring, recipients: Sequence[str]) -> OutgoingRecord:
    """One record about one of few agents."""
    roll, name = draw.random(), f"agent-{draw.randrange(4)}"
    request_id, by = f"request-{draw.randrange(300)}", {"door": "http", "principal": "operator"}
    secret = f"secret of {name}"
    if roll < 0.2:
        return AgentMqttRegistered(
            sealed_secret=keyring.seal(secret.encode(), mqtt_agent_secret_purpose(name)),
            agent_name=name,
            request_id=request_id,
        ).record(**by)
    if roll < 0.25:
        return AgentMqttRemoved(agent_name=name, request_id=request_id).record(**by)
    said: dict[str, Any] = {
        "message_id": f"word-{draw.randrange(400)}",
        "to": draw.choice([*recipients, "nobody", "not/a/name"]),
        "kind": "ask",
        "body": draw.choice(["plain text", {"n": 0.1}, None]),
        "seq": draw.randrange(1, 600),
    }
    if draw.random() < 0.1:
        said["data"] = {"auth_token": "canary-token"}
    if draw.random() < 0.5:
        said["schema_version"] = draw.choice([1, 1, 1, 2])
    value = canonical(sign_said(said, "another" if draw.random() < 0.1 else secret))
    return incoming(MqttSettings(agents_prefix="p"), f"p/{name}/outbox", value, None).record


def organism_change(draw: random.Random) -> OutgoingRecord:
    """A listener comes or goes, or all of them are loaded."""
    roll, request = draw.random(), f"command-{draw.randrange(300)}"
    names = draw.sample(["fast", "slow", "boss", "boot"], 2)
    listeners = [organism.Listener(name=name, root_tag=name, concurrency=draw.choice([1, 8])) for name in names]
    body: Any
    if roll < 0.3:
        body = organism.OrganismLoaded(request_id=request, digest="5e" * 32, listeners=listeners)
    elif roll < 0.7:
        body = organism.ListenerAdded(request_id=request, listener=listeners[0])
    else:
        body = organism.ListenerRemoved(request_id=request, name=names[0])
    return body.record(door="xml", principal="operator")


def opened_thread(draw: random.Random) -> OutgoingRecord:
    """A conversation is opened, or once more."""
    thread, parent = f"thread-{draw.randrange(60)}", draw.choice(["thread-0", "thread-1"])
    body = ThreadOpened(
        thread=thread,
        parent_thread=parent,
        root_thread="thread-0",
        opened_by=draw.choice(["ann", "bob"]),
        seen_by="fast",
        on_behalf_of="ann",
        kind="search",
        message_id=f"message-{draw.randrange(400)}",
    )
    return thread_record(body, f"opened-{thread}")


def thread_record(body: ThreadOpened, ce_id: str) -> OutgoingRecord:
    """The record that opened a thread before fold version 10."""
    return body.record(ce_id=ce_id, door="reactor", principal="reactor")


# No run is due while the log is written, or gateways that follow the log would append records of their own.
_TIMINGS = ({"every_s": 86_400}, {"every_s": 31_536_000}, {"cron": "0 0 29 2 *"}, {"cron": "0 0 */16 1 1#3"})
_NEW_YEAR_2028_US = 1_830_297_600_000_000


def schedule_record(draw: random.Random) -> OutgoingRecord:
    """Return one record about one of few schedules."""
    roll, name = draw.random(), f"schedule-{draw.randrange(6)}"
    by = {"door": "http", "principal": draw.choice(["ann", "ann", "bob"])}
    request = {
        "name": name,
        "request_id": f"request-{draw.randrange(300)}",
        "takes_over": draw.choice([None, None, None, True]),
    }
    message = {"recipient": "worker-1", "kind": "ask", "body": draw.choice(['{"n": 1}', "plain text", "☃"])}
    if roll < 0.6:
        more = {
            "missed": draw.choice(["skip", "latest", "all"]),
            "priority": draw.choice(["low", "normal", "high"]),
            "expires_in_ms": draw.choice([None, 60_000]),
            "from_task": draw.choice([None, None, "task-1"]),
        }
        timing = draw.choice(_TIMINGS)
        body = schedules.ScheduleSet.model_validate({**request, **timing, **message, **more})
        return body.record(**by)
    if roll < 0.8:
        return schedules.ScheduleRemoved.model_validate(request).record(**by)
    run = {"name": name, "revision": draw.choice([1, 2, 3]), "run_at": _NEW_YEAR_2028_US}
    made = schedules.ScheduleMissed.model_validate(run)
    if roll < 0.9:
        fields = {"sender": "ann", "content_type": "application/json", "priority": "normal", **message}
        made = schedules.ScheduleRan.model_validate({**run, **fields})
    elif roll < 0.92:
        run["run_at"] = 0
        made = schedules.ScheduleRefused.model_validate({**run, "reason": "mailbox_full"})
    return made.record(door="reactor", principal="reactor")


def topic_record(draw: random.Random, subscribers: Sequence[str]) -> OutgoingRecord:
    """One record about one of few topics."""
    roll, topic = draw.random(), f"topic-{draw.randrange(3)}"
    by: Any = {"door": draw.choice(["http", "mcp"]), "principal": draw.choice(subscribers[:2])}
    request, message_id = f"request-{draw.randrange(30)}", f"published-{draw.randrange(15)}"
    if roll < 0.35:
        body = Subscription(topic=topic, subscriber=draw.choice(subscribers), request_id=request)
        return body.record(**by)
    if roll < 0.5:
        since = draw.choice([None, None, 1])
        end = Unsubscription(topic=topic, subscriber=draw.choice(subscribers), request_id=request, since=since)
        return end.record(**by)
    if roll < 0.75:
        content = draw.choice([{}, {}, {"priority": "high"}, {"expires_in_ms": 500}, {"thread": "thread-1"}])
        named = {"topic": topic, "message_id": message_id, "from": by["principal"], "kind": "note"}
        return Publication.model_validate({**named, "body": "☃", **content}).record(**by)
    return TopicDelivery(topic=topic, message_id=message_id).record(
        ce_id=f"d-{message_id}", door="reactor", principal="reactor"
    )


def webhook_record(draw: random.Random, keyring: Keyring) -> OutgoingRecord:
    """Return one record about one of few webhooks. Their addresses exist nowhere."""
    roll, name, request_id = draw.random(), f"hook-{draw.randrange(6)}", f"request-{draw.randrange(300)}"
    by = {"door": "http", "principal": draw.choice(["ann", "operator"])}
    if roll < 0.5:
        url = draw.choice(["https://hooks.invalid/a", "https://hooks.invalid:8443/b?c=1"])
        topic, overlap_ms = draw.choice([None, None, "news"]), draw.choice([0, 0, 60_000])
        return webhooks.WebhookSet(
            sealed_secret=keyring.seal(f"whsec_{draw.getrandbits(40)}".encode(), webhook_secret_purpose(name)),
            name=name,
            url=url,
            topic=topic,
            overlap_ms=overlap_ms,
            request_id=request_id,
        ).record(**by)
    if roll < 0.7:
        revision = draw.choice([None, 1, 2])
        paused = webhooks.WebhookPaused(name=name, request_id=request_id, revision=revision, reason="broken")
        return paused.record(**by)
    model = webhooks.WebhookResumed if roll < 0.85 else webhooks.WebhookRemoved
    return model(name=name, request_id=request_id).record(**by)
