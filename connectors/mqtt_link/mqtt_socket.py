"""The private way to the stack's own Mosquitto: a Unix socket in its folder, which only our own user may enter.

The number of connections on the port is bounded, and strangers can use it up. Only programs of this user reach
the socket, so the bridge, the gateway and the operator always get in.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from connectors.unix_socket.claimed_socket import address_of
from schemas.settings.settings import MqttSettings, Settings

LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})


def socket_dir(settings: Settings) -> Path:
    """The folder of the stack's own Mosquitto, with its socket."""
    return settings.data_path / "mosquitto"


def socket_name(port: int) -> str:
    """The name of the socket of the broker on this port. Another broker on loopback has another, or none."""
    return f"{port}.sock"


def private_socket(mqtt: MqttSettings) -> Path | None:
    """The socket of this broker; None when it is not the stack's own, or does not run, or is another user's."""
    if mqtt.socket_dir is None or mqtt.host.lower() not in LOOPBACK_NAMES:
        return None
    path = mqtt.socket_dir / socket_name(mqtt.port)
    return path if os.access(path, os.W_OK) else None


def connect_to(path: Path, timeout_s: float) -> socket.socket:
    """A connection to a Unix socket. Raises OSError."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout_s)
        with address_of(path) as address:
            found.connect(address)
    except BaseException:
        found.close()
        raise
    return found
