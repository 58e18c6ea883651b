"""The settings of a connection to an MQTT broker: of a per-job broker, or of our programs' login (JE-13).

The first of these logins that exists is used:

- `mqtt.username` and `mqtt.password` of the settings,
- for a job's publisher, the job's own account: its id, and a password derived from its secret,
- for another program of ours, the account of its role, from the local stack's 0600 file
  `data_dir/keys/mqtt.json`,
- no login.

The roles' passwords are only for the local stack's broker. They are therefore sent to loopback only, and over
TLS only if `mqtt.ca_certs` names the trusted authority.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from schemas.settings.settings import MqttSettings, Settings, SettingsError
from schemas.streams.job.job_registry import BrokerOverlay
from trunkline_agent.broker import LOOPBACK_NAMES
from trunkline_agent.private_files import PrivateFileError, make_first, read_private

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


OPERATOR: Final = "operator"
BRIDGE: Final = "bridge"
DELEGATOR: Final = "delegator"
ROLES: Final = (OPERATOR, BRIDGE, DELEGATOR)

_PASSWORD_BYTES: Final = 32


def role_mqtt(settings: Settings, role: str) -> MqttSettings:
    """Return the MQTT settings with the login of a program in the role `role` (one of `ROLES`).

    The program then connects through the broker's private Unix socket, if there is one. The settings are
    returned unchanged if they have a user name, if the broker is not on this machine, or if there is no file of
    role passwords. The same applies to TLS without `mqtt.ca_certs`, because the broker may then be another
    machine's.

    Raises SettingsError when others can read the file of role passwords, or when its content is wrong.
    """
    mqtt = settings.mqtt
    if mqtt.username is not None or mqtt.host not in LOOPBACK_NAMES:
        return mqtt
    # With TLS the broker on loopback may be a tunnel to another machine, unless our own authority signed it.
    if mqtt.tls and mqtt.ca_certs is None:
        return mqtt
    passwords = load_role_passwords(settings)
    if passwords is None:
        return mqtt
    login = {"username": role, "password": passwords[role], "socket_dir": socket_dir(settings)}
    return mqtt.model_copy(update=login)


def role_file(settings: Settings) -> Path:
    """Return the path of the file with the roles' MQTT passwords. The file need not exist."""
    return settings.data_path / "keys" / "mqtt.json"


def load_role_passwords(settings: Settings) -> dict[str, SecretStr] | None:
    """Read the MQTT passwords from the file of role passwords and return them by role.

    Returns None when there is no file. Raises SettingsError when others can read the file, or when it does not
    contain a password for each role.
    """
    path = role_file(settings)
    try:
        found = json.loads(read_private(path))
        return {role: SecretStr(_text(found[role])) for role in ROLES}
    except PrivateFileError as error:
        raise SettingsError(str(error)) from None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SettingsError(
            f"{path} does not hold the MQTT passwords: remove it, trunkline up makes a new one"
        ) from None


def ensure_role_passwords(settings: Settings) -> dict[str, SecretStr]:
    """Return the MQTT passwords by role.

    When there is no file of role passwords, write one with random ones first. Raises SettingsError when others
    can read the file, or when it does not contain a password for each role. Raises OSError when it cannot be
    written.
    """
    path = role_file(settings)
    if not path.exists():
        make_first(path, json.dumps({role: secrets.token_hex(_PASSWORD_BYTES) for role in ROLES}))
    found = load_role_passwords(settings)
    if found is None:
        raise SettingsError(f"{path} was removed while it was made")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("a password is text")
    return value
