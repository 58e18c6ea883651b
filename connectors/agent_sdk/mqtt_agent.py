"""The agent's side of a mailbox over MQTT (JE-26): what it says is numbered, signed and kept until it is
confirmed; what comes for it is acknowledged after its callback has returned.

**Delivers** what it is given to send at least once, in the order of seq, the same bytes at every attempt.
**Acknowledges when** the callback has returned: who is killed before that gets the message again. The broker
keeps the session meanwhile, so nothing is missed. A message has its id in it, and may come twice.
**Loses when** something on the inbox is no message in a form that is known here: it is told in the log by the
hash of its topic and bytes, and passed over.

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
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec
import structlog
from paho.mqtt.client import Client, ConnectFlags, MQTTMessage
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions
from pydantic import SecretStr

from connectors.agent_sdk.agent_inbox import InboxMessage, read_inbox
from connectors.agent_sdk.agent_outbox import AgentOutbox, PendingWord
from connectors.mqtt_bridge.bridge_connection import AckWindow
from connectors.mqtt_link.agent_topics import inbox_topic, outbox_topic
from connectors.mqtt_link.mqtt_connection import (
    broker_name,
    connect_properties,
    cut_connection,
    dial,
    new_client,
)
from connectors.mqtt_link.receipt import AgentReceipt
from schemas.errors import BackboneUnreachable, Refused, TrunklineError, UsageError
from schemas.keys.mqtt_password import mqtt_password
from schemas.settings.settings import Settings, SettingsError
from schemas.streams.agents.mqtt_agents import AgentSaid, mqtt_user, sign_said
from schemas.wire.record import content_id
from schemas.wire.strict_json import MalformedJsonError, canonical, decode
from schemas.wire.verdicts import REJECTED
from schemas.wire.wire_body import body_fault

log = structlog.stdlib.get_logger(__name__)

_TICK_S: Final = 0.05
_END_S: Final = 2.0


class Credentials(msgspec.Struct, frozen=True):
    """What `trunkline agents mqtt NAME --out FILE` has written. The secret signs, and never goes on a wire."""

    agent_name: str
    secret: str
    prefix: str

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """From a file. Raises SettingsError for one that others can read or that is none."""
        try:
            if path.stat().st_mode & 0o077:
                raise SettingsError(f"{path} is readable by others; run: chmod 600 {path}")
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise SettingsError(f"cannot read {path}: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise SettingsError(f"{path} does not hold an agent's credentials") from None


class _Found(NamedTuple):
    """A message that waits for its turn; `taken` acknowledges it on the connection that it came on."""

    client: Client
    message: InboxMessage
    taken: Callable[[], object]


class WordRejected(Refused):
    """What was sent was settled as rejected. `receipt` has the reason; sending the same again will not help."""

    def __init__(self, receipt: AgentReceipt) -> None:
        super().__init__(f"seq {receipt.seq} was rejected: {receipt.reason or 'no reason given'}")
        self.receipt = receipt


class MqttAgent:
    """One agent, connected while it is open. `state_dir` holds its seq and what was not confirmed; `receive` is
    called for one message after the other, on a thread of its own, and may send. What it raises is logged, and
    the connection is ended: the message comes again with the next one.
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
        self._inbox, self._outbox = (
            inbox_topic(credentials.prefix, name),
            outbox_topic(credentials.prefix, name),
        )
        self._changed = threading.Condition()
        self._client: Client | None = None
        self._is_subscribed = False
        self._lost: str | None = None
        self._receipts_by_id: dict[str, AgentReceipt | None] = {}
        self._closing = threading.Event()
        self._found: queue.SimpleQueue[_Found | None] = queue.SimpleQueue()
        self._keeper = threading.Thread(target=self._keep, name=f"mqtt-agent {name}", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name=f"mqtt-inbox {name}", daemon=True)

    def __enter__(self) -> Self:
        self._connect()
        self._keeper.start()
        self._receiver.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. The broker keeps what comes meanwhile for `mqtt.session_expiry_s`."""
        self._closing.set()
        with self._changed:
            client, self._client = self._client, None
            self._changed.notify_all()
        _join(self._keeper)  # it drops what it is connecting
        if client is not None:
            client.disconnect()
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None, _END_S)
            cut_connection(client)
        self._found.put(None)
        _join(self._receiver)

    def send(
        self,
        to: str,
        kind: str,
        body: Any,
        *,
        message_id: str | None = None,
        priority: str = "normal",
        in_reply_to: str | None = None,
        thread: str | None = None,
    ) -> AgentReceipt:
        """Send one message, after those that were not confirmed yet. Returns its receipt.

        Raises UsageError for what must not be sent, WordRejected, BackboneUnreachable when no receipt came:
        then it stays in the outbox, and goes first at the next call.
        """
        optional = {"in_reply_to": in_reply_to, "thread": thread}
        said = {
            "schema_version": 1,
            "message_id": message_id or str(uuid.uuid4()),
            "to": to,
            "kind": kind,
            "body": body,
            "priority": priority,
            **{name: value for name, value in optional.items() if value is not None},
        }
        self._check({**said, "seq": 1})
        with self._open_outbox() as outbox:
            word = outbox.add(lambda seq: canonical(sign_said({**said, "seq": seq}, self._credentials.secret)))
            return self._deliver(outbox, word)

    def resend(self) -> int:
        """Send what is still in the outbox. Returns how many messages that were. Raises as `send` does."""
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

    def _check(self, said: dict[str, Any]) -> None:
        fault = body_fault(AgentSaid, said)
        try:
            wire = canonical(said)
            decode(wire)
        except (ValueError, TypeError, RecursionError) as error:
            why = str(error) if isinstance(error, MalformedJsonError) else type(error).__name__
            raise UsageError(f"not sent: not JSON that the backbone takes: {why}") from None
        limit = self._settings.limits.payload_bytes
        # The seq and the signature come yet.
        if fault is None and len(wire) + 128 > limit:
            fault = f"the message has {len(wire)} bytes; at most {limit} are taken"
        if fault is None and self._credentials.secret in wire.decode("utf-8"):
            fault = "the agent's own secret stands in the message"
        if fault is not None:
            raise UsageError(f"not sent: {fault}")

    def _deliver(self, outbox: AgentOutbox, wanted: PendingWord) -> AgentReceipt:
        found: dict[int, AgentReceipt] = {}
        for word in outbox.pending:
            receipt = found[word.seq] = self._publish(word)
            outbox.confirm(word)
        receipt = found[wanted.seq]
        if receipt.verdict == REJECTED:
            raise WordRejected(receipt)
        return receipt

    def _publish(self, word: PendingWord) -> AgentReceipt:
        """Publish the bytes until there is a receipt for them: again after each lost connection."""
        ce_id = content_id(self._outbox.encode("utf-8"), word.wire_bytes)
        deadline = time.monotonic() + self._mqtt.receipt_timeout_s
        with self._changed:
            self._receipts_by_id[ce_id] = None
        try:
            while time.monotonic() < deadline:
                client = self._connected(deadline)
                client.publish(self._outbox, word.wire_bytes, qos=1)
                receipt = self._receipt(ce_id, client, deadline)
                if receipt is not None:
                    return receipt
        finally:
            with self._changed:
                del self._receipts_by_id[ce_id]
        raise BackboneUnreachable(
            f"no receipt within {self._mqtt.receipt_timeout_s:g} s for seq {word.seq}: it stays in the outbox "
            "and is sent again, the same, with the next message; './trunkline doctor' says what is down"
        )

    def _receipt(self, ce_id: str, client: Client, deadline: float) -> AgentReceipt | None:
        """The receipt; None when the connection was lost, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._receipts_by_id[ce_id] is not None or self._client is not client,
                max(0.0, deadline - time.monotonic()),
            )
            return self._receipts_by_id[ce_id]

    def _connected(self, deadline: float) -> Client:
        with self._changed:
            self._changed.wait_for(
                lambda: self._client is not None and self._is_subscribed, max(0.0, deadline - time.monotonic())
            )
            if self._client is None or not self._is_subscribed:
                raise BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {self._lost or 'away'}")
            return self._client

    # The connection.

    def _connect(self) -> None:
        """Connect and subscribe. Raises BackboneUnreachable, SettingsError; then there is no client."""
        client = new_client(self._mqtt, mqtt_user(self._credentials.agent_name), manual_ack=True)
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_message = partial(self._on_message, AckWindow(client.ack))
        client.on_disconnect = self._on_disconnect
        with self._changed:
            if self._closing.is_set():
                raise BackboneUnreachable("the agent is closed")
            self._client, self._lost, self._is_subscribed = client, None, False
        try:
            dial(client, self._mqtt, connect_properties(self._mqtt.session_expiry_s), clean_start=False)
        except BackboneUnreachable as error:
            self._drop(client, str(error.__cause__ or error))
            raise
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_subscribed or self._lost is not None or self._closing.is_set(),
                self._mqtt.connect_timeout_s,
            )
            if self._is_subscribed and not self._closing.is_set():
                return
            why = self._lost or ("it is closed" if self._closing.is_set() else "no answer in time")
        self._drop(client, why)
        raise BackboneUnreachable(f"MQTT broker {broker_name(self._mqtt)}: {why}")

    def _drop(self, client: Client, why: str) -> None:
        self._lose(client, why)
        self._client = None
        cut_connection(client)

    def _keep(self) -> None:
        """Connect again whenever the connection is lost."""
        failures = 0
        while not self._closing.wait(_TICK_S):
            with self._changed:
                if self._client is not None and self._lost is None:
                    continue
                lost, self._client = self._client, None
                self._changed.notify_all()
            if lost is not None:
                cut_connection(lost)
            try:
                self._connect()
                failures = 0
            except (TrunklineError, SettingsError) as error:
                log.warning("agent_waits", why=str(error))
                wait_s = self._mqtt.backoff_base_s * 2 ** min(failures, 16)
                self._closing.wait(min(wait_s, self._mqtt.backoff_max_s))
                failures += 1

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, reason: ReasonCode, properties: Any
    ) -> None:
        if reason.is_failure:
            self._lose(client, f"the broker refuses the agent: {reason}")
            return
        client.subscribe(self._inbox, options=SubscribeOptions(qos=1))

    def _on_subscribe(
        self, client: Client, userdata: Any, mid: int, reasons: list[ReasonCode], properties: Any
    ) -> None:
        if reasons[0].is_failure:
            self._lose(client, f"the broker refuses the subscription: {reasons[0]}")
            return
        with self._changed:
            self._is_subscribed = True
            self._changed.notify_all()

    def _on_disconnect(
        self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Any
    ) -> None:
        self._lose(client, f"connection lost: {reason}")

    def _lose(self, client: Client, why: str) -> None:
        with self._changed:
            if self._client is None or self._client is client:
                self._lost, self._is_subscribed = why, False
                self._changed.notify_all()

    def _on_message(self, window: AckWindow, client: Client, userdata: Any, message: MQTTMessage) -> None:
        taken = partial(window.durable, window.add(message.mid, message.qos))
        found = read_inbox(bytes(message.payload))
        if isinstance(found, InboxMessage):
            self._found.put(_Found(client, found, taken))
            return
        if found is None:
            # Nobody can deal with it: not acknowledged, it would come again and hold up all that is behind it.
            ce_id = content_id(message.topic.encode(), bytes(message.payload))
            log.warning("inbox_payload_skipped", bytes=len(message.payload), content_id=ce_id)
        else:
            self._take_receipt(found)
        taken()

    def _receive_all(self) -> None:
        while (found := self._found.get()) is not None:
            if self._client is not found.client or self._lost is not None:
                continue  # it comes again on the next connection
            try:
                self._receive(found.message)
            except Exception:
                log.exception("receive_failed")
                self._closing.wait(self._mqtt.backoff_base_s)
                self._lose(found.client, "a message could not be received")
            else:
                found.taken()

    def _take_receipt(self, receipt: AgentReceipt) -> None:
        with self._changed:
            if receipt.ce_id in self._receipts_by_id:
                self._receipts_by_id[receipt.ce_id] = receipt
                self._changed.notify_all()


def _join(thread: threading.Thread) -> None:
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_END_S)
