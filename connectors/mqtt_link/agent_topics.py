"""The MQTT topics of agents (JE-26): `<prefix>/<name>/inbox` and `<prefix>/<name>/outbox`."""

from __future__ import annotations

from typing import Final

from schemas.wire.ids import AGENT, is_name, stream_key

_INBOX: Final = "/inbox"
_OUTBOX: Final = "/outbox"


def inbox_topic(prefix: str, agent: str) -> str:
    """The topic that an agent reads. Raises ValueError for what is no name."""
    return _topic(prefix, agent, _INBOX)


def outbox_topic(prefix: str, agent: str) -> str:
    """The topic that an agent writes. Raises ValueError for what is no name."""
    return _topic(prefix, agent, _OUTBOX)


def outboxes_filter(prefix: str) -> str:
    """The subscription that sees all outboxes, also those under names that are none."""
    return f"{prefix}/+{_OUTBOX}"


def is_outbox(prefix: str, topic: str) -> bool:
    """Whether `outboxes_filter` covers this topic."""
    inside = topic.removeprefix(prefix + "/").removesuffix(_OUTBOX)
    return topic == f"{prefix}/{inside}{_OUTBOX}" and "/" not in inside


def agent_of(prefix: str, topic: str) -> str | None:
    """The agent in an outbox's topic, None when what stands there is no name."""
    name = topic.removeprefix(prefix + "/").removesuffix(_OUTBOX)
    return name if is_name(name) and topic == f"{prefix}/{name}{_OUTBOX}" else None


def _topic(prefix: str, agent: str, end: str) -> str:
    stream_key(AGENT, agent)
    return f"{prefix}/{agent}{end}"
