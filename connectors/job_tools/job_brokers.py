"""The file that keeps a job's own broker (JE-13) on this machine, mode 0600, next to the job's secret.

It has the broker that the job was registered with, and its password. It also has the job's id, so that a file
of another job is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import SecretStr, ValidationError

from connectors.job_tools.job_secrets import read_private, replace_private, secret_path
from connectors.mqtt_link.broker_settings import resolve_mqtt
from schemas.errors import TrunklineError
from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.job.job_registry import BrokerOverlay

_WHAT: Final = "the job's broker"
_PASSWORD: Final = "password"  # noqa: S105  a field's name


class JobBroker(NamedTuple):
    """The broker of a job, with its unsealed password. `overlay` None: the broker of the settings."""

    overlay: BrokerOverlay | None
    password: SecretStr | None = None

    def resolve(self, mqtt: MqttSettings) -> MqttSettings:
        """Return `mqtt` with the fields that the job names."""
        return resolve_mqtt(mqtt, self.overlay, self.password)


def broker_file(secret_file: Path) -> Path:
    """Return the file of a job's broker when its secret is in `secret_file`."""
    return secret_file.with_name(f"{secret_file.name}.broker")


def store_broker(secret_file: Path, job_id: str, broker: Mapping[str, Any] | None) -> None:
    """Store the broker next to the secret. Raises TrunklineError."""
    text = json.dumps({"job_id": job_id, "broker": named_fields(broker)})
    replace_private(broker_file(secret_file), text + "\n", _WHAT)


def find_broker(secret_file: Path, job_id: str) -> JobBroker | None:
    """Return the broker stored next to the secret, None when this job's broker is unknown.

    Raises UsageError for a file that others can read, TrunklineError for one that cannot be read.
    """
    path = broker_file(secret_file)
    text = read_private(path, _WHAT)
    if text is None:
        return None
    try:
        found = json.loads(text)
        if found["job_id"] != job_id:
            return None
        said = dict(found["broker"])
        password = said.pop(_PASSWORD, None)
        overlay = BrokerOverlay.model_validate(said) if said or password else None
        return JobBroker(overlay, None if password is None else SecretStr(password))
    except (ValidationError, ValueError, KeyError, TypeError):
        # Without the text of the error: it may quote the password.
        raise TrunklineError(f"{path} does not hold {_WHAT}; pick or register the job again") from None


def with_job_broker(settings: Settings, job_id: str, secret_file: Path | None = None) -> Settings:
    """Return `settings` with the broker of this job.

    The broker is the one stored next to `secret_file`, else next to the secret that this machine keeps, else
    that of the settings. Raises what `find_broker` raises, and UsageError for an invalid job id.
    """
    kept = secret_path(settings, job_id)
    for file in (kept,) if secret_file is None else (secret_file, kept):
        broker = find_broker(file, job_id)
        if broker is not None:
            return settings.model_copy(update={"mqtt": broker.resolve(settings.mqtt)})
    return settings


def named_fields(broker: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields that a job's broker names, none for a job without a broker of its own."""
    return {name: value for name, value in (broker or {}).items() if value is not None}


def shown_fields(broker: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the same fields without the password, for printing."""
    return {name: value for name, value in named_fields(broker).items() if name != _PASSWORD}
