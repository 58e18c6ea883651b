"""MQTT for agents and jobs, with the extra `mqtt`: the connection, TLS, login, mailbox and delivery of events.

Imports paho-mqtt and no other library. The product's bridge and its accounts use the same connection.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trunkline_agent.extras import require_extra

if TYPE_CHECKING:
    from trunkline_agent.broker import Broker
    from trunkline_agent.mqtt.inbox_receiver import InboxMessage
    from trunkline_agent.mqtt.mqtt_agent import MqttAgent

require_extra("mqtt")

__all__ = ["Broker", "InboxMessage", "MqttAgent"]

_MODULES = {
    "Broker": "trunkline_agent.broker",
    "InboxMessage": "trunkline_agent.mqtt.inbox_receiver",
    "MqttAgent": "trunkline_agent.mqtt.mqtt_agent",
}

require_extra("mqtt")


def __getattr__(name: str) -> object:
    # Loaded on first use: the product needs the connection, and not the mailbox.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
