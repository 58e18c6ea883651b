"""The credentials of an agent with a mailbox over MQTT, at the broker of the tests' settings."""

from __future__ import annotations

from schemas.settings.settings import Settings
from trunkline_agent.credentials import Credentials, MqttAccess


def mailbox_credentials(settings: Settings, name: str, secret: str) -> Credentials:
    """Return the credentials of the agent `name`, to which the gateway gave the secret."""
    mqtt = settings.mqtt
    return Credentials(name, mqtt=MqttAccess(mqtt.host, mqtt.port, mqtt.tls, mqtt.agents_prefix, secret))
