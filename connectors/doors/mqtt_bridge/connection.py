"""The active bridge's two connections to one MQTT broker: one reads events, the other publishes receipts.

The bridge reads ahead (`mqtt.bridge_read_ahead`), and a thread appends what was read in turns by publisher, so
that a publisher with many messages does not hold up the others (LM-09).

Each pair of connections has clients of its own, so an acknowledgement can only go out on the connection that
its message came in on.

The second connection publishes receipts (JE-17) and the bridge's presence (JE-19). It has a thread of its own
to read the broker's PUBACKs, so the first connection may stop reading events while receipts are slow. With a
single connection that wait would keep out the PUBACKs that end it. For the same reason the second connection
has the short keepalive and the Last Will: its thread never waits.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import structlog
from paho.mqtt.client import MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from connectors.doors.mqtt_bridge.bridge_records import Incoming, incoming, receipt_of, unreadable
from connectors.doors.mqtt_bridge.bridge_standby import session_ids
from connectors.doors.mqtt_bridge.inboxes import AgentInboxes
from connectors.doors.mqtt_bridge.publish_limits import FairQueue, OutboxLimits, PublishCounts
from connectors.log.publisher import Append, Publisher, RecordRefused
from connectors.plumbing.gateway_client.verdict_stream import Answer, VerdictStream
from connectors.plumbing.mqtt_link.payloads import Presence, encode_presence, presence_topic
from schemas.settings.settings import Settings
from trunkline_agent.broker import broker_name
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.ack_window import AckWindow, PendingAck
from trunkline_agent.mqtt.mqtt_client import topic_bytes_of, topic_of, well_formed_traceparent
from trunkline_agent.mqtt.mqtt_connection import NO_SUBSCRIBER, RETAINED_ONCE, MqttConnection, Subscription
from trunkline_agent.wire.receipt import LogPosition
from trunkline_agent.wire.topics import events_filter, outboxes_filter
from trunkline_agent.wire.verdicts import REJECTED

log = structlog.stdlib.get_logger(__name__)

_TICK_S: Final = 0.02


class Tally:
    """The counters of one bridge's messages, over all its connections. Thread-safe.

    The names are `received`, `cleared` (removals of retained messages), `redelivered`, `refused`, `limited`
    (agents' messages beyond a limit), `appended`, `acked`, `told` (receipts with a verdict) and
    `receipts_refused`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(received=0, appended=0, acked=0, redelivered=0, refused=0, told=0)

    def add(self, name: str, count: int = 1) -> None:
        """Add `count` to the counter `name`, which is one of the names that the class lists."""
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return a copy of all counters, by name."""
        with self._lock:
            return dict(self._counts)


class BridgeConnection:
    """The active bridge's two connections to one broker: one for events, one for receipts and presence.

    Appends each MQTT message to the log, publishes its receipt, and then acknowledges the message to the
    broker.

    Attributes:
        lost: a threading.Event that is set when the connections can no longer be used.
        why: the reason why they can no longer be used; empty until then.
        cut_off: whether the broker or the network ended a connection. Another bridge may have taken it over.
    """

    def __init__(
        self,
        settings: Settings,
        publisher: Publisher,
        tally: Tally,
        oversized: set[str],
        verdicts: VerdictStream,
        bridge: str = "",
        inboxes: AgentInboxes | None = None,
        outbox_limits: OutboxLimits | None = None,
        published: PublishCounts | None = None,
        client_id: str | None = None,
        *,
        is_former: bool = False,
    ) -> None:
        """Prepare the connections; `open` makes them.

        Args:
            settings: the broker and the limits.
            publisher: appends the records to the log.
            tally: the counters to increase.
            oversized: ids of records that Kafka has refused because of their size or form. Their values are cut
                before they are sent. New ids are added to the set.
            verdicts: supplies the verdict of a settled record.
            bridge: the name of this bridge in presence messages.
            inboxes: notified of what agents publish on their outboxes. None: outboxes are not read.
            outbox_limits: the limits of the messages on outbox topics. None: there are none.
            published: counts the messages by job and agent, but for those that the broker delivers again. None:
                they are not counted.
            client_id: the client id of the session. None: the present id (`session_ids`).
            is_former: whether the session is one of an earlier client id, which `drain` reads to its end.
        """
        self._settings = settings
        self._inboxes = inboxes
        self._outbox_limits = outbox_limits
        self._published = published
        self._mqtt = settings.mqtt
        self._publisher = publisher
        self._tally = tally
        self._oversized = oversized
        self._verdicts = verdicts
        self._client_id = session_ids(settings)[0] if client_id is None else client_id
        self._end_topic = f"{presence_topic(self._mqtt)}/{secrets.token_hex(16)}" if is_former else None
        self._events = self._new_events(self._take, self._events_lost)
        self._presence = encode_presence(Presence(bridge, active=True))
        self._receipts = MqttConnection(
            self._mqtt,
            keepalive_s=self._mqtt.bridge_keepalive_s,
            will=(presence_topic(self._mqtt), encode_presence(Presence(bridge, active=False))),
            on_lost=lambda why: self._lose(f"receipts: {why}"),
        )
        self._window = AckWindow(self._events.ack)
        self._queue: FairQueue[tuple[Incoming, PendingAck]] = FairQueue(
            self._mqtt.bridge_inflight, self._mqtt.publisher_inflight
        )
        self._appending = threading.Thread(target=self._append_all, name="bridge-append", daemon=True)
        self._closing = False
        self._at_end = threading.Event()
        self.lost = threading.Event()
        self.cut_off = False
        self.why = ""

    def _new_events(
        self, take: Callable[[MQTTMessage], None], on_lost: Callable[[str], None] = lambda _why: None
    ) -> MqttConnection:
        """Return a connection for the session of events, not opened yet."""
        # The retain flag as published tells the removal of a retained message from an empty event.
        wanted = [Subscription(events_filter(self._mqtt.topic_prefix), 1, RETAINED_ONCE, True)]
        if self._inboxes is not None:
            outboxes = outboxes_filter(self._mqtt.agents_prefix)
            wanted.append(Subscription(outboxes, 1, RETAINED_ONCE, True, self._outboxes_forbidden))
        if self._end_topic is not None:
            # The session of an earlier client id has its subscriptions, and gets one more for its end.
            wanted = [Subscription(self._end_topic)]
        return MqttConnection(
            self._mqtt,
            wanted,
            client_id=self._client_id,
            session_expiry_s=self._mqtt.session_expiry_s,
            receive_maximum=self._mqtt.bridge_read_ahead,
            manual_ack=True,
            on_message=take,
            on_unreadable=take,
            on_lost=on_lost,
        )

    def make_session(self) -> None:
        """Make the session at the broker, which then queues messages for it. Raises BackboneUnreachable."""
        session = self._new_events(lambda _message: None)
        try:
            session.open()
            session.close()
        finally:
            session.drop()

    def drain(self, timeout_s: float) -> bool:
        """Read a former session to its end, and remove it. Returns whether that was done within `timeout_s`.

        The end is a message of our own, which the broker queues behind all earlier ones. Messages that come
        after it are in the present session as well.
        """
        deadline = time.monotonic() + timeout_s
        self._receipts.publish(str(self._end_topic), b"end")
        while not self._at_end.is_set() and not self.lost.is_set() and time.monotonic() < deadline:
            self._at_end.wait(_TICK_S)
        self.finish(deadline - time.monotonic(), forget_session=self._at_end.is_set())
        return self._at_end.is_set() and not self.unacknowledged

    def open(self) -> None:
        """Connect to the broker and subscribe to events.

        Raises BackboneUnreachable when a connection fails, is refused or takes longer than
        `mqtt.connect_timeout_s`. Both connections are closed then.
        """
        try:
            self._receipts.open()
            self._appending.start()
            self._events.open()
        except BackboneUnreachable:
            self.drop()
            raise
        session_present = self._events.session_present
        log.info("connected", broker=broker_name(self._mqtt), session_present=session_present)

    @property
    def unacknowledged(self) -> int:
        """The number of received messages that wait for Kafka or for their receipt."""
        return len(self._window)

    def show_presence(self) -> None:
        """Publish a retained message which says that this bridge is the active one.

        Does not wait for the broker.
        """
        # QoS 0: it must not wait behind receipts, and the next one comes soon.
        self._receipts.publish(presence_topic(self._mqtt), self._presence, qos=0, retain=True)

    def finish(self, timeout_s: float, *, forget_session: bool = False) -> None:
        """Take no new message, wait at most `timeout_s` seconds for the pending ones, and disconnect.

        A message is pending until it was acknowledged. Messages that are pending after the wait are not lost:
        the broker delivers them again to the next connection. With `forget_session` the broker removes the
        session, unless a message is pending.
        """
        self._closing = True
        deadline = time.monotonic() + timeout_s
        while len(self._window) and not self.lost.is_set() and time.monotonic() < deadline:
            self.lost.wait(_TICK_S)
        self._queue.close()
        self._events.close(forget_session=forget_session and not len(self._window))
        self.drop()

    def drop(self) -> None:
        """Cut both connections at once. The broker later delivers unacknowledged messages again, in order."""
        self._closing = True
        self._window.close()
        self._queue.close()
        self._events.drop()
        if self.cut_off:
            # Without the Last Will: another bridge may be the active one already.
            self._receipts.close()
        else:
            self._receipts.drop()

    def _lose(self, why: str) -> None:
        self._closing = True
        self.why = self.why or why
        self.lost.set()

    def _events_lost(self, why: str) -> None:
        self.cut_off = self._events.cut_off and not self._closing
        self._lose(why)

    def _outboxes_forbidden(self, reason: ReasonCode) -> None:
        # A broker that is not ours may let us read events alone.
        log.warning("outboxes_forbidden", prefix=self._mqtt.agents_prefix, reason=str(reason))

    def _take(self, message: MQTTMessage) -> None:
        if self._closing or not self._window.wait_room(self._mqtt.bridge_read_ahead, lambda: self._closing):
            return
        topic = topic_of(message)
        if topic is not None and topic == self._end_topic:
            self._closing = True
            self._at_end.set()
            return
        if message.retain and not message.payload:
            self._tally.add("cleared")
            self._acknowledge(self._window.add(message.mid, message.qos))
            return
        self._tally.add("received")
        if message.dup:
            self._tally.add("redelivered")
        if topic is None:
            found = unreadable(topic_bytes_of(message), bytes(message.payload))
        else:
            traceparent = well_formed_traceparent(message.properties)
            found = incoming(self._mqtt, topic, bytes(message.payload), traceparent)
        is_awaited = False
        if self._inboxes is not None and found.agent is not None:
            # The number of deliveries limits the confirmations of them.
            is_awaited = self._inboxes.on_outbox_message(found.agent, found.confirms)
        if self._published is not None and not message.dup and not is_awaited:
            self._published.count(found.record.stream)
        if found.confirms == ():
            self._acknowledge(self._window.add(message.mid, message.qos if message.mid else 0))
            return
        if not is_awaited and self._refused_by_limit(found, message):
            return
        # Packet id 0 names no message (MQTT 5, 2.2.1), so it cannot be acknowledged.
        ack = self._window.add(message.mid, message.qos if message.mid else 0)
        self._queue.put(found.record.stream, (found, ack), len(message.payload))

    def _append_all(self) -> None:
        """Append the messages in turns by publisher. Runs on a thread of its own, until the queue is closed."""
        try:
            while messages := self._queue.take():
                for found, ack in messages:
                    self._append(found, ack)
        except Exception as error:
            if not isinstance(error, BackboneUnreachable):
                log.exception("append_failed")
            self._lose(f"a message could not be appended: {error}")

    def _append(self, found: Incoming, ack: PendingAck) -> None:
        record = found.record
        is_oversized = record.ce_id in self._oversized
        is_long = len(record.value or b"") > self._settings.limits.payload_bytes
        if found.receipts_to is None or is_oversized or is_long:
            self._tally.add("refused")
        append = self._publisher.append_cut(record) if is_oversized else self._publisher.append(record)
        append.add_done_callback(partial(self._appended, found, ack))

    def _refused_by_limit(self, found: Incoming, message: MQTTMessage) -> bool:
        """Return whether a limit refuses an agent's message. Its receipt is then on the way."""
        limits, record = self._outbox_limits, found.record
        if limits is None or found.agent is None:
            return False
        refused = limits.admit(found.agent, record.ce_id, bytes(message.payload), is_repeated=message.dup)
        if refused is None:
            return False
        self._tally.add("limited")
        ack = self._window.add(message.mid, message.qos)
        self._send_receipt(found, ack, receipt_of(record, None, *refused))
        return True

    def _appended(self, message: Incoming, ack: PendingAck, append: Any) -> None:
        """Handle Kafka's answer. Runs on the publisher's thread."""
        done: Append = append
        error = done.exception()
        if error is not None:
            if isinstance(error, RecordRefused):
                self._oversized.add(message.record.ce_id)
            self._lose(f"Kafka did not take a record: {error}")
            return
        self._tally.add("appended")
        if message.receipts_to is None:
            self._queue.done(message.record.stream)
            self._acknowledge(ack)
            return
        settled = partial(self._settled, message, ack, LogPosition(*done.result()))
        limits, record = self._outbox_limits, message.record
        late: Answer | None = None
        if message.confirms is not None:
            late = partial(self._confirmed, message)
        elif limits is not None and message.agent is not None:
            late = limits.late(record.ce_id, record.value or b"")
        self._verdicts.ask(done.result(), settled, late)

    def _settled(
        self, message: Incoming, ack: PendingAck, position: LogPosition, verdict: str | None, reason: str | None
    ) -> None:
        """Publish the receipt, with the verdict if it came in time. Runs on any thread."""
        self._queue.done(message.record.stream)
        if verdict is not None:
            self._tally.add("told")
        if message.confirms is not None:
            self._confirmed(message, verdict)
            if verdict != REJECTED:
                # No receipt: the agent learns of a confirmation that is missing when the message comes again.
                self._acknowledge(ack)
                return
        # The event is acknowledged once the broker has its receipt. A bridge that dies in between will send
        # the receipt again.
        limits, record, retry_after_s = self._outbox_limits, message.record, None
        if limits is not None and message.agent is not None and message.confirms is None:
            retry_after_s = limits.settled(record.ce_id, record.value or b"", verdict, reason)
        self._send_receipt(message, ack, receipt_of(record, position, verdict, reason, retry_after_s))

    def _confirmed(self, message: Incoming, verdict: str | None, reason: str | None = None) -> None:
        if self._inboxes is not None and message.agent is not None:
            self._inboxes.on_confirmation(message.agent, message.confirms or (), verdict)

    def _send_receipt(self, message: Incoming, ack: PendingAck, receipt: bytes) -> None:
        answer = self._receipts.publish(str(message.receipts_to), receipt)
        answer.add_done_callback(partial(self._receipt_published, ack))

    def _receipt_published(self, ack: PendingAck, answer: Future[ReasonCode]) -> None:
        if answer.exception() is not None:
            return  # the connection is lost
        reason = answer.result()
        if reason.is_failure and reason.value != NO_SUBSCRIBER:
            self._tally.add("receipts_refused")  # by the broker's ACL
        self._acknowledge(ack)

    def _acknowledge(self, ack: PendingAck) -> None:
        acked = self._window.confirm(ack)
        if acked:
            self._tally.add("acked", acked)
