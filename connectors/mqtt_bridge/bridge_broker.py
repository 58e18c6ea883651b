"""The bridge at one MQTT broker: stands by, becomes active, starts again after each loss, until it is stopped.

When Kafka does not take a record, nothing is acknowledged: the MQTT connection is cut, a fresh producer is
made, and the broker delivers again from the first unacknowledged message. This goes on for ever, with
back-off. Redelivered messages have the same `ce_id` and settle as duplicates.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Final

import structlog

from connectors.log.publisher import Publisher
from connectors.mqtt_bridge.bridge_connection import BridgeConnection, Tally
from connectors.mqtt_bridge.bridge_standby import StandbyWatch, showing_interval_s
from connectors.mqtt_bridge.verdict_stream import VerdictStream
from connectors.mqtt_link.mqtt_connection import broker_name
from schemas.errors import BackboneUnreachable
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings

COUNTER_LINE_S: Final = 30.0
STEADY_AFTER_S: Final = 10.0
_FINISH_S: Final = 10.0
_SUSPECT_LIMIT: Final = 10_000
_TICK_S: Final = 0.25
# Events that come within this time travel to Kafka in one request. Each request costs a wake-up in the bridge,
# in Kafka, in the gateway's live view and on the verdict's way back, several times what the event costs.
_LINGER_MS: Final = 10


def _nobody_waits() -> None:
    """Stands where nobody wants to know that the bridge is ready."""


class BrokerBridge:
    """Keeps one connection to `settings.mqtt` and one publisher alive until `stop` is set.

    `ready` is called whenever it has become the active bridge or stands by. `heard` as in BridgeConnection.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event,
        verdicts: VerdictStream | None = None,
        ready: Callable[[], None] = _nobody_waits,
        heard: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._mqtt = settings.mqtt
        self._stop = stop
        self._verdicts = verdicts
        self._ready = ready
        self._heard = heard
        self._name = uuid.uuid4().hex
        self._log = structlog.stdlib.get_logger(__name__).bind(broker=broker_name(settings.mqtt))
        self.tally = Tally()
        self._suspects: set[str] = set()
        self._publisher: Publisher | None = None
        self._connection: BridgeConnection | None = None
        self._cut_off = False
        self._failures = 0
        self._next_line = time.monotonic() + COUNTER_LINE_S

    @property
    def unacknowledged(self) -> int:
        """How many messages of the present connection wait for Kafka or for their receipt."""
        connection = self._connection
        return 0 if connection is None else connection.unacknowledged

    @property
    def is_active(self) -> bool:
        """Whether this is the active bridge at its broker, as far as it knows."""
        return self._connection is not None

    def run(self) -> None:
        """Bridge until stopped. Raises TrunklineError when the topic does not fit the settings, SettingsError
        for certificates that cannot be read.
        """
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    self._bridge_once()
                except BackboneUnreachable as error:
                    self._log.warning("unreachable", error=str(error))
                if time.monotonic() - began > STEADY_AFTER_S:
                    self._failures = 0
                if not self._stop.is_set():
                    self._back_off()
        finally:
            self._end_publisher()

    def _bridge_once(self) -> None:
        # Before standing by: a bridge that cannot reach Kafka must not take over from one that can.
        self._live_publisher()
        why = self._wait_turn()
        if why is None:
            return
        connection = BridgeConnection(
            self._settings,
            self._live_publisher(),
            self.tally,
            self._suspects,
            self._verdicts,
            self._name,
            self._heard,
        )
        try:
            connection.open()
            connection.show_presence()
            self._connection = connection
            self._log.info("subscribed", prefix=self._mqtt.topic_prefix, because=why)
            self._ready()
            self._watch(connection)
        finally:
            self._cut_off = connection.cut_off
            self._connection = None

    def _watch(self, connection: BridgeConnection) -> None:
        """Until the connection is lost or the bridge is stopped; then the connection is at its end."""
        interval_s = showing_interval_s(self._mqtt)
        shown_at = time.monotonic()
        while not self._stop.is_set() and not connection.lost.is_set():
            connection.lost.wait(min(_TICK_S, interval_s))
            self._count_line()
            if time.monotonic() - shown_at >= interval_s:
                shown_at = time.monotonic()
                connection.show_presence()
        if not connection.lost.is_set():
            # In order, so that a bridge that stands by finds nothing half done.
            connection.finish(_FINISH_S)
            return
        connection.drop()
        self._log.warning("connection_lost", why=connection.why)
        if len(self._suspects) > _SUSPECT_LIMIT:
            self._suspects.clear()

    def _wait_turn(self) -> str | None:
        watch = StandbyWatch(self._mqtt, self._name, cut_off=self._cut_off)
        watch.open()
        try:
            return watch.wait_turn(self._stop, self._standing_by)
        finally:
            watch.close()

    def _standing_by(self, active: str) -> None:
        self._log.info("standby", active=active)
        self._ready()

    def _live_publisher(self) -> Publisher:
        if self._publisher is not None and self._publisher.failed:
            self._end_publisher()
        if self._publisher is None:
            check_topic(self._settings)
            self._publisher = Publisher(self._settings, linger_ms=_LINGER_MS)
        return self._publisher

    def _end_publisher(self) -> None:
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.close(_FINISH_S)

    def _back_off(self) -> None:
        delay_s = min(self._mqtt.backoff_base_s * 2 ** min(self._failures, 16), self._mqtt.backoff_max_s)
        self._failures += 1
        deadline = time.monotonic() + delay_s
        while not self._stop.is_set() and (left_s := deadline - time.monotonic()) > 0:
            self._stop.wait(min(left_s, COUNTER_LINE_S))
            self._count_line()

    def _count_line(self) -> None:
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + COUNTER_LINE_S
            self._log.info("counters", **self.tally.snapshot())
