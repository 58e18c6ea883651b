"""The demo's second MQTT connection, which sends any bytes for any job, and receives all events and receipts.

The broker refuses strangers, and workers that write for another job. So this connection uses the operator's
account, and does what a thief of that account could do.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final, Self

from paho.mqtt.client import MQTTMessage
from paho.mqtt.subscribeoptions import SubscribeOptions

from schemas.settings.settings import MqttSettings
from trunkline_agent.mqtt.mqtt_connection import MqttConnection, Subscription
from trunkline_agent.wire.ids import content_id, is_job_id
from trunkline_agent.wire.receipt import Receipt, read_receipt
from trunkline_agent.wire.topics import events_filter

_RECEIPTS_END: Final = "/receipts"


class UnrulyConnection:
    """An MQTT connection that publishes any bytes and collects the receipts of all events. Thread-safe.

    Use it as a context manager. Entering raises BackboneUnreachable when the broker does not answer or refuses
    the login. The sending methods raise BackboneUnreachable when the connection is lost, or a receipt does not
    come within `mqtt.receipt_timeout_s`.
    """

    def __init__(self, mqtt: MqttSettings) -> None:
        self._mqtt = mqtt
        self._changed = threading.Condition()
        self._received: dict[str, bytes] = {}
        self._receipts: defaultdict[str, list[Receipt]] = defaultdict(list)
        self._sent: Counter[str] = Counter()
        filters = (events_filter(mqtt.topic_prefix), f"{mqtt.topic_prefix}/+{_RECEIPTS_END}")
        # Events that the broker retains for old jobs are not wanted.
        unretained = SubscribeOptions.RETAIN_DO_NOT_SEND
        self._connection = MqttConnection(
            mqtt,
            [Subscription(topic_filter, retain_handling=unretained) for topic_filter in filters],
            on_message=self._on_message,
            on_lost=lambda _why: self._notify(),
        )

    def __enter__(self) -> Self:
        self._connection.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def receipts(self) -> dict[str, list[Receipt]]:
        """Return all receipts that came so far, for events of any sender, by the event's CloudEvents id."""
        with self._changed:
            return {ce_id: list(receipts) for ce_id, receipts in self._receipts.items()}

    def note_sent(self, ce_id: str) -> int:
        """Count that an event was sent once more, and return how often it was sent in all.

        Call this when another connection has sent the event. `send` waits for as many receipts of an event as
        it was sent.

        Args:
            ce_id: The CloudEvents id of the event.
        """
        with self._changed:
            self._sent[ce_id] += 1
            return self._sent[ce_id]

    def send(self, topic_id: str, payload: bytes, *, retain: bool = False) -> str:
        """Publish bytes on the topic `<prefix>/<topic_id>/events`, and return the event's CloudEvents id.

        If `topic_id` is a valid job id, it waits for the receipt, which says that the event is in Kafka. Other
        topics get no receipt, so it waits for the broker's PUBACK alone. Raises BackboneUnreachable after
        `mqtt.receipt_timeout_s`.

        Args:
            topic_id: The part of the topic that should be a job id.
            payload: The bytes.
            retain: Whether the broker retains the message.
        """
        topic = f"{self._mqtt.topic_prefix}/{topic_id}/events"
        ce_id = content_id(topic.encode("utf-8"), payload)
        times = self.note_sent(ce_id)
        self._connection.publish_and_wait(topic, payload, retain=retain)
        if is_job_id(topic_id):
            self._wait(lambda: len(self._receipts[ce_id]) >= times, "no receipt")
        return ce_id

    def send_again(self, job_id: str, ce_id: str) -> str:
        """Publish the bytes of the event `ce_id` of a job once more, and return its CloudEvents id.

        It first waits until this connection has received the event, as a subscriber. Raises BackboneUnreachable
        after `mqtt.receipt_timeout_s`.
        """
        self._wait(lambda: ce_id in self._received, "the event was not received")
        return self.send(job_id, self._received[ce_id])

    def _wait(self, found: Callable[[], bool], what: str) -> None:
        connection, timeout_s = self._connection, self._mqtt.receipt_timeout_s
        with self._changed:
            self._changed.wait_for(lambda: found() or connection.lost.is_set(), timeout_s)
            if not found():
                raise connection.unreachable(connection.why or f"{what} within {timeout_s:g} s")

    def _on_message(self, message: MQTTMessage) -> None:
        payload = bytes(message.payload)
        with self._changed:
            if message.topic.endswith(_RECEIPTS_END):
                receipt = read_receipt(payload)
                if receipt is not None:
                    self._receipts[receipt.ce_id].append(receipt)
            else:
                self._received[content_id(message.topic.encode("utf-8"), payload)] = payload
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
