"""The client of an agent with a mailbox over MQTT (JE-26).

**Delivers** each sent message at least once, in the order of seq, with the same bytes at every attempt. It
numbers and signs messages, and keeps them on disk until they are confirmed.
**Acknowledges** a received message when its callback has returned. A client that is killed before that gets the
message again. The broker keeps the session meanwhile, so nothing is missed. A message contains its id, because
it may come twice.
**Loses** a payload on the inbox that is no message in a known form. The client logs the hash of its topic and
bytes, and goes on.

    credentials = Credentials.load(Path("builder.json"))
    with MqttAgent(settings, credentials, Path("state"), lambda message: print(message.body)) as agent:
        agent.send("planner", "ask", "what is next?")
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
import structlog
from paho.mqtt.client import MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode
from pydantic import SecretStr

from connectors.agent_mqtt.inbox_message import InboxMessage, read_inbox
from connectors.agent_mqtt.outbox import AgentOutbox, OutboxMessage, content_fault
from connectors.mqtt_link.ack_window import AckWindow
from connectors.mqtt_link.mqtt_connection import MqttConnection, Subscription, backoff_s
from connectors.mqtt_link.publish_refusal import PUBLISH_AGAIN_S, PUBLISH_REFUSED, refusal_of
from connectors.mqtt_link.receipt import AgentReceipt
from connectors.mqtt_link.topics import inbox_topic, outbox_topic
from schemas.keys.mqtt_password import mqtt_password
from schemas.settings.settings import Settings, SettingsError
from schemas.streams.agents.mqtt_agents import AgentSaid, mqtt_user, sign_said
from schemas.wire.wire_body import body_fault
from trunkline_agent.errors import BackboneUnreachable, Refused, TrunklineError, UsageError
from trunkline_agent.wire.content_id import content_id
from trunkline_agent.wire.strict_json import canonical
from trunkline_agent.wire.verdicts import REJECTED

log = structlog.stdlib.get_logger(__name__)

_TICK_S: Final = 0.05
_END_S: Final = 2.0
# The seq and the signature, which a message gets after its size was checked.
_SIGNATURE_BYTES: Final = 128


class Credentials(msgspec.Struct, frozen=True):
    """The name, the secret and the MQTT topic prefix of an agent.

    `trunkline agents mqtt NAME --out FILE` writes them to a file. The secret never leaves this process.
    """

    agent_name: str
    secret: str
    prefix: str

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """Read the credentials from a file.

        Raises SettingsError if the file is missing, invalid or readable by others.
        """
        try:
            if path.stat().st_mode & 0o077:
                raise SettingsError(f"{path} is readable by others; run: chmod 600 {path}")
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise SettingsError(f"cannot read {path}: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise SettingsError(f"{path} does not hold an agent's credentials") from None


class MessageRejected(Refused):
    """Trunkline rejected a sent message, for the reason in `receipt`.

    After `receipt.retry_after_s` seconds it may be sent again. If that is None, sending it again will not help.
    """

    def __init__(self, receipt: AgentReceipt) -> None:
        super().__init__(f"seq {receipt.seq} was rejected: {receipt.reason or 'no reason given'}")
        self.receipt = receipt


class _Received(NamedTuple):
    """A message that waits for its callback, and its acknowledgement on the connection that it came on."""

    connection: MqttConnection
    message: InboxMessage
    acknowledge: Callable[[], object]


class MqttAgent:
    """An agent's connection to its mailbox over MQTT, which sends and receives messages and reconnects.

    Use it as a context manager. Entering connects, and raises BackboneUnreachable if the broker does not answer
    or refuses the login. Leaving closes the connection.

    Args:
        settings: The settings of the broker and of limits.
        credentials: The agent's name and secret.
        state_dir: The folder with the agent's last seq and its unconfirmed messages.
        receive: Called with one message after the other, on a thread of its own; it may send. If it raises,
            that is logged, and the message comes again with the next connection.
    """

    def __init__(
        self,
        settings: Settings,
        credentials: Credentials,
        state_dir: Path,
        receive: Callable[[InboxMessage], None],
    ) -> None:
        name, user = credentials.agent_name, mqtt_user(credentials.agent_name)
        password = SecretStr(mqtt_password(credentials.secret, user))
        own = {} if settings.mqtt.username is not None else {"username": user, "password": password}
        self._settings, self._mqtt = settings, settings.mqtt.model_copy(update=own)
        self._credentials = credentials
        self._state_dir = state_dir
        self._receive = receive
        self._inbox = inbox_topic(credentials.prefix, name)
        self._outbox = outbox_topic(credentials.prefix, name)
        self._changed = threading.Condition()
        self._connection: MqttConnection | None = None
        self._receipts_by_id: dict[str, AgentReceipt | None] = {}
        self._closing = threading.Event()
        self._received: queue.SimpleQueue[_Received | None] = queue.SimpleQueue()
        self._reconnector = threading.Thread(target=self._reconnect, name=f"mqtt-agent {name}", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name=f"mqtt-inbox {name}", daemon=True)

    def __enter__(self) -> Self:
        self._connect()
        self._reconnector.start()
        self._receiver.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and the threads.

        The broker keeps messages that come later for `mqtt.session_expiry_s` seconds, for the next connection.
        """
        with self._changed:
            self._closing.set()
            connection = self._connection
        if connection is not None:
            connection.close()
        _join(self._reconnector)
        self._received.put(None)
        _join(self._receiver)

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
        in_reply_to: str | None = None,
        thread: str | None = None,
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
            in_reply_to: The id of the message that this one answers, or None.
            thread: The id of the conversation, or None.

        Raises:
            UsageError: the message is invalid; nothing was sent.
            MessageRejected: Trunkline rejected the message.
            BackboneUnreachable: no receipt came, or the broker lets this agent publish nothing now, for
                instance after far too many messages in a minute. The message stays in the outbox and is sent
                first at the next call.
            OutboxBusyError: another process is sending for this agent.
        """
        optional = {
            "in_reply_to": in_reply_to,
            "thread": thread,
            "expires_in_s": expires_in_s,
            "deliver_after_s": deliver_after_s,
        }
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
        secret = self._credentials.secret
        with self._open_outbox() as outbox:
            added = outbox.add(lambda seq: canonical(sign_said({**message, "seq": seq}, secret)))
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
            self._credentials.agent_name,
            self._credentials.secret,
            self._mqtt.receipt_timeout_s + self._mqtt.connect_timeout_s + _END_S,
        )

    def _check(self, message: dict[str, Any]) -> None:
        fault = content_fault(message, self._credentials.secret) or body_fault(AgentSaid, message)
        limit = self._settings.limits.payload_bytes
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
            raise MessageRejected(receipt)
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
        raise BackboneUnreachable(
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
            raise connection.unreachable(connection.why or "not connected")
        return connection

    # The connection.

    def _connect(self) -> None:
        """Connect and subscribe. Raises BackboneUnreachable, SettingsError."""
        connection = MqttConnection(
            self._mqtt,
            [Subscription(self._inbox)],
            client_id=mqtt_user(self._credentials.agent_name),
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
                    continue
                self._connection.drop()
            try:
                self._connect()
                failures = 0
            except (TrunklineError, SettingsError) as error:
                log.warning("agent_waits", why=str(error))
                self._closing.wait(backoff_s(self._mqtt, failures))
                failures += 1

    def _on_message(self, connection: MqttConnection, window: AckWindow, message: MQTTMessage) -> None:
        acknowledge = partial(window.confirm, window.add(message.mid, message.qos))
        found = read_inbox(bytes(message.payload))
        if isinstance(found, InboxMessage):
            self._received.put(_Received(connection, found, acknowledge))
            return
        if found is None:
            # Without an acknowledgement it would come again and delay all messages behind it.
            ce_id = content_id(message.topic.encode(), bytes(message.payload))
            log.warning("inbox_payload_skipped", bytes=len(message.payload), content_id=ce_id)
        else:
            with self._changed:
                if found.ce_id in self._receipts_by_id:
                    self._receipts_by_id[found.ce_id] = found
                    self._changed.notify_all()
        acknowledge()

    def _receive_all(self) -> None:
        while (received := self._received.get()) is not None:
            if received.connection.lost.is_set():
                continue  # it comes again on the next connection
            try:
                self._receive(received.message)
            except Exception:
                log.exception("receive_failed")
                self._closing.wait(self._mqtt.backoff_base_s)
                received.connection.give_up("a message could not be received")
            else:
                received.acknowledge()


def _join(thread: threading.Thread) -> None:
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_END_S)
