"""Random records of MQTT agents: registrations, removals and outbox messages, good and bad."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from connectors.doors.mqtt_bridge.bridge_records import incoming
from schemas.keys.sealing import Keyring, mqtt_agent_secret_purpose
from schemas.settings.settings import MqttSettings
from schemas.streams.agents.mqtt_agents import (
    AgentMqttRegistered,
    AgentMqttRemoved,
)
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.agent_message import sign_said
from trunkline_agent.wire.strict_json import canonical


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
