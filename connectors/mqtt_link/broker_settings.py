"""The broker of one job: the settings of the environment, and over them what the job itself says (JE-13)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import SecretStr

from connectors.mqtt_link.mqtt_socket import LOOPBACK_NAMES
from schemas.settings.settings import MqttSettings
from schemas.streams.job.job_registry import BrokerOverlay

_PLAIN = ("host", "port", "tls", "username")
_PATHS = ("ca_certs", "certfile", "keyfile")


def resolve_mqtt(
    mqtt: MqttSettings, overlay: BrokerOverlay | None, password: SecretStr | str | None = None
) -> MqttSettings:
    """`mqtt` with each field that `overlay` names; `password` is the overlay's, opened.

    User and password of `mqtt` belong to its broker: another broker, also with a user of that name, gets only
    what the overlay gives. The same broker does not get our password under another user's name, or in clear
    where we use TLS. Else whoever may register a job could have our password sent to a host of his own.
    """
    if overlay is None:
        return mqtt
    said = overlay.model_dump(exclude_none=True, exclude={"sealed_password"})
    changes: dict[str, Any] = {name: said[name] for name in _PLAIN if name in said}
    changes |= {name: Path(said[name]) for name in _PATHS if name in said}
    resolved = mqtt.model_copy(update=changes)
    at_ours = same_broker(mqtt, resolved)
    if "username" not in said and not at_ours:
        changes["username"] = None
    if password is not None:
        changes["password"] = SecretStr(password) if isinstance(password, str) else password
    elif not at_ours or resolved.username != mqtt.username or (mqtt.tls and not resolved.tls):
        changes["password"] = None
    return mqtt.model_copy(update=changes)


def same_broker(one: MqttSettings, other: MqttSettings) -> bool:
    """Whether both name the same broker, by host and port, whoever asks. All names of loopback are one."""
    return _address(one) == _address(other)


def _address(mqtt: MqttSettings) -> tuple[str, int]:
    host = mqtt.host.lower()
    return ("localhost" if host in LOOPBACK_NAMES else host), mqtt.port
