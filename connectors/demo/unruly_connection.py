"""An MQTT connection without rules: it receives all jobs' events and receipts, and sends any bytes.

The broker refuses strangers, and workers that write for another job. So this connection uses the operator's
account, and does what a thief of that account could do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from connectors.mqtt_link.broker_settings import broker_name
from connectors.mqtt_link.mqtt_connection import connect_properties, cut_connection, dial, new_client
from connectors.mqtt_link.receipt import Receipt, read_receipt
from connectors.mqtt_link.topics import events_filter
from schemas.errors import BackboneUnreachable
from schemas.settings.settings import MqttSettings
from schemas.wire.ids import is_job_id
from schemas.wire.record import content_id

_RECEIPTS_END: Final = "/receipts"


class UnrulyConnection:
    """A connection that is used as a context manager. Thread-safe.

    Raises BackboneUnreachable when the broker does not let it in, is lost, or a receipt does not come within
    `receipt_timeout_s`.
    """

    def __init__(self, mqtt: MqttSettings) -> None:
        self._mqtt = mqtt
        self._changed = threading.Condition()
        self._received: dict[str, bytes] = {}
        self._receipts: defaultdict[str, list[Receipt]] = defaultdict(list)
        self._sent: Counter[str] = Counter()
        self._subscribed = False
        self._lost: str | None = None
        self._client = new_client(mqtt)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.on_disconnect = self._on_disconnect

    def __enter__(self) -> Self:
        mqtt = self._mqtt
        dial(self._client, mqtt, connect_properties())
        try:
            self._wait(lambda: self._subscribed, mqtt.connect_timeout_s, "no answer to the subscription")
        except BackboneUnreachable:
            cut_connection(self._client)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.disconnect()
        cut_connection(self._client)

    def receipts(self) -> dict[str, list[Receipt]]:
        """Return all receipts that came, by CloudEvents id."""
        with self._changed:
            return {ce_id: list(receipts) for ce_id, receipts in self._receipts.items()}

    def note_sent(self, ce_id: str) -> None:
        """Note that an agent sent this event and got its receipt. `send_again` then waits for a second one."""
        with self._changed:
            self._sent[ce_id] += 1

    def send(self, topic_id: str, payload: bytes, *, retain: bool = False) -> str:
        """Publish below `<prefix>/<topic_id>/events` with QoS 1, and return the CloudEvents id.

        Waits until the event is in Kafka: for its receipt, or, for a topic without a job id, which gets no
        receipt, for the broker's PUBACK.
        """
        topic = f"{self._mqtt.topic_prefix}/{topic_id}/events"
        ce_id = content_id(topic.encode("utf-8"), payload)
        with self._changed:
            self._sent[ce_id] += 1
            times = self._sent[ce_id]
        sent = self._client.publish(topic, payload, qos=1, retain=retain)
        if is_job_id(topic_id):
            self._wait(lambda: len(self._receipts[ce_id]) >= times, self._mqtt.receipt_timeout_s, "no receipt")
        else:
            self._wait(sent.is_published, self._mqtt.puback_timeout_s, "no PUBACK", tick_s=0.02)
        return ce_id

    def send_again(self, job_id: str, ce_id: str) -> str:
        """Publish once more the event of a job that came under this id."""
        self._wait(lambda: ce_id in self._received, self._mqtt.receipt_timeout_s, "the event was not received")
        return self.send(job_id, self._received[ce_id])

    def _wait(
        self, found: Callable[[], bool], timeout_s: float, what: str, tick_s: float | None = None
    ) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not found():
                left_s = deadline - time.monotonic()
                if self._lost is not None or left_s <= 0:
                    why = self._lost or f"{what} within {timeout_s:g} s"
                    raise BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")
                self._changed.wait(left_s if tick_s is None else min(left_s, tick_s))

    def _on_connect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        if reason.is_failure:
            self._lose(f"refuses the connection: {reason}")
            return
        # Events that the broker retains for old jobs are not wanted.
        options = SubscribeOptions(qos=1, retainHandling=SubscribeOptions.RETAIN_DO_NOT_SEND)
        filters = (events_filter(self._mqtt.topic_prefix), f"{self._mqtt.topic_prefix}/+{_RECEIPTS_END}")
        client.subscribe([(topic_filter, options) for topic_filter in filters])

    def _on_subscribe(
        self, client: Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        if any(reason.is_failure for reason in reasons):
            self._lose(f"refuses the subscription: {reasons}")
            return
        with self._changed:
            self._subscribed = True
            self._changed.notify_all()

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        payload = bytes(message.payload)
        with self._changed:
            if message.topic.endswith(_RECEIPTS_END):
                receipt = read_receipt(payload)
                if receipt is not None:
                    self._receipts[receipt.ce_id].append(receipt)
            else:
                self._received[content_id(message.topic.encode("utf-8"), payload)] = payload
            self._changed.notify_all()

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        self._lose(f"connection lost: {reason}")

    def _lose(self, why: str) -> None:
        with self._changed:
            self._lost = self._lost or why
            self._changed.notify_all()
