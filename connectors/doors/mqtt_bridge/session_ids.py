"""The client ids of the bridge's session at a broker, which other accounts cannot guess, and its earlier ids.

A broker hands a session over to any client that connects under its client id, whatever the client's account
is. So the id ends with digits that only programs with the key of the bridge know. All bridges that stand by for
each other have this key, so the broker still lets only one of them have the session.

The id changes with the master key, and had no digits in earlier versions. `has_session` tells whether the
broker still has messages under such an earlier id.
"""

from __future__ import annotations

from schemas.keys.record_macs import MQTT_BRIDGE, load_mac_key
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import MqttSettings, Settings
from trunkline_agent.mqtt.mqtt_connection import MqttConnection
from trunkline_agent.wire.mqtt_password import mqtt_client_id


def session_ids(settings: Settings, broker: str = "") -> list[str]:
    """Return the client id of the bridge's session, followed by its earlier ids.

    A bridge that has its key from the file `mac_key_file` knows only the earliest of the earlier ids.

    Args:
        settings: the settings with the keys; `mqtt.bridge_client_id` is the first part of each id.
        broker: the address of a job's own broker. Empty for the common broker, which may have several.

    Raises:
        SettingsError: the keys cannot be read.
    """
    name = settings.mqtt.bridge_client_id
    if settings.mac_key_file is None:
        keys = [keyring.mac_key(MQTT_BRIDGE).key for keyring in load_keyring(settings).each()]
    else:
        keys = [load_mac_key(settings, MQTT_BRIDGE).key]
    return [*(mqtt_client_id(key, name, broker) for key in keys), name]


def has_session(mqtt: MqttSettings, client_id: str) -> bool:
    """Return whether the broker has a session under this client id. The session stays. Blocks.

    Another connection with the same client id is ended. Raises BackboneUnreachable.
    """
    connection = MqttConnection(
        mqtt, client_id=client_id, session_expiry_s=mqtt.session_expiry_s, manual_ack=True
    )
    try:
        connection.open()
        found = connection.session_present
        connection.close(forget_session=not found)
    finally:
        connection.drop()
    return found
