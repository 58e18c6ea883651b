"""The bridge at one MQTT broker, and the bridges to per-job brokers, which live jobs name (JE-13).

A bridge is on standby, becomes active, and starts again after each lost connection. When Kafka does not take a
record, it acknowledges nothing more. It cuts the MQTT connection and makes a new producer, and the broker
delivers again from the first unacknowledged message. It tries for ever, with back-off. Redelivered messages
have the same `ce_id` and settle as duplicates.

Settings, log events and the gateway call a per-job broker an overlay, because it is laid over the settings.
**Reads** `GET /api/hub/brokers` of the gateway. While the gateway does not answer, nothing changes.
**Guarantees** that a broker that is down, or refuses the bridge, delays no other broker: each one has a thread,
a publisher and a back-off of its own. A bridge ends `mqtt.overlay_linger_s` after the end of the last live job
that names its broker, and not before all its messages are acknowledged.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

import structlog
from pydantic import ValidationError

from connectors.doors.mqtt_bridge.bridge_standby import StandbyWatch, has_session, session_ids
from connectors.doors.mqtt_bridge.connection import BridgeConnection, Tally
from connectors.doors.mqtt_bridge.inboxes import AgentInboxes
from connectors.doors.mqtt_bridge.publish_limits import OutboxLimits, PublishCounts
from connectors.log.kafka_topic import RenewingPublisher
from connectors.plumbing.gateway_client.gateway_client import GatewayClient
from connectors.plumbing.gateway_client.verdict_stream import VerdictStream
from connectors.plumbing.mqtt_link.broker_settings import resolve_mqtt, same_broker
from connectors.plumbing.mqtt_link.payloads import showing_interval_s
from schemas.keys.record_macs import MQTT_BRIDGE
from schemas.keys.sealing import UnsealError, broker_password_purpose, load_keyring
from schemas.settings.settings import MqttSettings, Settings, SettingsError
from schemas.streams.job.job_registry import BrokerOverlay, broker_digest
from schemas.wire.record import OutgoingRecord
from trunkline_agent.broker import broker_name
from trunkline_agent.errors import BackboneUnreachable, TrunklineError
from trunkline_agent.mqtt.mqtt_connection import backoff_s

COUNTER_LINE_S: Final = 30.0
STEADY_AFTER_S: Final = 10.0
_FINISH_S: Final = 10.0
# A session may have hundreds of thousands of messages.
_DRAIN_S: Final = 600.0
_FORMER_ATTEMPTS: Final = 3
_OVERSIZED_LIMIT: Final = 10_000
_TICK_S: Final = 0.25
# Events that come within this time are sent to Kafka in one request. Each request costs a wake-up in the
# bridge, in Kafka, in the gateway's live view and for the verdict, which is several times the cost of an event.
_LINGER_MS: Final = 10


class BrokerBridge:
    """The bridge between one MQTT broker, `settings.mqtt`, and the log.

    Args:
        settings: the broker, the log and the limits.
        stop: ends `run` when it is set.
        verdicts: the stream that supplies the verdicts for receipts.
        ready: called each time this bridge has become active or is on standby.
        inboxes: notified of what agents publish on their outboxes. None: outboxes are not read.
        published: counts the messages of each job and agent. None: they are not counted.
        broker: the address of a job's own broker. Empty for the common broker.

    Raises:
        SettingsError: the keys cannot be read.

    Attributes:
        tally: the counters of messages.
        outbox_limits: the limits of agents' messages.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event,
        verdicts: VerdictStream,
        ready: Callable[[], None] = lambda: None,
        inboxes: AgentInboxes | None = None,
        published: PublishCounts | None = None,
        broker: str = "",
    ) -> None:
        self._settings = settings
        self._mqtt = settings.mqtt
        self._stop = stop
        self._verdicts = verdicts
        self._ready = ready
        self._inboxes = inboxes
        self._published = published
        self._name = uuid.uuid4().hex
        self._log = structlog.stdlib.get_logger(__name__).bind(broker=broker_name(settings.mqtt))
        # An earlier id is removed when its session was read, or when there is none.
        self._client_id, *self._former_ids = session_ids(settings, broker)
        self._former_failures = 0
        self.tally = Tally()
        self._oversized: set[str] = set()
        self._publisher = RenewingPublisher(
            settings, signer=MQTT_BRIDGE, linger_ms=_LINGER_MS, close_s=_FINISH_S
        )
        self.outbox_limits = OutboxLimits(self._record_refusal)
        self._connection: BridgeConnection | None = None
        self._cut_off = False
        self._failures = 0
        self._next_line = time.monotonic() + COUNTER_LINE_S

    @property
    def unacknowledged(self) -> int:
        """The number of messages that wait for Kafka or for their receipt; 0 while the bridge is not active."""
        connection = self._connection
        return 0 if connection is None else connection.unacknowledged

    @property
    def is_active(self) -> bool:
        """True if this bridge is the active one at its broker.

        Stays True for a moment after another bridge has taken over, until this bridge notices the lost
        connection.
        """
        return self._connection is not None

    def run(self) -> None:
        """Carry messages from the broker to the log until `stop` is set. Blocks.

        Waits on standby while another bridge is active. Reconnects with a growing pause, for ever, when the
        broker or Kafka is unreachable. Closes the Kafka producer at the end.

        Raises:
            TrunklineError: the Kafka topic does not fit the settings.
            SettingsError: a TLS certificate cannot be read.
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
            self._publisher.close()

    def _bridge_once(self) -> None:
        # Before the standby: a bridge that cannot reach Kafka must not take over from one that can.
        self._publisher.live()
        why = self._wait_turn()
        if why is None:
            return
        connection = self._new_connection(self._client_id)
        self._read_former_sessions(connection)
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

    def _new_connection(self, client_id: str, *, is_former: bool = False) -> BridgeConnection:
        return BridgeConnection(
            self._settings,
            self._publisher.live(),
            self.tally,
            self._oversized,
            self._verdicts,
            self._name,
            self._inboxes,
            self.outbox_limits,
            self._published,
            client_id,
            is_former=is_former,
        )

    def _read_former_sessions(self, present: BridgeConnection) -> None:
        """Read the sessions of earlier client ids to their end, before the messages of the present session."""
        while self._former_ids and not self._stop.is_set():
            client_id = self._former_ids[0]
            try:
                if has_session(self._mqtt, client_id):
                    present.make_session()
                    former = self._new_connection(client_id, is_former=True)
                    former.open()
                    is_done = former.drain(_DRAIN_S)
                    self._log.info("former_session_read", is_done=is_done, why=former.why)
            except BackboneUnreachable:
                # Any account may disturb an id that it can guess, so a few attempts have to do.
                self._former_failures += 1
                if self._former_failures < _FORMER_ATTEMPTS:
                    raise
                self._log.warning("former_session_not_read", attempts=self._former_failures)
            self._former_ids.pop(0)

    def _watch(self, connection: BridgeConnection) -> None:
        """Wait until the connection is lost or the bridge is stopped, and end the connection."""
        interval_s = showing_interval_s(self._mqtt)
        shown_at = time.monotonic()
        while not self._stop.is_set() and not connection.lost.is_set():
            connection.lost.wait(min(_TICK_S, interval_s))
            self._count_line()
            if time.monotonic() - shown_at >= interval_s:
                shown_at = time.monotonic()
                connection.show_presence()
        if not connection.lost.is_set():
            # In order, so that a bridge on standby finds nothing unfinished.
            connection.finish(_FINISH_S)
            return
        connection.drop()
        self._log.warning("connection_lost", why=connection.why)
        if len(self._oversized) > _OVERSIZED_LIMIT:
            self._oversized.clear()

    def _record_refusal(self, record: OutgoingRecord) -> None:
        with suppress(TrunklineError):  # the connection ends for the same reason
            self._publisher.live().append(record)

    def _wait_turn(self) -> str | None:
        with closing(StandbyWatch(self._mqtt, self._name, cut_off=self._cut_off)) as watch:
            watch.open()
            return watch.wait_turn(self._stop, self._standing_by)

    def _standing_by(self, active: str) -> None:
        self._log.info("standby", active=active)
        self._ready()

    def _back_off(self) -> None:
        deadline = time.monotonic() + backoff_s(self._mqtt, self._failures)
        self._failures += 1
        while not self._stop.is_set() and (left_s := deadline - time.monotonic()) > 0:
            self._stop.wait(min(left_s, COUNTER_LINE_S))
            self._count_line()

    def _count_line(self) -> None:
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + COUNTER_LINE_S
            self._log.info("counters", **self.tally.snapshot())


log = structlog.stdlib.get_logger(__name__)

BROKERS_PATH: Final = "/api/hub/brokers"
# Each costs a thread, a producer and up to two connections, and any client that may register jobs may name one.
BRIDGE_LIMIT: Final = 64
_TOO_MANY: Final = "too many"
_END_S: Final = 15.0
_REST_MOST_S: Final = 300.0


@dataclass
class _Running:
    """A bridge, and since when no live job names its broker (None: a live job names it)."""

    mqtt: MqttSettings
    stop: threading.Event
    bridge: BrokerBridge
    thread: threading.Thread
    unnamed_since: float | None = None


@dataclass(frozen=True)
class _Failure:
    """How often a bridge has ended by itself, and when it may start again (monotonic seconds)."""

    count: int
    rest_until: float


class JobBrokerBridges:
    """A bridge for each per-job broker that the gateway names, each on a thread of its own.

    Setting the event `stop` ends `run`. `verdicts` supplies the verdicts for the receipts of all bridges; the
    caller starts and closes it.
    """

    def __init__(self, settings: Settings, stop: threading.Event, verdicts: VerdictStream) -> None:
        self._settings = settings
        self._stop = stop
        self._verdicts = verdicts
        self._running: dict[MqttSettings, _Running] = {}
        self._failures: dict[MqttSettings, _Failure] = {}
        self._complaints: dict[str, str] = {}  # the last warning about the gateway ("") and each broker

    def run(self) -> None:
        """Start and stop bridges as live jobs need them: ask the gateway every `mqtt.overlay_poll_s` seconds.

        While the gateway does not answer, the running bridges stay. Blocks until `stop` is set. It then stops
        all bridges and waits for them, at most 15 s.
        """
        while not self._stop.is_set():
            try:
                self._look()
            except Exception:  # a bug must not end all the following rounds
                log.exception("overlays_failed")
            self._stop.wait(self._settings.mqtt.overlay_poll_s)
        for running in self._running.values():
            running.stop.set()
        deadline = time.monotonic() + _END_S
        for running in self._running.values():
            running.thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self) -> None:
        try:
            with GatewayClient(self._settings) as gateway:
                overlays = list(map(str, gateway.get_all(BROKERS_PATH, "brokers", broker_digest)["brokers"]))
        except (TrunklineError, KeyError, TypeError) as error:
            self._complain("", str(error))
            return
        known = {*overlays, _TOO_MANY}
        self._complaints = {text: why for text, why in self._complaints.items() if text in known}
        wanted = {mqtt for text in overlays if (mqtt := self._resolved(text)) is not None}
        self._failures = {mqtt: failure for mqtt, failure in self._failures.items() if mqtt in wanted}
        for mqtt in wanted - self._running.keys():
            if mqtt not in self._failures or time.monotonic() >= self._failures[mqtt].rest_until:
                self._begin(mqtt)
        for mqtt, running in list(self._running.items()):
            if mqtt in wanted:
                running.unnamed_since = None
            else:
                self._let_go(running)
            if not running.thread.is_alive():
                del self._running[mqtt]  # if it is still wanted, a later round starts it again
                if not running.stop.is_set():
                    self._note_failure(mqtt)

    def _resolved(self, text: str) -> MqttSettings | None:
        """Return the settings of a job's broker, None for the bridge's own broker and for an unusable one."""
        try:
            overlay = BrokerOverlay.model_validate_json(text)
            password = None
            if overlay.sealed_password is not None:
                purpose = broker_password_purpose(overlay.host, overlay.port, overlay.username)
                password = load_keyring(self._settings).open(overlay.sealed_password, purpose).decode("utf-8")
            mqtt = resolve_mqtt(self._settings.mqtt, overlay, password)
        except (TrunklineError, SettingsError, UnsealError, UnicodeDecodeError) as error:
            self._complain(text, f"{type(error).__name__}: {error}")
            return None
        except ValidationError as error:
            self._complain(text, f"{error.error_count()} wrong fields")
            return None
        return None if same_broker(mqtt, self._settings.mqtt) else mqtt

    def _note_failure(self, mqtt: MqttSettings) -> None:
        """Start the pause of a bridge that has ended by itself. It grows: the reason may be permanent."""
        count = self._failures[mqtt].count + 1 if mqtt in self._failures else 1
        rest_s = min(self._settings.mqtt.overlay_poll_s * 2**count, _REST_MOST_S)
        self._failures[mqtt] = _Failure(count, time.monotonic() + rest_s)

    def _begin(self, mqtt: MqttSettings) -> None:
        if len(self._running) >= BRIDGE_LIMIT:
            self._complain(_TOO_MANY, f"more than {BRIDGE_LIMIT} brokers of live jobs; some have no bridge")
            return
        stop = threading.Event()
        own = self._settings.model_copy(update={"mqtt": mqtt})
        bridge = BrokerBridge(own, stop, self._verdicts, broker=broker_name(mqtt))
        name = f"bridge {broker_name(mqtt)}"
        thread = threading.Thread(target=self._run, args=(bridge, mqtt), name=name, daemon=True)
        self._running[mqtt] = _Running(mqtt, stop, bridge, thread)
        log.info("overlay_begins", broker=broker_name(mqtt))
        thread.start()

    def _run(self, bridge: BrokerBridge, mqtt: MqttSettings) -> None:
        try:
            bridge.run()
        except (TrunklineError, SettingsError) as error:
            log.error("overlay_failed", broker=broker_name(mqtt), error=str(error))
        except Exception:
            log.exception("overlay_failed", broker=broker_name(mqtt))
        finally:
            log.info("overlay_ended", broker=broker_name(mqtt), **bridge.tally.snapshot())

    def _let_go(self, running: _Running) -> None:
        now = time.monotonic()
        if running.unnamed_since is None:
            running.unnamed_since = now
        if (
            now - running.unnamed_since >= self._settings.mqtt.overlay_linger_s
            and not running.bridge.unacknowledged
        ):
            running.stop.set()

    def _complain(self, text: str, error: str) -> None:
        """Log a fault of a job's broker, or of the gateway (`text` empty), once and not in each round."""
        if self._complaints.get(text) != error:
            self._complaints[text] = error
            log.warning("overlay_unusable" if text else "overlays_unknown", error=error)
