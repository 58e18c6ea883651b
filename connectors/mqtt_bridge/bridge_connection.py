"""One connection of the bridge to the MQTT broker, from CONNECT until it is lost or ended in order.

Each connection has a client of its own, so an acknowledgement can only go out on the connection that its
message came in on. Acknowledgements go out in the order of the messages, as MQTT 5 asks (4.6.0-2).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import structlog
from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from connectors.log.publisher import Append, Publisher, RecordRefused
from connectors.mqtt_bridge.bridge_receipts import ReceiptChannel
from connectors.mqtt_bridge.bridge_records import incoming, receipt_of, well_formed_traceparent
from connectors.mqtt_bridge.verdict_stream import VerdictStream
from connectors.mqtt_link.agent_topics import is_outbox, outboxes_filter
from connectors.mqtt_link.job_topics import events_filter
from connectors.mqtt_link.mqtt_connection import (
    broker_name,
    connect_properties,
    cut_connection,
    dial,
    new_client,
)
from connectors.mqtt_link.receipt import LogPosition
from schemas.errors import BackboneUnreachable
from schemas.settings.settings import Settings
from schemas.wire.record import OutgoingRecord

log = structlog.stdlib.get_logger(__name__)

_DISCONNECT_S: Final = 2.0
_ROOM_TICK_S: Final = 0.25


class Tally:
    """The bridge's counters; they outlive connections. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(received=0, appended=0, acked=0, redelivered=0, refused=0, told=0)

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more of `name`."""
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """All counters as they stand."""
        with self._lock:
            return dict(self._counts)


class AckWindow:
    """Messages of one connection that are not acknowledged yet, in order of arrival. Thread-safe."""

    def __init__(self, send_ack: Callable[[int, int], object]) -> None:
        self._send_ack = send_ack
        self._waiting: deque[list[Any]] = deque()  # [mid, qos, whether Kafka has it]
        self._lock = threading.Condition()
        self._closed = False

    def wait_room(self, limit: int, given_up: Callable[[], bool]) -> bool:
        """Wait until fewer than `limit` messages wait here; False when `given_up()` or closed before that.

        The receive maximum says the same to the broker, but Mosquitto 2.0.11 does not keep to it when it
        works off a queue (measured: 4,935 unacknowledged with a receive maximum of 200).
        """
        with self._lock:
            while len(self._waiting) >= limit and not self._closed and not given_up():
                self._lock.wait(_ROOM_TICK_S)
            return not self._closed and not given_up()

    def add(self, mid: int, qos: int) -> list[Any]:
        """Enter a message; give what comes back to `durable`."""
        entry = [mid, qos, False]
        with self._lock:
            self._waiting.append(entry)
        return entry

    def durable(self, entry: list[Any]) -> int:
        """Kafka has the message: acknowledge it and what waited for it. Returns how many were acknowledged."""
        acked = 0
        with self._lock:
            entry[2] = True
            while self._waiting and self._waiting[0][2] and not self._closed:
                mid, qos, _ = self._waiting.popleft()
                self._send_ack(mid, qos)
                acked += 1
            self._lock.notify_all()
        return acked

    def close(self) -> None:
        """Acknowledge nothing any more."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def __len__(self) -> int:
        return len(self._waiting)


class BridgeConnection:
    """Receives job events and what agents say, hands them to the publisher, acknowledges after Kafka, publishes
    receipts.

    `suspects` holds the ids of records that Kafka refused for their own sake; they are sent cut. `verdicts`
    tells how a record was settled (None: receipts say verdict null); `bridge` is our name on the presence
    topic. `heard` is called with the topic of each outbox that something came on; None: no outbox is read.
    `lost` is set, and `why` says the reason, once the connection is of no more use; `cut_off`, when it was not
    our doing: perhaps another bridge has taken it over.
    """

    def __init__(
        self,
        settings: Settings,
        publisher: Publisher,
        tally: Tally,
        suspects: set[str],
        verdicts: VerdictStream | None = None,
        bridge: str = "",
        heard: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._heard = heard
        self._mqtt = settings.mqtt
        self._publisher = publisher
        self._tally = tally
        self._suspects = suspects
        self._verdicts = verdicts
        self._client = new_client(settings.mqtt, settings.mqtt.bridge_client_id, manual_ack=True)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.on_disconnect = self._on_disconnect
        self._window = AckWindow(self._client.ack)
        refused = partial(tally.add, "receipts_refused")
        self._receipts = ReceiptChannel(self._mqtt, bridge, self._lose, refused)
        self._closing = False
        self._subscribed = threading.Event()
        self.lost = threading.Event()
        self.cut_off = False
        self.why = ""

    def open(self) -> None:
        """Connect and subscribe. Raises BackboneUnreachable when that takes longer than `connect_timeout_s`."""
        self._receipts.open()
        deadline = time.monotonic() + self._mqtt.connect_timeout_s
        properties = connect_properties(self._mqtt.session_expiry_s, self._mqtt.bridge_inflight)
        try:
            dial(self._client, self._mqtt, properties, clean_start=False)
        except BackboneUnreachable:
            self._receipts.drop()
            raise
        while not self._subscribed.is_set() and not self.lost.is_set() and time.monotonic() < deadline:
            self._subscribed.wait(0.05)
        if not self._subscribed.is_set():
            why = self.why or "no answer in time"
            self.drop()
            raise BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")

    @property
    def unacknowledged(self) -> int:
        """How many messages wait for Kafka or for their receipt."""
        return len(self._window)

    def show_presence(self) -> None:
        """Tell the bridges that stand by that this one is active."""
        self._receipts.show_presence()

    def finish(self, timeout_s: float) -> None:
        """End in order: take nothing new, wait for Kafka and the acknowledgements, then disconnect."""
        self._closing = True
        deadline = time.monotonic() + timeout_s
        while len(self._window) and not self.lost.is_set() and time.monotonic() < deadline:
            self.lost.wait(0.02)
        self._client.disconnect()
        self.lost.wait(_DISCONNECT_S)
        self.drop()

    def drop(self) -> None:
        """Cut the connection at once: what is not acknowledged will be delivered again, in order."""
        self._closing = True
        self._window.close()
        cut_connection(self._client)
        if self.cut_off:
            self._receipts.leave()
        else:
            self._receipts.drop()

    def _lose(self, why: str) -> None:
        self._closing = True
        if not self.why:
            self.why = why
        self.lost.set()

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        if reason.is_failure:
            self._lose(f"the broker refuses the bridge: {reason}")
            return
        log.info("connected", broker=broker_name(self._mqtt), session_present=flags.session_present)
        # Retain handling 1: retained events come with a new subscription, not again with each connection.
        options = SubscribeOptions(qos=1, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)
        wanted = [(events_filter(self._mqtt.topic_prefix), options)]
        if self._heard is not None:
            wanted.append((outboxes_filter(self._mqtt.agents_prefix), options))
        client.subscribe(wanted)

    def _on_subscribe(
        self, client: Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        if reasons[0].is_failure:
            self._lose(f"the broker refuses the subscription: {reasons[0]}")
            return
        if any(reason.is_failure for reason in reasons):
            # A broker that is not ours may let us read events alone.
            log.warning("outboxes_forbidden", prefix=self._mqtt.agents_prefix, reason=str(reasons[1]))
        self._subscribed.set()

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        # Reason 0x8E would say that another bridge has taken over, but who was just writing does not read it.
        self.cut_off = self.cut_off or not self._closing
        self._lose(f"connection lost: {reason}")

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        if self._closing:
            return
        # An exception here would end paho's thread and leave a connection that is deaf.
        try:
            self._take(message)
        except Exception as error:
            log.exception("message_failed")  # without its topic, which may be what cannot be read
            self._lose(f"a message could not be taken: {type(error).__name__}")

    def _take(self, message: MQTTMessage) -> None:
        if not self._window.wait_room(self._mqtt.bridge_inflight, lambda: self._closing):
            return
        self._tally.add("received")
        if message.dup:
            self._tally.add("redelivered")
        traceparent = well_formed_traceparent(message.properties)
        record, receipts_to = incoming(self._mqtt, message.topic, bytes(message.payload), traceparent)
        if self._heard is not None and is_outbox(self._mqtt.agents_prefix, message.topic):
            self._heard(message.topic)
        suspect = record.ce_id in self._suspects
        if receipts_to is None or suspect or len(message.payload) > self._settings.limits.payload_bytes:
            self._tally.add("refused")
        entry = self._window.add(message.mid, message.qos)
        append = self._publisher.append_cut(record) if suspect else self._publisher.append(record)
        append.add_done_callback(partial(self._appended, entry, record, receipts_to))

    def _appended(self, entry: list[Any], record: OutgoingRecord, receipts_to: str | None, append: Any) -> None:
        """On Kafka's answer; runs on the publisher's thread."""
        done: Append = append
        error = done.exception()
        if error is not None:
            if isinstance(error, RecordRefused):
                self._suspects.add(record.ce_id)
            self._lose(f"Kafka did not take a record: {error}")
            return
        self._tally.add("appended")
        if receipts_to is None:
            self._acknowledge(entry)
            return
        told = partial(self._settled, entry, record, receipts_to, LogPosition(*done.result()))
        if self._verdicts is None:
            told(None, None)
        else:
            self._verdicts.ask(done.result(), told)

    def _settled(
        self,
        entry: list[Any],
        record: OutgoingRecord,
        receipts_to: str,
        position: LogPosition,
        verdict: str | None,
        reason: str | None,
    ) -> None:
        """When the verdict is known, or is not waited for any longer; runs on any thread."""
        if verdict is not None:
            self._tally.add("told")
        # The event is acknowledged once the broker has its receipt, so a bridge that dies in between will
        # send it again.
        receipt = receipt_of(record, position, verdict, reason)
        self._receipts.send(receipts_to, receipt, partial(self._acknowledge, entry))

    def _acknowledge(self, entry: list[Any]) -> None:
        acked = self._window.durable(entry)
        if acked:
            self._tally.add("acked", acked)
