"""The paho client of one MQTT 5 connection: its attempt, its end, refusals (LM-10), packets that it skips.

`try_login` checks whether a broker accepts a user, without a thread: it is quick enough to be made after every
change of the accounts of the local stack's own broker. `well_formed_traceparent` reads a message's W3C trace
context.
"""

from __future__ import annotations

import logging
import re
import select
import socket
import struct
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from typing import Final, cast

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.exception import MQTTException
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from trunkline_agent.broker import (
    BrokerAccess,
    as_broker,
    broker_name,
    clear_password,
    private_socket,
    socket_name,
)
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_tls import explained, mqtt_context
from trunkline_agent.sockets import address_of

KEEPALIVE_S: Final = 60
# Reason codes of MQTT 5: bad user name or password, not authorized.
BAD_LOGIN: Final = (0x86, 0x87)
# paho waits with select(), which cannot handle higher descriptors.
_DESCRIPTORS: Final = 1024
log = logging.getLogger(__name__)

_CONNACK: Final = 0x20
_PUBLISH: Final = 0x30
_DISCONNECT: Final = 0xE0
_QOS_MOST: Final = 2
_UNDECODABLE: Final = (MQTTException, ValueError, LookupError, struct.error, TypeError, AttributeError)
NOT_AUTHORIZED: Final = 0x87
"""The reason code of a PUBACK when the account is paused, or has no right to the topic."""
PUBLISH_AGAIN_S: Final = 2.0
"""The time after which a refused message is published again, in seconds."""
PUBLISH_REFUSED: Final = (
    "the broker refuses what this account publishes. It pauses an account after far too many messages in a "
    "minute; otherwise the account has no right to this topic"
)
"""The text of the error when the broker refuses a message until the deadline."""
_WAIT_TICK_S: Final = 0.05
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def new_client(mqtt: BrokerAccess, client_id: str = "", *, manual_ack: bool = False) -> Client:
    """Return a paho client for one connection, with TLS and login set, not connected yet.

    An empty `client_id` lets the broker choose. Raises UsageError for certificates that cannot be read.
    """
    private = private_socket(mqtt)
    client = TolerantClient(
        CallbackAPIVersion.VERSION2,
        transport="tcp" if private is None else "unix",
        client_id=client_id,
        protocol=MQTTv5,
        reconnect_on_failure=False,
        manual_ack=manual_ack,
    )
    client.connect_timeout = mqtt.connect_timeout_s
    if mqtt.username is not None:
        client.username_pw_set(mqtt.username, clear_password(mqtt))
    if private is None and (context := mqtt_context(mqtt)) is not None:
        client.tls_set_context(context)
    return client


def connect_properties(session_expiry_s: int = 0, receive_maximum: int | None = None) -> Properties:
    """Return CONNECT properties: session expiry in seconds, most unacknowledged messages (None: 65,535)."""
    found = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    found.SessionExpiryInterval = session_expiry_s
    if receive_maximum is not None:
        found.ReceiveMaximum = receive_maximum
    return found


def dial(
    client: Client,
    mqtt: BrokerAccess,
    properties: Properties,
    *,
    clean_start: bool = True,
    keepalive_s: int = KEEPALIVE_S,
    start_thread: bool = True,
) -> None:
    """Connect a paho client to the broker and start the client's thread.

    Blocks at most `mqtt.connect_timeout_s`. The broker's answer to the login comes later, to the client's
    `on_connect`. Without `start_thread` the caller has to call the client's `loop_read`. The broker ends the
    connection after one and a half times `keepalive_s` without a packet. Raises BackboneUnreachable when no
    broker accepts the connection, or when the process has too many files open.
    """
    try:
        with _address(client, mqtt) as host:
            client.connect(
                host, mqtt.port, keepalive=keepalive_s, clean_start=clean_start, properties=properties
            )
    except (OSError, ValueError) as error:  # ValueError: not a valid host name
        raise BackboneUnreachable(f"MQTT broker {broker_name(mqtt)}: {explained(error, mqtt)}") from error
    if not start_thread:
        return
    try:
        got = _highest_descriptor(client)
        if got < _DESCRIPTORS:
            client.loop_start()
            return
        why = f"the MQTT client gets descriptor {got}, and cannot wait for any above {_DESCRIPTORS - 1}"
    except OSError as error:
        why = str(error)
    cut_connection(client)
    raise BackboneUnreachable(
        f"MQTT broker {broker_name(mqtt)}: this program has too many files and connections open: {why}"
    )


def _address(client: Client, mqtt: BrokerAccess) -> AbstractContextManager[str]:
    """Return the address to connect to: a host, or the path of the broker's private socket."""
    if client.transport != "unix" or mqtt.socket_dir is None:
        return nullcontext(mqtt.host)
    return address_of(mqtt.socket_dir / socket_name(mqtt.port))


def _highest_descriptor(client: Client) -> int:
    """Return the highest file descriptor that the client's thread will wait for. Raises OSError.

    It is that of the connection, or that of the socket that wakes the thread. paho opens the latter when the
    thread starts.
    """
    connected = client.socket()
    listening, woken = socket.socketpair()
    with listening, woken:
        return max(woken.fileno(), -1 if connected is None else connected.fileno())


def cut_connection(client: Client) -> None:
    """Cut a paho client's connection, even a hanging one, without DISCONNECT, and stop the client's thread."""
    connected = client.socket()
    if connected is not None:
        with suppress(OSError):
            cast(socket.socket, connected).shutdown(socket.SHUT_RDWR)
    client.loop_stop()


class MalformedMessage(MQTTMessage):
    """A PUBLISH that cannot be decoded. Its payload has the bytes behind topic and packet id, or all bytes."""


class TolerantClient(Client):
    """A paho client whose `on_message` also gets a `MalformedMessage`. It logs each kind of packet once."""

    _skipped: frozenset[int] = frozenset()
    _is_answered = False

    def _packet_handle(self) -> MQTTErrorCode:
        command = self._in_packet["command"]
        kind, why = command & 0xF0, "protocol error"
        try:
            if kind == _PUBLISH and command >> 1 & 3 > _QOS_MOST:
                raise ValueError("QoS 3")
            if kind == _CONNACK and self._is_answered:
                raise ValueError("a second CONNACK")
            result = super()._packet_handle()
            if result is not MQTTErrorCode.MQTT_ERR_PROTOCOL:
                self._is_answered = self._is_answered or kind == _CONNACK
                return result
        except _UNDECODABLE as error:
            why = f"{type(error).__name__}: {error}"
        # Without their content it is not known whether the connection goes on.
        if kind == _DISCONNECT or not self._is_answered:
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        if kind not in self._skipped:
            self._skipped |= {kind}
            log.warning("a packet of type %d that cannot be read is skipped: %s", kind >> 4, ascii(why)[:200])
        return self._hand_over(command) if kind == _PUBLISH else MQTTErrorCode.MQTT_ERR_SUCCESS

    def _hand_over(self, command: int) -> MQTTErrorCode:
        message = salvaged(command, bytes(self._in_packet["packet"]))
        self._handle_on_message(message)
        if message.qos and not self._manual_ack:
            return self._send_puback(message.mid)
        return MQTTErrorCode.MQTT_ERR_SUCCESS


def salvaged(command: int, packet: bytes) -> MalformedMessage:
    """Return what can be read of a malformed PUBLISH, from its first byte and the bytes behind its length.

    Without a packet id it has QoS 0, because it cannot be acknowledged. QoS 2 becomes QoS 1: our subscriptions
    ask for no more.
    """
    size, qos, mid, topic, rest = int.from_bytes(packet[:2], "big"), command >> 1 & 3, 0, b"", packet
    if len(packet) >= 2 + size:
        topic, rest = packet[2 : 2 + size], packet[2 + size :]
        if qos and len(rest) >= 2:
            mid, rest = int.from_bytes(rest[:2], "big"), rest[2:]
    message = MalformedMessage(mid, topic)
    message.dup, message.retain = bool(command & 8), bool(command & 1)
    message.qos, message.payload = int(bool(mid)), rest
    return message


def topic_of(message: MQTTMessage) -> str | None:
    """Return the topic of a received message; None if the message is malformed, or its topic is not UTF-8."""
    if isinstance(message, MalformedMessage):
        return None
    try:
        return message.topic
    except UnicodeDecodeError:
        return None


def topic_bytes_of(message: MQTTMessage) -> bytes:
    """Return the bytes of a received message's topic, which need not be UTF-8."""
    return bytes(message._topic)


def refusal_of(puback: Future[ReasonCode]) -> ReasonCode | None:
    """Return the reason for which the broker has refused a message, None if it has not (yet).

    `puback` is the result of `MqttConnection.publish`. Does not block.
    """
    if not puback.done() or puback.exception() is not None:
        return None
    return puback.result() if puback.result().is_failure else None


class LoginAnswer(Enum):
    """The broker's answer to a login: `LET_IN`, `REFUSED` (wrong user or password), or `SILENT`.

    `SILENT` means no clear answer: no broker runs, it is not trusted, it does not answer in time, or it has no
    room for another connection.
    """

    LET_IN = "let in"
    REFUSED = "refused"
    SILENT = "silent"


def try_login(
    mqtt: BrokerAccess, username: str | None = None, password: str | None = None, timeout_s: float = 1.0
) -> LoginAnswer:
    """Log in at the broker once, disconnect, and return the broker's answer to the login.

    Args:
        mqtt: the broker and its TLS files.
        username: the user to log in as; None: without a login.
        password: the user's password; None: without a password.
        timeout_s: how many seconds to wait for the answer.

    Raises:
        UsageError: certificates cannot be read. It raises nothing else.
    """
    user = as_broker(mqtt, username=username, password=password, connect_timeout_s=timeout_s)
    client, answers, deadline = new_client(user), list[ReasonCode](), time.monotonic() + timeout_s
    client.on_connect = lambda _client, _data, _flags, reason, _properties: answers.append(reason)
    try:
        dial(client, user, connect_properties(), start_thread=False)
        poll = select.poll()  # unlike paho's select(), it handles any file descriptor
        while not answers and (connected := client.socket()) is not None and time.monotonic() < deadline:
            poll.register(connected, select.POLLIN)
            poll.poll(1000 * _WAIT_TICK_S)
            client.loop_read()
        client.disconnect()
    except (BackboneUnreachable, OSError):
        return LoginAnswer.SILENT
    finally:
        cut_connection(client)
    if answers and not answers[0].is_failure:
        return LoginAnswer.LET_IN
    return LoginAnswer.REFUSED if answers and answers[0].value in BAD_LOGIN else LoginAnswer.SILENT


def wait_for_login(mqtt: BrokerAccess, timeout_s: float) -> None:
    """Wait until the broker accepts the user name and password in `mqtt`. Tries again every 50 ms.

    A publisher calls it for a job that was just registered, whose account the gateway may still be making.
    Raises BackboneUnreachable after about `timeout_s` seconds, and UsageError for certificates that cannot
    be read.
    """
    password = clear_password(mqtt)
    deadline = time.monotonic() + timeout_s
    while (answer := try_login(mqtt, mqtt.username, password)) is not LoginAnswer.LET_IN:
        if time.monotonic() > deadline:
            why = "does not answer" if answer is LoginAnswer.SILENT else f"has no account {mqtt.username!r}"
            raise BackboneUnreachable(
                f"MQTT broker {broker_name(mqtt)} {why} after {timeout_s:g} s. The gateway makes a job's "
                "account: './trunkline doctor' shows whether the gateway runs"
            )
        time.sleep(_WAIT_TICK_S)


def well_formed_traceparent(properties: object) -> str | None:
    """Return the W3C trace context (`traceparent`) among the user properties of an MQTT 5 message.

    `properties` is the attribute of that name of paho's message. Returns None when there is no trace context,
    more than one, or an invalid one.
    """
    pairs = getattr(properties, "UserProperty", None) or ()
    found = [value for name, value in pairs if name == "traceparent"]
    if len(found) != 1 or _TRACEPARENT.fullmatch(found[0]) is None:
        return None
    return str(found[0])
