"""A paho client that skips a packet which it cannot decode, and stays connected.

MQTT 5 lets a client close the connection at a malformed packet (4.13). The broker would then send the same
message again on the next connection, for ever. The length in its fixed header says where a packet ends, so it
can be skipped. A PUBLISH is handed over as far as it can be read, and is acknowledged like any other message.

Only a wrong length itself ends the connection, and a CONNACK or a DISCONNECT that cannot be decoded.
"""

from __future__ import annotations

import logging
import struct
from typing import Final

from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.exception import MQTTException

log = logging.getLogger(__name__)

_CONNACK: Final = 0x20
_PUBLISH: Final = 0x30
_DISCONNECT: Final = 0xE0
_QOS_MOST: Final = 2
_UNDECODABLE: Final = (MQTTException, ValueError, LookupError, struct.error, TypeError, AttributeError)


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
