"""Would the MQTT broker let this user in? One CONNECT over a socket, without a client library.

Quick enough to ask after every change of the accounts; meant for the local stack's own broker.
"""

from __future__ import annotations

import socket
import time
from enum import Enum

from connectors.mqtt_link.mqtt_socket import connect_to, private_socket
from connectors.mqtt_link.mqtt_tls import mqtt_context
from schemas.errors import BackboneUnreachable
from schemas.settings.settings import MqttSettings

# MQTT 3.1.1: its CONNACK has one byte for all that we ask.
_HEAD = b"\x00\x04MQTT\x04"
_CLEAN, _WITH_USER, _WITH_PASSWORD = 0x02, 0x80, 0x40
_KEEPALIVE_S = 5
_CONNECT, _CONNACK, _DISCONNECT = 0x10, 0x20, b"\xe0\x00"
_WAIT_TICK_S = 0.05
_ACCEPTED, _BAD_LOGIN, _NOT_AUTHORISED = 0, 4, 5


class LoginAnswer(Enum):
    """What the broker said. `SILENT`: nobody there, or no answer of a broker that has room."""

    LET_IN = "let in"
    REFUSED = "refused"
    SILENT = "silent"


def try_login(
    mqtt: MqttSettings, username: str | None = None, password: str | None = None, timeout_s: float = 1.0
) -> LoginAnswer:
    """Connect as this user (None: as nobody), note the answer, disconnect. A broker that is not trusted is
    silent. Raises nothing but SettingsError for certificates that cannot be read.
    """
    try:
        with (
            _connected(mqtt, timeout_s) as connection,
            connection.makefile("rb") as received,
        ):
            connection.sendall(_connect_packet(username, password))
            answer = received.read(4)
            if len(answer) < 4 or answer[0] != _CONNACK:
                return LoginAnswer.SILENT
            if answer[3] == _ACCEPTED:
                connection.sendall(_DISCONNECT)
                return LoginAnswer.LET_IN
            refused = answer[3] in (_BAD_LOGIN, _NOT_AUTHORISED)
            return LoginAnswer.REFUSED if refused else LoginAnswer.SILENT
    except OSError:
        return LoginAnswer.SILENT


def wait_for_login(mqtt: MqttSettings, timeout_s: float) -> None:
    """Wait until the broker lets the user of these settings in, such as a job that was just registered.

    Raises BackboneUnreachable after `timeout_s` seconds.
    """
    password = None if mqtt.password is None else mqtt.password.get_secret_value()
    deadline = time.monotonic() + timeout_s
    while (answer := try_login(mqtt, mqtt.username, password)) is not LoginAnswer.LET_IN:
        if time.monotonic() > deadline:
            why = "does not answer" if answer is LoginAnswer.SILENT else f"has no account {mqtt.username!r}"
            raise BackboneUnreachable(
                f"MQTT broker {mqtt.host}:{mqtt.port} {why} after {timeout_s:g} s; the gateway makes a job's "
                "account: './trunkline doctor' says whether it runs"
            )
        time.sleep(_WAIT_TICK_S)


def _connected(mqtt: MqttSettings, timeout_s: float) -> socket.socket:
    if (private := private_socket(mqtt)) is not None:
        return connect_to(private, timeout_s)
    plain = socket.create_connection((mqtt.host, mqtt.port), timeout=timeout_s)
    context = mqtt_context(mqtt)
    if context is None:
        return plain
    try:
        return context.wrap_socket(plain, server_hostname=mqtt.host)
    except BaseException:
        plain.close()
        raise


def _connect_packet(username: str | None, password: str | None) -> bytes:
    flags = _CLEAN
    fields = _text("")
    if username is not None:
        flags |= _WITH_USER
        fields += _text(username)
        if password is not None:
            flags |= _WITH_PASSWORD
            fields += _text(password)
    body = _HEAD + bytes([flags]) + _KEEPALIVE_S.to_bytes(2, "big") + fields
    return bytes([_CONNECT]) + _length(len(body)) + body


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return len(raw).to_bytes(2, "big") + raw


def _length(size: int) -> bytes:
    found = bytearray()
    while True:
        size, digit = divmod(size, 128)
        found.append(digit | (0x80 if size else 0))
        if not size:
            return bytes(found)
