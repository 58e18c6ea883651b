"""The MQTT topics of jobs (JE-01, JE-17) and of agents (JE-26).

A job has `<prefix>/<job_id>/events` and `<prefix>/<job_id>/receipts`, an agent has `<prefix>/<name>/inbox` and
`<prefix>/<name>/outbox`. The functions that make a topic raise ValueError for an invalid job id or name.
"""

from __future__ import annotations

from typing import Final

from trunkline_agent.wire.ids import AGENT, JOB, is_job_id, stream_key

_EVENTS: Final = "events"
_RECEIPTS: Final = "receipts"
_INBOX: Final = "inbox"
_OUTBOX: Final = "outbox"


def events_topic(prefix: str, job_id: str) -> str:
    """Return the topic that a job's events are published on.

    `prefix` is the setting `mqtt.topic_prefix`. Raises ValueError for an invalid job id.
    """
    return _topic(prefix, JOB, job_id, _EVENTS)


def receipts_topic(prefix: str, job_id: str) -> str:
    """Return the topic that the receipts of a job's events are published on.

    `prefix` is the setting `mqtt.topic_prefix`. Raises ValueError for an invalid job id.
    """
    return _topic(prefix, JOB, job_id, _RECEIPTS)


def inbox_topic(prefix: str, agent: str) -> str:
    """Return the topic that an agent subscribes to, for the messages and receipts to it.

    `prefix` is the setting `mqtt.agents_prefix`. Raises ValueError for a text that cannot be an agent's name.
    """
    return _topic(prefix, AGENT, agent, _INBOX)


def outbox_topic(prefix: str, agent: str) -> str:
    """Return the topic that an agent publishes its messages on.

    `prefix` is the setting `mqtt.agents_prefix`. Raises ValueError for a text that cannot be an agent's name.
    """
    return _topic(prefix, AGENT, agent, _OUTBOX)


def events_filter(prefix: str) -> str:
    """Return the topic filter that subscribes to the events of all jobs.

    It also matches topics with an invalid job id. `prefix` is the setting `mqtt.topic_prefix`.
    """
    return f"{prefix}/+/{_EVENTS}"


def outboxes_filter(prefix: str) -> str:
    """Return the topic filter that subscribes to the outboxes of all agents.

    It also matches topics with an invalid agent name. `prefix` is the setting `mqtt.agents_prefix`.
    """
    return f"{prefix}/+/{_OUTBOX}"


def job_id_of(prefix: str, topic: str) -> str | None:
    """Return the job id in `topic`, None when it is not an events topic with a valid job id.

    `prefix` is the setting `mqtt.topic_prefix`.
    """
    found = _middle(prefix, topic, _EVENTS)
    return found if found is not None and is_job_id(found) else None


def outbox_name(prefix: str, topic: str) -> str | None:
    """Return the agent's name in an outbox topic, None for any other topic.

    The name is not checked: it may be one that no agent can have. `prefix` is the setting `mqtt.agents_prefix`.
    """
    return _middle(prefix, topic, _OUTBOX)


def _topic(prefix: str, kind: str, name: str, end: str) -> str:
    stream_key(kind, name)  # raises for an invalid name
    return f"{prefix}/{name}/{end}"


def _middle(prefix: str, topic: str, end: str) -> str | None:
    """Return the level between the prefix and the last one, None when the topic has another form."""
    found = topic.removeprefix(f"{prefix}/").removesuffix(f"/{end}")
    return found if topic == f"{prefix}/{found}/{end}" and "/" not in found else None
