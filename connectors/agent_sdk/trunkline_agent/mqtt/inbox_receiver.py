"""An agent's inbox over MQTT: its payloads, one callback after the other, and confirmations (JE-26, DL-30).

The backbone hands a message out again until it has the agent's confirmation. So a confirmation may be lost, and
a message that comes again is confirmed again.

An agent had another MQTT session under the client id of earlier versions, which was the user name,
`agent.<name>`, and others can guess that. The messages that the broker still has for it are received like those
of the present session.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from paho.mqtt.client import MQTTMessage

from trunkline_agent.broker import BrokerAccess
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.ack_window import AckWindow
from trunkline_agent.mqtt.mqtt_connection import MqttConnection
from trunkline_agent.wire.agent_message import confirmation
from trunkline_agent.wire.receipt import AgentReceipt, agent_receipt
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode

log = logging.getLogger(__name__)

_QUIET_S: Final = 2.0
_FORMER_TICK_S: Final = 0.05
# Several messages are confirmed together: so many, or those of so many seconds.
_TOGETHER: Final = 20
_LINGER_S: Final = 0.01
_REMEMBERED: Final = 10_000
_TICK_S: Final = 0.05
_END_S: Final = 2.0
_TEXTS: Final = ("message_id", "from", "kind", "body")


def read_former_session(
    mqtt: BrokerAccess,
    client_id: str,
    topic: str,
    take: Callable[[MqttConnection, AckWindow, MQTTMessage], None],
    closing: threading.Event,
) -> None:
    """Receive the messages of a former session, and let the broker remove it. Blocks; raises nothing.

    It ends when all its messages are acknowledged and no other one comes for 2 s, when the connection is lost,
    or when `closing` is set. In the last two cases the session stays.

    Args:
        mqtt: the broker and the login.
        client_id: the client id of the former session.
        topic: the topic that it is subscribed to. Messages on other topics are ignored: anybody may have had
            this session.
        take: takes each message with its connection and the window that acknowledges it.
        closing: ends the reading early.
    """
    last_s = time.monotonic()

    def on_message(message: MQTTMessage) -> None:
        nonlocal last_s
        last_s = time.monotonic()
        if message.topic == topic:
            take(connection, window, message)
        else:
            window.confirm(window.add(message.mid, message.qos))

    connection = MqttConnection(
        mqtt,
        client_id=client_id,
        session_expiry_s=mqtt.session_expiry_s,
        manual_ack=True,
        on_message=on_message,
    )
    window = AckWindow(connection.ack)
    try:
        connection.open()
    except BackboneUnreachable as error:
        log.warning("the session of an earlier version is not read: %s", error)
        return
    is_done = not connection.session_present
    if not is_done:
        connection.unsubscribe(topic)
    while not is_done and not connection.lost.is_set() and not closing.wait(_FORMER_TICK_S):
        is_done = not len(window) and time.monotonic() - last_s > _QUIET_S
    connection.close(forget_session=is_done)


class InboxMessage(NamedTuple):
    """A message for the agent, as it came over MQTT. `fields` has all fields of the JSON object by name.

    `from_verified` says whether the hub authenticated the sender. Do not rely on it at a broker where other
    clients than the bridge may write to the inbox.
    """

    message_id: str
    sender: str
    from_verified: bool
    kind: str
    body: str
    fields: dict[str, Any]


def read_inbox(payload: bytes) -> InboxMessage | AgentReceipt | None:
    """Decode an MQTT payload that came on an agent's inbox topic: a message, or a receipt for a sent message.

    Any other payload, such as one that a stranger published on a broker that is not ours, gives None. It never
    raises.
    """
    try:
        fields = decode(payload)[0]
    except MalformedJsonError:
        return None
    if not isinstance(fields, dict):
        return None
    if "from" not in fields:
        return agent_receipt(fields)
    texts = [fields.get(name) for name in _TEXTS]
    verified = fields.get("from_verified")
    if type(verified) is not bool or any(type(text) is not str for text in texts):
        return None
    message_id, sender, kind, body = (str(text) for text in texts)
    return InboxMessage(message_id, sender, verified, kind, body, fields)


class _Received(NamedTuple):
    """A message that waits for its callback, and its acknowledgement on the connection that it came on.

    Its callback is not called after `ends_at`, in the seconds of `time.monotonic`.
    """

    connection: MqttConnection
    message: InboxMessage
    acknowledge: Callable[[], object]
    ends_at: float


class InboxReceiver:
    """The thread that calls an agent's callback for each message and then confirms the message. Thread-safe.

    Args:
        name: The agent's name.
        outbox: The topic to publish confirmations on.
        secret: The agent's secret, which signs them.
        receive: The callback.
        pause_s: The pause after the callback has failed, before the connection is given up.
    """

    def __init__(
        self, name: str, outbox: str, secret: str, receive: Callable[[InboxMessage], None], pause_s: float
    ) -> None:
        self._outbox, self._secret = outbox, secret
        self._receive, self._pause_s = receive, pause_s
        self._lock = threading.Lock()
        self._received: queue.SimpleQueue[_Received | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        # The messages that are to be confirmed, with their acknowledgements to the broker, and since when they
        # wait. The ids of messages that were confirmed lately.
        self._waiting: list[tuple[str, Callable[[], object]]] = []
        self._since = 0.0
        self._confirmed: OrderedDict[str, None] = OrderedDict()
        self._connection: MqttConnection | None = None
        self._thread = threading.Thread(target=self._receive_all, name=f"mqtt-inbox {name}", daemon=True)

    def start(self) -> None:
        """Start the thread, and return at once."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the callback that runs now. Waits at most 2 s."""
        self._closing.set()
        self._received.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def put(
        self,
        connection: MqttConnection,
        message: InboxMessage,
        acknowledge: Callable[[], object],
        properties: Any,
    ) -> None:
        """Add a message that has just come, with the properties of its PUBLISH packet."""
        self._received.put(_Received(connection, message, acknowledge, _ends_at(message, properties)))

    def hello(self, connection: MqttConnection) -> None:
        """Tell the backbone that the agent is connected: it publishes again what the agent did not confirm."""
        with self._lock:
            self._connection = connection
        self.confirm(connection)
        self._publish(connection, [])

    def confirm_due(self, connection: MqttConnection) -> None:
        """Publish the confirmations if they are many, or have waited for a moment."""
        with self._lock:
            is_due = len(self._waiting) >= _TOGETHER or time.monotonic() >= self._since + _LINGER_S
        if is_due:
            self.confirm(connection)

    def confirm(self, connection: MqttConnection) -> None:
        """Publish all confirmations now, unless the connection is lost: then they wait for the next one."""
        while connection.is_open:
            with self._lock:
                found, self._waiting = self._waiting[:_TOGETHER], self._waiting[_TOGETHER:]
            if not found:
                return
            self._publish(connection, [message_id for message_id, _ in found])
            # Not before: an agent that is killed in between gets the messages again in their order.
            for _, acknowledge in found:
                acknowledge()

    def _publish(self, connection: MqttConnection, message_ids: list[str]) -> None:
        connection.publish(self._outbox, canonical(confirmation(message_ids, self._secret)))

    def _receive_all(self) -> None:
        while not self._closing.is_set():
            try:
                received = self._received.get(timeout=self._wait_s())
            except queue.Empty:
                connection = self._connection
                if connection is not None and connection.is_open:
                    self.confirm(connection)
                else:
                    self._closing.wait(_TICK_S)
                continue
            if received is not None and not received.connection.lost.is_set():
                self._handle(received)  # otherwise it comes again on the next connection

    def _handle(self, received: _Received) -> None:
        message_id = received.message.message_id
        with self._lock:
            is_repeated = message_id in self._confirmed
        if not is_repeated:
            if time.monotonic() >= received.ends_at:
                received.acknowledge()
                return
            try:
                self._receive(received.message)
            except Exception:
                log.exception("a message could not be received")
                self._closing.wait(self._pause_s)
                received.connection.give_up("a message could not be received")
                return
        self._note(message_id, received.acknowledge)
        self.confirm_due(received.connection)

    def _note(self, message_id: str, acknowledge: Callable[[], object]) -> None:
        """Add a message to those that are to be confirmed."""
        with self._lock:
            self._confirmed[message_id] = None
            self._confirmed.move_to_end(message_id)
            if len(self._confirmed) > _REMEMBERED:
                self._confirmed.popitem(last=False)
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append((message_id, acknowledge))

    def _wait_s(self) -> float | None:
        """Return how long to wait for another message before the confirmations are published."""
        with self._lock:
            return max(0.0, self._since + _LINGER_S - time.monotonic()) if self._waiting else None


def _ends_at(message: InboxMessage, properties: Any) -> float:
    """Return when this copy of a message ends, in the seconds of `time.monotonic`; infinity if it does not.

    The bridge gives a copy a Message Expiry Interval in whole seconds, which ends with the message at the
    latest, but not before a second, and publishes another copy if the message goes on. So the agent's clock
    does not matter.
    """
    left_s = getattr(properties, "MessageExpiryInterval", None)
    if message.fields.get("expires_at") is None or type(left_s) is not int:
        return math.inf
    return time.monotonic() + left_s
