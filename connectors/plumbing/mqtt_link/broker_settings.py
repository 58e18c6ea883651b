"""The settings of a connection to an MQTT broker: of a per-job broker (JE-13), or of the stack's own broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.job.job_registry import BrokerOverlay
from trunkline_agent.broker import LOOPBACK_NAMES

_PATHS: Final = ("ca_certs", "certfile", "keyfile")


def resolve_mqtt(
    mqtt: MqttSettings, overlay: BrokerOverlay | None, password: SecretStr | str | None = None
) -> MqttSettings:
    """Return MQTT settings with the fields of a per-job broker in place of those in `mqtt`.

    The login in `mqtt` belongs to the common broker. A broker with another host or port gets only the job's own
    user name and password. The password in `mqtt` is also left out for another user name, and when `mqtt` uses
    TLS but the job's broker does not. Otherwise anyone who may register a job could have our password sent to a
    host of his own.

    Args:
        mqtt: the settings of the common broker.
        overlay: the broker fields that the job was registered with; None: return `mqtt` unchanged.
        password: the per-job broker's password in clear text; None when the job gave none.
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
    """Return whether two settings have the same host and port. 127.0.0.1, ::1 and localhost are one host."""
    return _address(one) == _address(other)


def socket_dir(settings: Settings) -> Path:
    """Return the data folder of the stack's own Mosquitto, which has the broker's private Unix socket.

    The folder need not exist.
    """
    return settings.data_path / "mosquitto"


def _address(mqtt: MqttSettings) -> tuple[str, int]:
    host = mqtt.host.lower()
    return ("localhost" if host in LOOPBACK_NAMES else host), mqtt.port
