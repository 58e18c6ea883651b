"""One MQTT 5 connection: client, TLS, login, subscriptions, publishing and acknowledgements.

`MqttConnection` lives for one connection and never reconnects. An acknowledgement
that was meant for an earlier connection can therefore never go out on a later one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final, NamedTuple

from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from trunkline_agent.broker import BrokerAccess, broker_name
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_client import (
    BAD_LOGIN,
    KEEPALIVE_S,
    connect_properties,
    cut_connection,
    dial,
    new_client,
    topic_of,
)
from trunkline_agent.mqtt.mqtt_tls import why_no_answer

log = logging.getLogger(__name__)

# The PUBACK's reason code when no client has a matching subscription.
NO_SUBSCRIBER: Final = 0x10
# Reason codes that another attempt will not change: bad credentials, not authorized, banned, bad method.
FINAL_REASONS: Final = (0x86, 0x87, 0x8A, 0x8C)
# Get the retained messages with a new subscription, and not again with each connection.
RETAINED_ONCE: Final = SubscribeOptions.RETAIN_SEND_IF_NEW_SUB
_DISCONNECT_S: Final = 1.0


class BrokerRefused(BackboneUnreachable):
    """The broker refused the login or, if `at_login` is False, a subscription. `code`: MQTT's reason code."""

    def __init__(self, message: str, code: ReasonCode, *, at_login: bool) -> None:
        super().__init__(message)
        self.code = code
        self.at_login = at_login

    @property
    def is_bad_login(self) -> bool:
        """True if the broker does not know the user name and password."""
        return self.at_login and self.code.value in BAD_LOGIN


class Subscription(NamedTuple):
    """A topic filter to subscribe to. Without `on_refused`, a refusal by the broker ends the connection.

    With `on_refused` the connection stays, and `on_refused` is called with the broker's reason code.
    """

    topic: str
    qos: int = 1
    retain_handling: int = SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE
    retain_as_published: bool = False
    on_refused: Callable[[ReasonCode], None] | None = None

    def options(self) -> SubscribeOptions:
        """Return the QoS and how retained messages come, as paho's `SubscribeOptions`."""
        return SubscribeOptions(
            qos=self.qos, retainAsPublished=self.retain_as_published, retainHandling=self.retain_handling
        )


class MqttConnection:
    """One connection to an MQTT broker, from `open` until it is lost, closed or dropped. Thread-safe.

    It has a thread of its own, and never reconnects. The constructor raises UsageError for certificates that
    cannot be read. An exception in `on_message` ends the connection. `on_lost` may be called on any thread.

    Attributes:
        lost: a threading.Event that is set when the connection has ended or was given up.
        why: the reason why the connection has ended; empty until then.
        cut_off: whether the connection was ended by the other side or the network.
        refusal: the error if the broker refused the login or a subscription, else None.
        session_present: whether the broker still had a session for the client id.
    """

    def __init__(
        self,
        mqtt: BrokerAccess,
        subscriptions: Sequence[Subscription] = (),
        *,
        client_id: str = "",
        session_expiry_s: int | None = None,
        receive_maximum: int | None = None,
        keepalive_s: int = KEEPALIVE_S,
        will: tuple[str, bytes] | None = None,
        manual_ack: bool = False,
        on_message: Callable[[MQTTMessage], None] = lambda _message: None,
        on_unreadable: Callable[[MQTTMessage], None] | None = None,
        on_lost: Callable[[str], None] = lambda _why: None,
    ) -> None:
        """Prepare a connection; `open` makes it.

        Args:
            mqtt: the broker, the login and the timeouts.
            subscriptions: made as soon as the broker has accepted the login.
            client_id: empty: the broker chooses one.
            session_expiry_s: how long the broker keeps the session after the end; None: start a clean session
                and keep none.
            receive_maximum: how many messages may be unacknowledged; None: the protocol's maximum.
            keepalive_s: the broker ends the connection after one and a half times as long without a packet.
            will: topic and payload of the Last Will, which is retained and has QoS 1.
            manual_ack: the user calls `ack`; else a message is acknowledged when `on_message` has returned.
            on_message: takes each message, on the connection's own thread.
            on_unreadable: takes a message that is malformed, or has a topic that is not UTF-8. None: it is
                acknowledged and skipped.
            on_lost: takes the reason, once, when the connection ends.
        """
        self._mqtt = mqtt
        self._subscriptions = subscriptions
        self._clean_start = session_expiry_s is None
        self._properties = connect_properties(session_expiry_s or 0, receive_maximum)
        self._keepalive_s = keepalive_s
        self._take = on_message
        self._take_unreadable = on_unreadable or self._skip
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._answers: dict[int, Future[ReasonCode]] = {}
        self._accepted = False
        self._answered = threading.Event()
        self._disconnected = threading.Event()
        self._closing = False
        self.refusal: BrokerRefused | None = None
        self.lost = threading.Event()
        self.why = ""
        self.cut_off = False
        self.session_present = False
        self._client = new_client(mqtt, client_id, manual_ack=manual_ack)
        if will is not None:
            self._client.will_set(*will, qos=1, retain=True)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.on_publish = self._on_publish
        self._client.on_disconnect = self._on_disconnect

    def open(self) -> None:
        """Connect, log in and subscribe. Block until the broker has accepted all of it. Call it once.

        Raises BrokerRefused when the broker refuses the login or a subscription without `on_refused`. Raises
        BackboneUnreachable when the connection fails or takes longer than `mqtt.connect_timeout_s`.
        """
        try:
            dial(
                self._client,
                self._mqtt,
                self._properties,
                clean_start=self._clean_start,
                keepalive_s=self._keepalive_s,
            )
        except BackboneUnreachable as error:
            self.give_up(str(error.__cause__ or error))
            raise
        if not self._answered.wait(self._mqtt.connect_timeout_s):
            self.give_up(f"no {'SUBACK' if self._accepted else 'CONNACK'} in time")
        if self.lost.is_set():
            self.drop()
            raise self.refusal or self.unreachable(self.why)

    @property
    def is_open(self) -> bool:
        """True if the broker has accepted the login and the subscriptions, and the connection is not lost."""
        return self._answered.is_set() and not self.lost.is_set()

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False, expiry_s: int | None = None
    ) -> Future[ReasonCode]:
        """Publish without waiting, and return a future of the reason code in the broker's PUBACK.

        With QoS 0 the future completes when the message is sent. It fails with BackboneUnreachable when the
        connection is lost before; the broker may have the message even so. The broker drops the message after
        `expiry_s` seconds, also a retained one; None: never.
        """
        properties = None
        if expiry_s is not None:
            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            properties.MessageExpiryInterval = expiry_s
        answer = self._answer(self._client.publish(topic, payload, qos, retain, properties).mid)
        if self.lost.is_set():
            self._fail_answers()
        return answer

    def publish_and_wait(
        self, topic: str, payload: bytes, *, retain: bool = False, expiry_s: int | None = None
    ) -> ReasonCode:
        """Publish with QoS 1, wait for the PUBACK, and return its reason code, which may be a failure.

        Raises BackboneUnreachable when the connection is lost or no PUBACK comes within
        `mqtt.puback_timeout_s`. The connection is then given up, and the broker may have the message even so.
        """
        return self.wait_answer(self.publish(topic, payload, retain=retain, expiry_s=expiry_s))

    def wait_answer(self, answer: Future[ReasonCode]) -> ReasonCode:
        """Wait for the PUBACK to a call of `publish`. Returns and raises as `publish_and_wait`."""
        try:
            return answer.result(self._mqtt.puback_timeout_s)
        except TimeoutError:
            self.give_up("no PUBACK in time")
            raise self.unreachable("no PUBACK in time") from None

    def ack(self, mid: int, qos: int) -> None:
        """Acknowledge the message with the packet id `mid`. Only for a connection with `manual_ack`."""
        self._client.ack(mid, qos)

    def unsubscribe(self, topic: str) -> None:
        """End the subscription to `topic`, without waiting. Messages that the broker has queued still come."""
        self._client.unsubscribe(topic)

    def give_up(self, why: str) -> None:
        """Mark the connection as lost and call `on_lost` with `why`. `close` or `drop` then ends the socket."""
        self._closing = True
        self._lose(why)

    def close(self, *, forget_session: bool = False) -> None:
        """Disconnect in about 1 s, without a Last Will. `forget_session`: the broker deletes the session."""
        self._closing = True
        properties = None
        if forget_session:
            properties = Properties(PacketTypes.DISCONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = 0
        if self._client.disconnect(properties=properties) is MQTTErrorCode.MQTT_ERR_SUCCESS:
            self._disconnected.wait(_DISCONNECT_S)
        self.drop()

    def drop(self) -> None:
        """Cut the connection without DISCONNECT. The broker publishes the Last Will and keeps the session."""
        self.give_up("closed")
        cut_connection(self._client)

    def unreachable(self, why: str) -> BackboneUnreachable:
        """Return an error, for the caller to raise, with the broker's address and the reason `why`."""
        return BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost.is_set():
                return
            self.why = why
            self.lost.set()
        self._answered.set()
        self._fail_answers()
        self._on_lost(why)

    def _refuse(self, what: str, reason: ReasonCode, *, at_login: bool) -> None:
        why = f"the broker refuses {what}: {reason}"
        name = broker_name(self._mqtt)
        self.refusal = BrokerRefused(f"MQTT broker {name}: {why}", reason, at_login=at_login)
        self.give_up(why)

    def _answer(self, mid: int) -> Future[ReasonCode]:
        # The PUBACK may be handled before `publish` has returned: the first of the two makes the entry, the
        # second one removes it.
        with self._lock:
            known = self._answers.pop(mid, None)
            return self._answers.setdefault(mid, Future()) if known is None else known

    def _fail_answers(self) -> None:
        with self._lock:
            left, self._answers = list(self._answers.values()), {}
        for answer in left:
            with suppress(InvalidStateError):
                answer.set_exception(self.unreachable(self.why))

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        if reason.is_failure:
            self._refuse("the connection", reason, at_login=True)
            return
        self._accepted = True
        self.session_present = flags.session_present
        if self._subscriptions:
            client.subscribe([(wanted.topic, wanted.options()) for wanted in self._subscriptions])
        else:
            self._answered.set()

    def _on_subscribe(
        self, client: Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        for wanted, reason in zip(self._subscriptions, reasons, strict=False):
            if not reason.is_failure:
                continue
            if wanted.on_refused is None:
                self._refuse("the subscription", reason, at_login=False)
                return
            wanted.on_refused(reason)
        self._answered.set()

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        # An exception here would end paho's thread and leave a connection that reads nothing.
        try:
            if topic_of(message) is None:
                self._take_unreadable(message)
            else:
                self._take(message)
        except Exception as error:
            log.exception("a received message failed")  # without its topic, which may be what cannot be read
            self.give_up(f"a message could not be taken: {type(error).__name__}")

    def _skip(self, message: MQTTMessage) -> None:
        log.warning("skipped a message of %d bytes that cannot be read", len(message.payload))
        self._client.ack(message.mid, message.qos)  # does nothing without `manual_ack`

    def _on_publish(self, client: Client, userdata: Any, mid: int, reason: ReasonCode, properties: Any) -> None:
        with suppress(InvalidStateError):
            self._answer(mid).set_result(reason)

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        # Reason 0x8E would say that another client has taken the session over, but a client that is just
        # writing does not read it.
        self.cut_off = self.cut_off or not self._closing
        self._disconnected.set()
        self._lose(f"connection lost: {reason}{'' if self._accepted else why_no_answer(self._mqtt)}")


def backoff_s(mqtt: BrokerAccess, failures: int) -> float:
    """Return the pause before the next attempt to connect, in seconds: `mqtt.backoff_base_s` for 0 failures.

    It doubles with each failure, up to `mqtt.backoff_max_s`. `failures` does not count the last failure.
    """
    return float(min(mqtt.backoff_base_s * 2 ** min(failures, 16), mqtt.backoff_max_s))
