"""An MQTT 5 client from the settings: what every MQTT connection of ours has in common.

A client made here lives for one connection. It never reconnects by itself, so an acknowledgement that was
meant for an earlier connection can never go out on a later one: it belongs to a client that is gone.
"""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, cast

from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from connectors.mqtt_link.mqtt_socket import private_socket, socket_name
from connectors.mqtt_link.mqtt_tls import explained, mqtt_context
from connectors.unix_socket.claimed_socket import address_of
from schemas.errors import BackboneUnreachable
from schemas.settings.settings import MqttSettings

KEEPALIVE_S: Final = 60
# The client waits by select, which knows no descriptors beyond.
_DESCRIPTORS: Final = 1024


def new_client(mqtt: MqttSettings, client_id: str = "", *, manual_ack: bool = False) -> Client:
    """A paho client for one connection, with TLS and credentials set, not connected yet.

    An empty `client_id` lets the broker choose. Raises SettingsError for certificates that cannot be read.
    """
    private = private_socket(mqtt)
    client = Client(
        CallbackAPIVersion.VERSION2,
        transport="tcp" if private is None else "unix",
        client_id=client_id,
        protocol=MQTTv5,
        reconnect_on_failure=False,
        manual_ack=manual_ack,
    )
    client.connect_timeout = mqtt.connect_timeout_s
    if mqtt.username is not None:
        client.username_pw_set(mqtt.username, mqtt.password.get_secret_value() if mqtt.password else None)
    if private is None and (context := mqtt_context(mqtt)) is not None:
        client.tls_set_context(context)
    return client


def connect_properties(session_expiry_s: int = 0, receive_maximum: int | None = None) -> Properties:
    """CONNECT properties: how long the broker keeps the session, how many messages may be unacknowledged."""
    found = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    found.SessionExpiryInterval = session_expiry_s
    if receive_maximum is not None:
        found.ReceiveMaximum = receive_maximum
    return found


def dial(
    client: Client,
    mqtt: MqttSettings,
    properties: Properties,
    *,
    clean_start: bool = True,
    keepalive_s: int = KEEPALIVE_S,
) -> None:
    """Connect and start the client's thread; the broker's answer comes to `on_connect`.

    The broker gives a client up after one and a half times `keepalive_s` of silence. Raises
    BackboneUnreachable when nobody takes the connection, and when the process has too many files open for it.
    """
    try:
        with _address(client, mqtt) as host:
            client.connect(
                host, mqtt.port, keepalive=keepalive_s, clean_start=clean_start, properties=properties
            )
    except (OSError, ValueError) as error:  # ValueError: what cannot be a host's name
        raise BackboneUnreachable(f"MQTT broker {broker_name(mqtt)}: {explained(error, mqtt)}") from error
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


def _address(client: Client, mqtt: MqttSettings) -> AbstractContextManager[str]:
    """Return the address to connect to: a host, or the path of the broker's private socket."""
    if client.transport != "unix" or mqtt.socket_dir is None:
        return nullcontext(mqtt.host)
    return address_of(mqtt.socket_dir / socket_name(mqtt.port))


def _highest_descriptor(client: Client) -> int:
    """The highest that the client's thread will wait for: the connection's own, or that of the socket by which
    it is woken, which the client opens when the thread starts, as the second of three. Raises OSError.
    """
    connected = client.socket()
    listening, woken = socket.socketpair()
    with listening, woken:
        return max(woken.fileno(), -1 if connected is None else connected.fileno())


def cut_connection(client: Client) -> None:
    """End a client's connection at once, also one that hangs, without a word to the broker, and its thread."""
    connected = client.socket()
    if connected is not None:
        with suppress(OSError):
            cast(socket.socket, connected).shutdown(socket.SHUT_RDWR)
    client.loop_stop()


def broker_name(mqtt: MqttSettings) -> str:
    """The broker as it stands in messages: host and port, nothing secret."""
    return f"{mqtt.host}:{mqtt.port}"
