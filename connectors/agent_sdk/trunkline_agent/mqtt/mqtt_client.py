"""The paho client of one MQTT 5 connection: TLS, login, the connection attempt and its end."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, cast

from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from trunkline_agent.broker import BrokerAccess, broker_name, clear_password, private_socket, socket_name
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mqtt.mqtt_tls import explained, mqtt_context
from trunkline_agent.mqtt.tolerant_client import TolerantClient
from trunkline_agent.unix_address import address_of

KEEPALIVE_S: Final = 60
# Reason codes of MQTT 5: bad user name or password, not authorized.
BAD_LOGIN: Final = (0x86, 0x87)
# paho waits with select(), which cannot handle higher descriptors.
_DESCRIPTORS: Final = 1024


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
