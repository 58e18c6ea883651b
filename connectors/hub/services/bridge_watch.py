"""Follows the presence messages that the MQTT bridge publishes, for the gateway's `/metrics`.

It has one connection to the MQTT broker of the settings, as operator. When the broker is unreachable or refuses
the login, `trunkline_mqtt_up` is 0 and the state of the bridge has no sample. The connection is retried with
growing pauses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from connectors.hub.serving.metrics import counters, gauge, gauges
from connectors.plumbing.machine.background_service import ThreadedService
from connectors.plumbing.mqtt_link.broker_settings import OPERATOR, role_mqtt
from connectors.plumbing.mqtt_link.payloads import (
    DROPPED,
    FIGURES,
    HEAP_BYTES,
    STORED_BYTES,
    Presence,
    presence_topic,
    read_figure,
    read_presence,
    silence_s,
)
from schemas.settings.settings import Settings, SettingsError
from trunkline_agent.errors import BackboneUnreachable, UsageError
from trunkline_agent.mqtt.mqtt_client import connect_properties, cut_connection, dial, new_client, topic_of

_PAUSE_S: Final = 1.0
_PAUSE_MOST_S: Final = 60.0
_STOP_S: Final = 5.0


class BridgeWatch(ThreadedService, Collector):
    """A background service and metrics collector that shows whether the MQTT broker and bridge work.

    `open` starts a thread, and `close` ends it. The other methods may be called on any thread.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__("bridge-watch", _STOP_S)
        self._settings = settings
        self._lost = threading.Event()
        self._is_connected = False
        self._seen: tuple[Presence, float] | None = None
        self._figures: dict[str, int] = {}

    def close(self) -> None:
        """Close the MQTT connection, and wait at most 5 s for the thread to end."""
        self._closing.set()
        self._lost.set()
        super().close()

    def collect(self) -> Iterable[Metric]:
        """Yield the metric `trunkline_mqtt_up` and, while there is a connection, `trunkline_bridge_state`.

        It also yields the broker's own figures.

        `trunkline_mqtt_up` is 1 while this gateway is connected to the MQTT broker, else 0.
        `trunkline_bridge_state` is 1 while a bridge reports itself as active, else 0. Prometheus calls this
        method at each scrape.
        """
        text = "Whether this gateway is connected to the MQTT broker."
        yield gauge("mqtt_up", text, self._is_connected)
        yield from self._broker_metrics()
        if not self._is_connected:
            return
        mqtt, seen = self._settings.mqtt, self._seen
        is_active = seen is not None and seen[0].active and time.monotonic() - seen[1] <= silence_s(mqtt)
        text = "1 while a bridge with this name is active and shows itself, else 0."
        yield gauges("bridge_state", text, ["bridge"], [([mqtt.bridge_client_id], is_active)])

    def _broker_metrics(self) -> Iterable[Metric]:
        """Yield the broker's figures about itself. A figure that it does not publish has no sample."""
        figures = self._figures
        text = "Messages that the MQTT broker has dropped since its start."
        dropped: list[tuple[list[str], int]] = [([], figures[DROPPED])] if DROPPED in figures else []
        yield counters("mqtt_dropped_messages", text, [], dropped)
        for name, topic, text in (
            ("mqtt_stored_bytes", STORED_BYTES, "Bytes of the messages that the MQTT broker keeps."),
            ("mqtt_heap_bytes", HEAP_BYTES, "Memory that the MQTT broker uses."),
        ):
            yield gauges(name, text, [], [([], figures[topic])] if topic in figures else [])

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while not self._closing.is_set():
            if self._follow():
                pause_s = _PAUSE_S
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)

    def _follow(self) -> bool:
        """Follow the bridge over one connection until it is lost. Returns whether the broker accepted it."""
        self._lost.clear()
        accepted = False
        try:
            mqtt = role_mqtt(self._settings, OPERATOR)
            client = new_client(mqtt)
            client.on_connect = self._on_connect
            client.on_message = self._on_message
            client.on_disconnect = self._on_disconnect
            dial(client, mqtt, connect_properties())
        except (BackboneUnreachable, SettingsError, UsageError):
            return False
        try:
            while not self._closing.is_set() and not self._lost.wait(mqtt.connect_timeout_s):
                if not self._is_connected:
                    break
                accepted = True
            return accepted or self._is_connected
        finally:
            self._is_connected, self._seen, self._figures = False, None, {}
            cut_connection(client)

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        if reason.is_failure:
            self._lost.set()
            return
        client.subscribe([(topic, 0) for topic in (presence_topic(self._settings.mqtt), *FIGURES)])
        self._is_connected = True

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        topic = topic_of(message)
        if topic in FIGURES:
            figure = read_figure(bytes(message.payload))
            if figure is not None:
                self._figures[str(topic)] = figure
            return
        found = read_presence(bytes(message.payload))
        seen = None if self._seen is None else self._seen[0]
        # The delayed Last Will of a replaced bridge does not describe its replacement.
        if found is not None and (found.active or seen is None or found.bridge == seen.bridge):
            self._seen = (found, time.monotonic())

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        self._is_connected = False
        self._lost.set()
