"""The MQTT bridge (`python -m connectors.doors.mqtt_bridge`).

It brings job events from MQTT brokers into the log (JE-18). At our own broker it also carries the mailboxes of
agents, in both directions (JE-26, DL-30; `inboxes` delivers to the agents), and reports to the gateway what
each account publishes there (LM-10).

**Delivers** each message at least once, the messages of a job in their order, with their payload unchanged. A
message with an invalid id goes to `refused/mqtt`. Of an over-long body the log gets size, SHA-256 and the first
1 KiB.
**Acknowledges when** Kafka has acknowledged the record and the MQTT broker has the receipt (JE-17). A receipt
carries the gateway's verdict when that comes within `mqtt.receipt_verdict_wait_s`. Otherwise the verdict is
null: the event is durable, and not settled yet.
**Loses when** the broker loses a message after its own PUBACK. Mosquitto forgets unsaved messages when it is
killed, and drops those that do not fit its queue. The receipts let the publisher notice that.

One bridge is active at a broker; others are on standby and take over within 10 s (JE-19). Besides the broker of
the settings, the bridge connects to each other broker that a live job names (JE-13).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Final

import structlog

from connectors.doors.mqtt_bridge.broker_bridge import BrokerBridge, JobBrokerBridges
from connectors.doors.mqtt_bridge.inboxes import AgentInboxes
from connectors.doors.mqtt_bridge.publish_limits import LoadReports, PublishCounts
from connectors.plumbing.gateway_client.verdict_stream import VerdictStream
from connectors.plumbing.machine.background_service import run_program
from connectors.plumbing.mqtt_link.broker_settings import BRIDGE, role_mqtt
from schemas.settings.settings import Settings

log = structlog.stdlib.get_logger("connectors.doors.mqtt_bridge")  # __name__ is __main__ when it runs

_JOB_BROKERS_END_S: Final = 20.0


class MqttBridge:
    """The whole bridge: to the common MQTT broker, to the per-job brokers, and to the agents' inboxes.

    The common broker is the one in `settings`. Setting the event `stop` ends `run`. The file `ready_file` is
    created when the bridge has become active or is on standby; None: no file. The constructor raises
    SettingsError when the file of role passwords is wrong or other users can read it.
    """

    def __init__(self, settings: Settings, stop: threading.Event, ready_file: Path | None = None) -> None:
        self._stop = stop
        self._ready_file = ready_file
        self._verdicts = VerdictStream(settings, settings.mqtt.receipt_verdict_wait_s)
        own = settings.model_copy(update={"mqtt": role_mqtt(settings, BRIDGE)})
        self._inboxes = AgentInboxes(
            own,
            stop,
            lambda: self._bridge.is_active,
            lambda agents: self._bridge.outbox_limits.learn(agents),
        )
        # Only at the stack's own broker an account belongs to one job or agent, and can be paused.
        published = None if settings.mqtt.accounts_dir is None else PublishCounts()
        self._reports = None if published is None else LoadReports(settings, stop, published)
        self._bridge = BrokerBridge(own, stop, self._verdicts, self._ready, self._inboxes, published)
        job_brokers = JobBrokerBridges(settings, stop, self._verdicts)
        self._job_brokers = threading.Thread(target=job_brokers.run, name="overlays", daemon=True)

    def run(self) -> None:
        """Carry messages between the MQTT brokers and the log until `stop` is set. Blocks.

        While a broker, Kafka or the gateway does not answer, the bridge retries. It starts threads, and stops
        them before it returns. Raises TrunklineError when the Kafka topic does not fit the settings, and
        SettingsError for a TLS certificate that cannot be read.
        """
        self._verdicts.start()
        self._job_brokers.start()
        self._inboxes.start()
        if self._reports is not None:
            self._reports.start()
        try:
            self._bridge.run()
        finally:
            self._stop.set()
            self._inboxes.join()
            if self._reports is not None:
                self._reports.join()
            self._job_brokers.join(_JOB_BROKERS_END_S)
            self._verdicts.close()
            log.info("stopped", **self._bridge.tally.snapshot())

    def _ready(self) -> None:
        if self._ready_file is not None:
            self._ready_file.touch()


def run(settings: Settings, stop: threading.Event, ready_file: Path | None) -> None:
    """Run the bridge until `stop` is set; see `MqttBridge`."""
    MqttBridge(settings, stop, ready_file).run()


if __name__ == "__main__":
    sys.exit(run_program("mqtt_bridge", run))
