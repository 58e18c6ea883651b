"""The client of an agent with a mailbox over MQTT (JE-26).

**Delivers** each sent message at least once, in the order of seq, with the same bytes at every attempt. It
numbers and signs messages, and keeps them on disk until they are confirmed.
**Confirms** a received message when its callback has returned. Until then the message is unread in the log: a
client that is killed before gets it again, also from a broker that has lost its session. A message contains its
id, because it may come twice. This client drops repetitions of what it has confirmed, and expired messages.
**Loses** a payload on the inbox that is no message in a known form. The client logs the hash of its topic and
bytes, and goes on.

    credentials = Credentials.load("builder.json")
    with MqttAgent(credentials, "state", lambda message: print(message.body)) as agent:
        agent.send("planner", "ask", "what is next?")
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from paho.mqtt.client import MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode

from trunkline_agent.broker import BrokerAccess, agent_broker, broker_name, mqtt_broker
from trunkline_agent.credentials import Credentials
from trunkline_agent.errors import (
    BackboneUnreachable,
    MessageRejected,
    ReceiptMissing,
    Refused,
    TrunklineError,
    UsageError,
)
from trunkline_agent.mqtt.ack_window import AckWindow
from trunkline_agent.mqtt.inbox_receiver import InboxMessage, InboxReceiver, read_former_session, read_inbox
from trunkline_agent.mqtt.mqtt_client import PUBLISH_AGAIN_S, PUBLISH_REFUSED, refusal_of
from trunkline_agent.mqtt.mqtt_connection import BrokerRefused, MqttConnection, Subscription, backoff_s
from trunkline_agent.outbox.outbox import AgentOutbox, OutboxMessage, content_fault
from trunkline_agent.wire.agent_message import message_fault, mqtt_user, sign_said
from trunkline_agent.wire.ids import content_id, is_name
from trunkline_agent.wire.message_fields import unknown_field
from trunkline_agent.wire.mqtt_password import mqtt_client_id
from trunkline_agent.wire.receipt import AgentReceipt
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.topics import inbox_topic, outbox_topic
from trunkline_agent.wire.verdicts import REJECTED

log = logging.getLogger(__name__)

_TICK_S: Final = 0.05
_END_S: Final = 2.0
# The seq and the signature, which a message gets after its size was checked.
_SIGNATURE_BYTES: Final = 128
_PAYLOAD_BYTES: Final = 1024 * 1024
_PATIENCE_S: Final = 10.0


class MqttAgent:
    """An agent's connection to its mailbox over MQTT, which sends and receives messages and reconnects.

    Use it as a context manager. Entering connects. It raises BackboneUnreachable if the broker does not answer,
    and Refused if the broker does not accept the agent's secret. Leaving closes the connection.

    Args:
        credentials: The agent's name and its access over MQTT. The secret never leaves this process.
        state_dir: The folder with the agent's last seq and its unconfirmed messages.
        receive: Called with one message after the other, on a thread of its own; it may send. If it raises,
            that is logged, and the message comes again with the next connection.
        broker: Another broker than that of the credentials, or other times. A login in it goes first.
        patience_s: How long entering waits while the broker does not accept the secret. (The gateway makes the
            account some time after the registration.)
        payload_bytes: The largest message that the backbone takes, in bytes.
    """

    def __init__(
        self,
        credentials: Credentials,
        state_dir: str | os.PathLike[str],
        receive: Callable[[InboxMessage], None],
        *,
        broker: BrokerAccess | None = None,
        patience_s: float = _PATIENCE_S,
        payload_bytes: int = _PAYLOAD_BYTES,
    ) -> None:
        access, name = credentials.mqtt_access(), credentials.name
        if not is_name(name):
            raise UsageError(f"the credentials have no agent's name: {name!r}")
        self._name, self._secret = name, access.secret
        own = mqtt_broker(access, credentials.ca_certs) if broker is None else broker
        self._mqtt = agent_broker(own, name, access.secret)
        self._patience_s, self._payload_bytes = patience_s, payload_bytes
        self._state_dir = Path(state_dir)
        self._inbox = inbox_topic(access.prefix, name)
        self._outbox = outbox_topic(access.prefix, name)
        self._receiver = InboxReceiver(name, self._outbox, access.secret, receive, self._mqtt.backoff_base_s)
        self._changed = threading.Condition()
        self._connection: MqttConnection | None = None
        self._receipts_by_id: dict[str, AgentReceipt | None] = {}
        self._closing = threading.Event()
        self._reconnector = threading.Thread(target=self._reconnect, name=f"mqtt-agent {name}", daemon=True)

    def __enter__(self) -> Self:
        self._connect_patiently()
        self._reconnector.start()
        self._receiver.start()
        user, take = mqtt_user(self._name), self._on_message
        former = (self._mqtt, user, self._inbox, take, self._closing)
        threading.Thread(
            target=read_former_session, args=former, name=f"mqtt-former {user}", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and the threads, after the callback of one message has returned, within 2 s.

        Messages that come later wait in the log for the next connection.
        """
        with self._changed:
            self._closing.set()
            connection = self._connection
        self._receiver.close()
        if connection is not None:
            self._receiver.confirm(connection)
            connection.close()
        if self._reconnector.is_alive() and self._reconnector is not threading.current_thread():
            self._reconnector.join(_END_S)

    def send(
        self,
        to: str,
        kind: str,
        body: Any,
        *,
        message_id: str | None = None,
        priority: str = "normal",
        expires_in_s: float | None = None,
        deliver_after_s: float | None = None,
        **fields: str | None,
    ) -> AgentReceipt:
        """Send a message, after earlier ones without a receipt, and wait for its receipt, which is returned.

        It waits at most `mqtt.receipt_timeout_s` for each message.

        Args:
            to: The recipient's name.
            kind: The type of the message, such as `ask`.
            body: Any JSON value.
            message_id: The message's id; None makes a new one.
            priority: `low`, `normal` or `high`, which is handed out first.
            expires_in_s: The time from its posting until the message expires, or None for never.
            deliver_after_s: The time from its posting until the recipient gets it, or None for at once.
            fields: Any of `MESSAGE_FIELDS`, such as `in_reply_to` and `thread`, or None.

        Raises:
            UsageError: the message is invalid; nothing was sent.
            MessageRejected: Trunkline rejected the message.
            BackboneUnreachable: no receipt came, or the broker lets this agent publish nothing now, for
                instance after far too many messages in a minute. The message stays in the outbox and is sent
                first at the next call.
            OutboxBusy: another process is sending for this agent.
        """
        if error := unknown_field(fields):
            raise error
        optional = {**fields, "expires_in_s": expires_in_s, "deliver_after_s": deliver_after_s}
        message = {
            "schema_version": 1,
            "message_id": message_id or str(uuid.uuid4()),
            "to": to,
            "kind": kind,
            "body": body,
            "priority": priority,
            **{name: value for name, value in optional.items() if value is not None},
        }
        self._check({**message, "seq": 1})
        with self._open_outbox() as outbox:
            added = outbox.add(lambda seq: canonical(sign_said({**message, "seq": seq}, self._secret)))
            return self._deliver(outbox, added)

    def resend(self) -> int:
        """Send all messages that have no receipt yet, and return how many they were; 0 if there were none.

        Raises BackboneUnreachable if a receipt is missing, and MessageRejected if the newest message was
        rejected.
        """
        with self._open_outbox() as outbox:
            count = len(outbox.pending)
            if count:
                self._deliver(outbox, outbox.pending[-1])
            return count

    def _open_outbox(self) -> AgentOutbox:
        return AgentOutbox(
            self._state_dir,
            self._name,
            self._secret,
            self._mqtt.receipt_timeout_s + self._mqtt.connect_timeout_s + _END_S,
        )

    def _check(self, message: dict[str, Any]) -> None:
        fault = content_fault(message, self._secret) or message_fault(message)
        limit = self._payload_bytes
        if fault is None and (size := len(canonical(message)) + _SIGNATURE_BYTES) > limit:
            fault = f"the message has {size} bytes; at most {limit} are taken"
        if fault is not None:
            raise UsageError(f"not sent: {fault}")

    def _deliver(self, outbox: AgentOutbox, wanted: OutboxMessage) -> AgentReceipt:
        receipts: dict[int, AgentReceipt] = {}
        for message in outbox.pending:
            receipts[message.seq] = self._publish(message)
            outbox.confirm(message)
        receipt = receipts[wanted.seq]
        if receipt.verdict == REJECTED:
            why = receipt.reason or "no reason given"
            raise MessageRejected(
                f"seq {receipt.seq} was rejected: {why}", receipt=receipt, reason=receipt.reason
            )
        return receipt

    def _publish(self, message: OutboxMessage) -> AgentReceipt:
        """Publish the bytes until there is a receipt for them: again after a lost connection or a refusal."""
        ce_id = content_id(self._outbox.encode("utf-8"), message.wire_bytes)
        deadline = time.monotonic() + self._mqtt.receipt_timeout_s
        self._receipts_by_id[ce_id] = None
        refusal: ReasonCode | None = None
        try:
            while time.monotonic() < deadline:
                connection = self._connected(deadline)
                puback = connection.publish(self._outbox, message.wire_bytes)
                puback.add_done_callback(lambda _: self._notify())
                receipt = self._wait_receipt(ce_id, connection, deadline, puback)
                if receipt is not None:
                    return receipt
                refusal = refusal_of(puback)
                if refusal is not None:
                    self._closing.wait(max(0.0, min(PUBLISH_AGAIN_S, deadline - time.monotonic())))
        finally:
            with self._changed:
                del self._receipts_by_id[ce_id]
        if refusal is not None:
            raise connection.unreachable(f"{PUBLISH_REFUSED}: {refusal}. seq {message.seq} stays in the outbox")
        raise ReceiptMissing(
            f"no receipt within {self._mqtt.receipt_timeout_s:g} s for seq {message.seq}. It stays in the "
            "outbox and is sent again, unchanged, with the next message; './trunkline doctor' shows"
            " what is down"
        )

    def _wait_receipt(
        self, ce_id: str, connection: MqttConnection, deadline: float, puback: Future[ReasonCode]
    ) -> AgentReceipt | None:
        """Return the receipt. None: the connection was lost, the broker refused, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._receipts_by_id[ce_id] is not None
                    or connection.lost.is_set()
                    or refusal_of(puback) is not None
                ),
                max(0.0, deadline - time.monotonic()),
            )
            return self._receipts_by_id[ce_id]

    def _connected(self, deadline: float) -> MqttConnection:
        with self._changed:
            self._changed.wait_for(
                lambda: self._connection is not None and self._connection.is_open,
                max(0.0, deadline - time.monotonic()),
            )
            connection = self._connection
        if connection is None:
            raise BackboneUnreachable("the agent is closed")
        if not connection.is_open:
            if (refusal := connection.refusal) is not None and refusal.is_bad_login:
                raise self._refused(refusal)
            raise connection.unreachable(connection.why or "not connected")
        return connection

    def _connect_patiently(self) -> None:
        """Connect and subscribe. Try again for a while if the broker does not know the account."""
        deadline, failures = time.monotonic() + self._patience_s, 0
        while True:
            try:
                self._connect()
            except BrokerRefused as error:
                if not error.is_bad_login:
                    raise
                pause_s = backoff_s(self._mqtt, failures)
                if time.monotonic() + pause_s > deadline:
                    raise self._refused(error) from None
                self._closing.wait(pause_s)
                failures += 1
            else:
                return

    def _refused(self, error: BrokerRefused) -> Refused:
        return Refused(
            f"MQTT broker {broker_name(self._mqtt)} does not let user {self._mqtt.username!r} in: "
            f"{error.code}. The secret of {self._name} is wrong or was replaced: "
            f"'./trunkline agents join {self._name} --credentials FILE' writes new credentials"
        )

    def _connect(self) -> None:
        """Connect and subscribe. Raises BackboneUnreachable, UsageError."""
        connection = MqttConnection(
            self._mqtt,
            [Subscription(self._inbox)],
            client_id=mqtt_client_id(self._secret, mqtt_user(self._name)),
            session_expiry_s=self._mqtt.session_expiry_s,
            manual_ack=True,
            on_message=lambda message: self._on_message(connection, window, message),
            on_lost=lambda _why: self._notify(),
        )
        window = AckWindow(connection.ack)
        with self._changed:
            if self._closing.is_set():
                raise BackboneUnreachable("the agent is closed")
            self._connection = connection
        connection.open()
        self._receiver.hello(connection)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _reconnect(self) -> None:
        """Connect again whenever the connection is lost."""
        failures = 0
        while not self._closing.wait(_TICK_S):
            if self._connection is not None:
                if not self._connection.lost.is_set():
                    self._receiver.confirm_due(self._connection)
                    continue
                self._connection.drop()
            try:
                self._connect()
                failures = 0
            except TrunklineError as error:
                log.warning("agent %s is not connected and tries again: %s", self._name, error)
                self._closing.wait(backoff_s(self._mqtt, failures))
                failures += 1

    def _on_message(self, connection: MqttConnection, window: AckWindow, message: MQTTMessage) -> None:
        acknowledge = partial(window.confirm, window.add(message.mid, message.qos))
        found = read_inbox(bytes(message.payload))
        if isinstance(found, InboxMessage):
            self._receiver.put(connection, found, acknowledge, message.properties)
            return
        if found is None:
            # Without an acknowledgement it would come again and delay all messages behind it.
            ce_id = content_id(message.topic.encode(), bytes(message.payload))
            size = len(message.payload)
            log.warning("skipped an inbox payload of %d bytes with the content id %s", size, ce_id)
        else:
            with self._changed:
                if found.ce_id in self._receipts_by_id:
                    self._receipts_by_id[found.ce_id] = found
                    self._changed.notify_all()
        acknowledge()
