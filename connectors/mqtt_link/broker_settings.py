"""The broker of a connection: a job's own broker over the settings (JE-13), and the private socket to our own.

The number of connections on the port of the stack's own Mosquitto is limited, and strangers can use it up. The
broker therefore also listens on a Unix socket in a folder that only our own user may enter. The bridge, the
gateway and the operator connect through it, so they always get in.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.job.job_registry import BrokerOverlay

LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_PATHS: Final = ("ca_certs", "certfile", "keyfile")


def resolve_mqtt(
    mqtt: MqttSettings, overlay: BrokerOverlay | None, password: SecretStr | str | None = None
) -> MqttSettings:
    """Return `mqtt` with each field that a job's own broker names; `password` is that broker's, unsealed.

    User and password of `mqtt` belong to its broker. Another broker gets only what the job gives, even for a
    user of the same name. The same broker does not get our password for another user, or in clear where the
    settings use TLS. Otherwise anyone who may register a job could have our password sent to a host of his own.
    """
    if overlay is None:
        return mqtt
    named = overlay.model_dump(exclude_none=True, exclude={"sealed_password"})
    fields = ("host", "port", "tls", "username", *_PATHS)
    changes: dict[str, Any] = {
        name: Path(named[name]) if name in _PATHS else named[name] for name in fields if name in named
    }
    resolved = mqtt.model_copy(update=changes)
    at_ours = same_broker(mqtt, resolved)
    if "username" not in named and not at_ours:
        changes["username"] = None
    if password is not None:
        changes["password"] = SecretStr(password) if isinstance(password, str) else password
    elif not at_ours or resolved.username != mqtt.username or (mqtt.tls and not resolved.tls):
        changes["password"] = None
    return mqtt.model_copy(update=changes)


def same_broker(one: MqttSettings, other: MqttSettings) -> bool:
    """Return whether both name the same broker, by host and port. All names of loopback are one host."""
    return _address(one) == _address(other)


def broker_name(mqtt: MqttSettings) -> str:
    """Return the broker's name for messages: host and port, nothing secret."""
    return f"{mqtt.host}:{mqtt.port}"


def socket_dir(settings: Settings) -> Path:
    """Return the folder of the stack's own Mosquitto, which has its socket."""
    return settings.data_path / "mosquitto"


def socket_name(port: int) -> str:
    """Return the name of the socket of the broker on this port. Another broker on loopback has another name."""
    return f"{port}.sock"


def private_socket(mqtt: MqttSettings) -> Path | None:
    """Return the private socket of this broker.

    None when the broker is not the stack's own, does not run, or belongs to another user.
    """
    if mqtt.socket_dir is None or mqtt.host.lower() not in LOOPBACK_NAMES:
        return None
    path = mqtt.socket_dir / socket_name(mqtt.port)
    return path if os.access(path, os.W_OK) else None


def _address(mqtt: MqttSettings) -> tuple[str, int]:
    host = mqtt.host.lower()
    return ("localhost" if host in LOOPBACK_NAMES else host), mqtt.port
