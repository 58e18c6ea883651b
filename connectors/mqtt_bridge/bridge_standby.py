"""Which of several bridges is the active one at an MQTT broker (JE-19): presence, and the wait for one's turn.

What fences is the broker: only one connection can have the fixed client id, and taking it over ends the other.
Presence only says when to try. The active bridge shows itself on a retained topic again and again, and its Last
Will says that it is gone; a bridge that stands by takes over when it is gone or silent.
docs/explanation/decisions/0010-one-active-bridge.md has the races.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog
from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from connectors.mqtt_link.mqtt_connection import (
    broker_name,
    connect_properties,
    cut_connection,
    dial,
    new_client,
)
from schemas.errors import BackboneUnreachable
from schemas.settings.settings import MqttSettings

log = structlog.stdlib.get_logger(__name__)

# How long to wait for a retained presence before believing that there is none; and how long at least, in
# intervals and in seconds, for that of a bridge that may have just taken our connection over.
_HEAR_S: Final = 0.3
_SUCCESSOR_SHOWINGS: Final = 1.5
_SUCCESSOR_S: Final = 2.0
_JITTER_S: Final = 0.4
_TICK_S: Final = 0.05
_SILENCE_KEEPALIVES: Final = 1.5
_SHOWINGS_PER_KEEPALIVE: Final = 4


class Presence(msgspec.Struct, frozen=True):
    """What stands on the presence topic: which bridge spoke last, and whether it is the active one."""

    bridge: str
    active: bool


_decoder = msgspec.json.Decoder(Presence)
encode_presence = msgspec.json.Encoder().encode


def read_presence(payload: bytes) -> Presence | None:
    """The presence in an MQTT payload, None for anything else. Never raises."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def presence_topic(mqtt: MqttSettings) -> str:
    """Where the bridges with this client id show themselves. Not below a job's id, so no event."""
    return f"{mqtt.topic_prefix}/bridge/{mqtt.bridge_client_id}"


def showing_interval_s(mqtt: MqttSettings) -> float:
    """How often the active bridge shows itself."""
    return mqtt.bridge_keepalive_s / _SHOWINGS_PER_KEEPALIVE


def silence_s(mqtt: MqttSettings) -> float:
    """After how many seconds without a sign the active bridge counts as silent."""
    return _SILENCE_KEEPALIVES * mqtt.bridge_keepalive_s


class StandbyWatch:
    """One connection under a client id of the broker's choice that follows the presence topic.

    `bridge` is our own name there. `cut_off`: we were active and the connection was ended, perhaps by another
    bridge; then nothing that we or nobody said is believed before a successor had the time to show itself.
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
        self._subscribed = threading.Event()
        self._lost: str | None = None
        self._client = new_client(mqtt)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.on_disconnect = self._on_disconnect

    def open(self) -> None:
        """Connect and subscribe. Raises BackboneUnreachable when that takes longer than `connect_timeout_s`."""
        dial(self._client, self._mqtt, connect_properties(), keepalive_s=self._mqtt.bridge_keepalive_s)
        deadline = time.monotonic() + self._mqtt.connect_timeout_s
        while not self._subscribed.wait(_TICK_S) and self._lost is None and time.monotonic() < deadline:
            pass
        if not self._subscribed.is_set():
            self.close()
            raise self._unreachable(self._lost or "no answer in time")
        self._opened_at = self._heard_at = time.monotonic()

    def wait_turn(self, stop: threading.Event, standing_by: Callable[[str], None]) -> str | None:
        """Wait until no other bridge is active; say why it is our turn, None when `stop` was set before.

        `standing_by(bridge)` is called once, when there is another. Raises BackboneUnreachable when the
        connection is lost.
        """
        told = False
        looked_at = time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            if now - looked_at > self._silence_s / 2:
                # We were stopped ourselves: what we did not hear says nothing about the other.
                self._heard_at = now
            looked_at = now
            if self._lost is not None:
                raise self._unreachable(self._lost)
            why = self._vacant(now)
            if why is None:
                if not told and self._seen is not None and self._seen.active:
                    told = True
                    standing_by(self._seen.bridge)
                stop.wait(_TICK_S)
            elif self._still_vacant(stop):
                return why
        return None

    def close(self) -> None:
        """End the connection."""
        cut_connection(self._client)

    def _still_vacant(self, stop: threading.Event) -> bool:
        # Of several that saw the same, the first shows itself before the others try.
        stop.wait(random.uniform(0.05, _JITTER_S))  # noqa: S311  no secret
        return not stop.is_set() and self._lost is None and self._vacant(time.monotonic()) is not None

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

    def _unreachable(self, why: str) -> BackboneUnreachable:
        return BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        if reason.is_failure:
            self._lost = f"the broker refuses the bridge: {reason}"
            return
        client.subscribe(presence_topic(self._mqtt))

    def _on_subscribe(
        self, client: Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        if reasons[0].is_failure:
            # A single bridge works all the same; two would take turns in throwing each other off.
            log.warning("presence_forbidden", topic=presence_topic(self._mqtt), reason=str(reasons[0]))
        self._subscribed.set()

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        # Without a payload somebody has removed the retained message: the active one shows itself again.
        found = read_presence(bytes(message.payload))
        if found is None:
            return
        with self._lock:
            seen = self._seen
            if not found.active and seen is not None and seen.active and found.bridge != seen.bridge:
                # The late Last Will of a bridge that was replaced says nothing about the one that replaced it.
                return
            self._seen = found
            self._heard_at = time.monotonic()

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        self._lost = f"connection lost: {reason}"
