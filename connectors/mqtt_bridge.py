"""The MQTT bridge (`python -m connectors.mqtt_bridge`): job events from the MQTT broker into the log (JE-18).

**Delivers** each message at least once, the messages of a job in their order, bytes as they came; what is
under a bad id goes to `refused/mqtt`, of an over-long body only size, SHA-256 and the first 1 KiB.
**Acknowledges when** Kafka has acknowledged and the MQTT broker has the receipt (JE-17). A receipt says
verdict null: the event is durable, nobody has settled it yet.
**Loses when** the broker loses: Mosquitto forgets what it had not saved when it is killed, and drops what
does not fit its queue, in both cases after its own PUBACK. Hence the receipts.

When Kafka does not take a record, nothing is acknowledged: the MQTT connection is cut, a fresh producer is
made, and the broker delivers again from the first unacknowledged message. This goes on for ever, with
back-off. Redelivered messages have the same `ce_id` and settle as duplicates.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

import structlog

from connectors.bridge_connection import BridgeConnection, Tally
from connectors.json_log import configure_json_log
from connectors.publisher import Publisher
from schemas.errors import BackboneUnreachable, TrunklineError
from schemas.event_topic import check_topic
from schemas.settings import Settings, SettingsError, load_settings

log = structlog.stdlib.get_logger("connectors.mqtt_bridge")  # __name__ is __main__ when it runs

COUNTER_LINE_S: Final = 30.0
STEADY_AFTER_S: Final = 10.0
_FINISH_S: Final = 10.0
_SUSPECT_LIMIT: Final = 10_000
_TICK_S: Final = 0.25


class MqttBridge:
    """Keeps one connection and one publisher alive until `stop` is set."""

    def __init__(self, settings: Settings, stop: threading.Event, ready_file: Path | None = None) -> None:
        self._settings = settings
        self._stop = stop
        self._ready_file = ready_file
        self._tally = Tally()
        self._suspects: set[str] = set()
        self._publisher: Publisher | None = None
        self._failures = 0
        self._next_line = time.monotonic() + COUNTER_LINE_S

    def run(self) -> None:
        """Bridge until stopped. Raises TrunklineError when the topic does not fit the settings."""
        try:
            while not self._stop.is_set():
                try:
                    self._bridge_once()
                except BackboneUnreachable as error:
                    log.warning("unreachable", error=str(error))
                if not self._stop.is_set():
                    self._back_off()
        finally:
            self._end_publisher()
            log.info("stopped", **self._tally.snapshot())

    def _bridge_once(self) -> None:
        connection = BridgeConnection(self._settings, self._live_publisher(), self._tally, self._suspects)
        opened = time.monotonic()
        connection.open()
        log.info("subscribed", prefix=self._settings.mqtt.topic_prefix)
        if self._ready_file is not None:
            self._ready_file.touch()
        while not self._stop.is_set() and not connection.lost.is_set():
            connection.lost.wait(_TICK_S)
            self._count_line()
        if self._stop.is_set() and not connection.lost.is_set():
            connection.finish(_FINISH_S)
            return
        connection.drop()
        log.warning("connection_lost", why=connection.why)
        if time.monotonic() - opened > STEADY_AFTER_S:
            self._failures = 0
        if len(self._suspects) > _SUSPECT_LIMIT:
            self._suspects.clear()

    def _live_publisher(self) -> Publisher:
        if self._publisher is not None and self._publisher.failed:
            self._end_publisher()
        if self._publisher is None:
            check_topic(self._settings)
            self._publisher = Publisher(self._settings)
        return self._publisher

    def _end_publisher(self) -> None:
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.close(_FINISH_S)

    def _back_off(self) -> None:
        mqtt = self._settings.mqtt
        delay_s = min(mqtt.backoff_base_s * 2 ** min(self._failures, 16), mqtt.backoff_max_s)
        self._failures += 1
        deadline = time.monotonic() + delay_s
        while not self._stop.is_set() and (left_s := deadline - time.monotonic()) > 0:
            self._stop.wait(min(left_s, COUNTER_LINE_S))
            self._count_line()

    def _count_line(self) -> None:
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + COUNTER_LINE_S
            log.info("counters", **self._tally.snapshot())


def main() -> int:
    """Run the bridge until SIGTERM or SIGINT. Returns the exit code."""
    try:
        settings = load_settings()
    except SettingsError as error:
        print(f"mqtt_bridge: {error}", file=sys.stderr)
        return 2
    password = settings.mqtt.password
    configure_json_log("mqtt_bridge", [password.get_secret_value()] if password else [])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    ready = os.environ.get("TRUNKLINE_READY_FILE")
    try:
        MqttBridge(settings, stop, Path(ready) if ready else None).run()
    except (TrunklineError, SettingsError) as error:
        log.error("refused_to_start", error=str(error))
        return error.exit_code if isinstance(error, TrunklineError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
