"""The MQTT bridge (`python -m connectors.mqtt_bridge`): job events from MQTT brokers into the log (JE-18), and
at our own broker the mailboxes of agents, both ways (JE-26; `mqtt_inboxes` is the way out).

**Delivers** each message at least once, the messages of a job in their order, bytes as they came; what is
under a bad id goes to `refused/mqtt`, of an over-long body only size, SHA-256 and the first 1 KiB.
**Acknowledges when** Kafka has acknowledged and the MQTT broker has the receipt (JE-17). A receipt carries the
gateway's verdict when that comes within `mqtt.receipt_verdict_wait_s`, else null: durable, not settled yet.
**Loses when** the broker loses: Mosquitto forgets what it had not saved when it is killed, and drops what
does not fit its queue, in both cases after its own PUBACK. Hence the receipts.

One bridge is active at a broker; others stand by and take over within 10 s (JE-19). Beside the broker of the
settings there is a connection for each other one that a live job names (JE-13).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

import structlog

from connectors.mqtt_bridge.bridge_broker import BrokerBridge
from connectors.mqtt_bridge.bridge_overlays import OverlayBridges
from connectors.mqtt_bridge.mqtt_inboxes import AgentInboxes
from connectors.mqtt_bridge.verdict_stream import VerdictStream
from connectors.mqtt_link.mqtt_credentials import BRIDGE, role_mqtt
from connectors.terminal.json_log import configure_json_log
from schemas.errors import TrunklineError
from schemas.settings.settings import Settings, SettingsError, load_settings

log = structlog.stdlib.get_logger("connectors.mqtt_bridge")  # __name__ is __main__ when it runs

_OVERLAYS_END_S: Final = 20.0


class MqttBridge:
    """The bridge at the broker of the settings with the agents' inboxes, those at the jobs' own brokers, and
    the verdicts for all.
    """

    def __init__(self, settings: Settings, stop: threading.Event, ready_file: Path | None = None) -> None:
        self._stop = stop
        self._ready_file = ready_file
        self._verdicts = VerdictStream(settings)
        own = settings.model_copy(update={"mqtt": role_mqtt(settings, BRIDGE)})
        self._inboxes = AgentInboxes(own, stop, lambda: self._bridge.is_active)
        self._bridge = BrokerBridge(own, stop, self._verdicts, self._ready, self._inboxes.heard)
        overlays = OverlayBridges(settings, stop, self._verdicts)
        self._overlays = threading.Thread(target=overlays.run, name="overlays", daemon=True)

    def run(self) -> None:
        """Bridge until stopped. Raises TrunklineError when the topic does not fit the settings."""
        self._verdicts.start()
        self._overlays.start()
        self._inboxes.start()
        try:
            self._bridge.run()
        finally:
            self._stop.set()
            self._inboxes.join()
            self._overlays.join(_OVERLAYS_END_S)
            self._verdicts.close()
            log.info("stopped", **self._bridge.tally.snapshot())

    def _ready(self) -> None:
        if self._ready_file is not None:
            self._ready_file.touch()


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
