"""The choice of the one active bridge at an MQTT broker (JE-19), by presence messages and a wait.

The broker does the fencing: only one connection can have the fixed client id, and taking it over ends the
other. Presence only tells when to try. The active bridge publishes its presence on a retained topic at a fixed
interval, and its Last Will reports its end. A bridge on standby takes over when the active one has ended or is
silent. docs/explanation/decisions/0010-one-active-bridge.md describes the races.

A broker hands a session over to any client that connects under its client id, whatever the client's account
is. So the fixed id ends with digits that only programs with the key of the bridge know. It changes with the
master key, and had no digits in earlier versions.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog
from paho.mqtt.client import MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from connectors.plumbing.mqtt_link.payloads import (
    Presence,
    presence_topic,
    read_presence,
    showing_interval_s,
    silence_s,
)
from schemas.keys.record_macs import MQTT_BRIDGE, load_mac_key
from schemas.keys.sealing import load_keyring
from schemas.settings.settings import MqttSettings, Settings
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription
from trunkline_agent.wire.mqtt_password import mqtt_client_id

log = structlog.stdlib.get_logger(__name__)

# How long to wait for a retained presence before concluding that there is none.
_HEAR_S: Final = 0.3
# How long at least to wait for the presence of a bridge that may have just taken our connection over: in
# intervals, and in seconds.
_SUCCESSOR_SHOWINGS: Final = 1.5
_SUCCESSOR_S: Final = 2.0
_JITTER_S: Final = 0.4
_TICK_S: Final = 0.05


class StandbyWatch:
    """A bridge on standby: its MQTT connection, which follows the presence messages of the active bridge.

    Call `open`, then `wait_turn`, then `close`. The constructor raises SettingsError for certificates that
    cannot be read.

    Args:
        mqtt: the settings of the broker.
        bridge: the name of this bridge in presence messages.
        cut_off: whether this bridge was active and its connection was ended by the broker. Another bridge may
            then have taken over. The watch gives that bridge time to publish its presence.
    """

    def __init__(self, mqtt: MqttSettings, bridge: str, *, cut_off: bool = False) -> None:
        self._mqtt = mqtt
        self._bridge = bridge
        self._listen_s = max(_SUCCESSOR_S, _SUCCESSOR_SHOWINGS * showing_interval_s(mqtt)) if cut_off else 0.0
        self._silence_s = silence_s(mqtt)
        self._lock = threading.Lock()
        self._seen: Presence | None = None
        self._heard_at = 0.0
        self._opened_at = 0.0
        presence = Subscription(presence_topic(mqtt), qos=0, on_refused=self._presence_forbidden)
        self._connection = MqttConnection(
            mqtt, [presence], keepalive_s=mqtt.bridge_keepalive_s, on_message=self._take
        )

    def open(self) -> None:
        """Connect to the broker and subscribe to the presence topic.

        Raises BackboneUnreachable when the connection fails, is refused or takes longer than
        `mqtt.connect_timeout_s`.
        """
        self._connection.open()
        self._opened_at = self._heard_at = time.monotonic()

    def wait_turn(self, stop: threading.Event, standing_by: Callable[[str], None]) -> str | None:
        """Wait, without a time limit, until no other bridge is active at the broker.

        Args:
            stop: ends the wait when it is set.
            standing_by: called once with the name of the active bridge; not called when there is none.

        Returns:
            The reason, for the log, why this bridge may take over. None: `stop` was set before that.

        Raises:
            BackboneUnreachable: the connection to the broker is lost.
        """
        is_reported = False
        looked_at = time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            if now - looked_at > self._silence_s / 2:
                # This process was suspended, so the silence says nothing about the other bridge.
                self._heard_at = now
            looked_at = now
            if self._connection.lost.is_set():
                raise self._connection.unreachable(self._connection.why)
            why = self._vacant(now)
            if why is None:
                if not is_reported and self._seen is not None and self._seen.active:
                    is_reported = True
                    standing_by(self._seen.bridge)
                stop.wait(_TICK_S)
            elif self._still_vacant(stop):
                return why
        return None

    def close(self) -> None:
        """Cut the connection to the broker. The watch cannot be used again."""
        self._connection.drop()

    def _still_vacant(self, stop: threading.Event) -> bool:
        # Several bridges may see the same: the first one publishes its presence before the others try.
        stop.wait(random.uniform(0.05, _JITTER_S))  # noqa: S311  no secret
        is_lost = stop.is_set() or self._connection.lost.is_set()
        return not is_lost and self._vacant(time.monotonic()) is not None

    def _vacant(self, now: float) -> str | None:
        with self._lock:
            seen, heard_at = self._seen, self._heard_at
        if now - self._opened_at < self._listen_s:
            return None
        if seen is None:
            return "no bridge is there" if now - self._opened_at >= _HEAR_S else None
        if seen.bridge == self._bridge:
            return "it was this one"
        if not seen.active:
            return "the active one is gone"
        return "the active one is silent" if now - heard_at > self._silence_s else None

    def _presence_forbidden(self, reason: ReasonCode) -> None:
        # A single bridge works without it. Two bridges would take turns in ending each other's connection.
        log.warning("presence_forbidden", topic=presence_topic(self._mqtt), reason=str(reason))

    def _take(self, message: MQTTMessage) -> None:
        # An empty payload: the retained message was removed. The active bridge will publish it again.
        found = read_presence(bytes(message.payload))
        if found is None:
            return
        with self._lock:
            seen = self._seen
            if not found.active and seen is not None and seen.active and found.bridge != seen.bridge:
                # The late Last Will of a replaced bridge says nothing about its successor.
                return
            self._seen = found
            self._heard_at = time.monotonic()


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
