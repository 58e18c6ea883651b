"""A job's own broker (JE-13) as this machine keeps it: beside the job's secret, in a 0600 file of its own.

It holds what was granted to the picker, or asked for at the registration: the overlay with its password. The
job's id stands in it, so that a file that was left by another job says nothing.
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
    """What a job says of its broker. `overlay` None: nothing, it uses that of the settings."""

    overlay: BrokerOverlay | None
    password: SecretStr | None = None

    def resolve(self, mqtt: MqttSettings) -> MqttSettings:
        """`mqtt` with what the job says over it."""
        return resolve_mqtt(mqtt, self.overlay, self.password)


def broker_file(secret_file: Path) -> Path:
    """Where a job's broker is kept when its secret is in `secret_file`."""
    return secret_file.with_name(f"{secret_file.name}.broker")


def store_broker(secret_file: Path, job_id: str, broker: Mapping[str, Any] | None) -> Path:
    """Keep the broker beside the secret; on disk when this returns. Returns the file. Raises TrunklineError."""
    path = broker_file(secret_file)
    replace_private(path, json.dumps({"job_id": job_id, "broker": named_fields(broker)}) + "\n", _WHAT)
    return path


def find_broker(secret_file: Path, job_id: str) -> JobBroker | None:
    """What is kept beside the secret, None where nothing is known of this job's broker.

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
        # Without the text of the error: it may quote what stands in the file.
        raise TrunklineError(f"{path} does not hold {_WHAT}; pick or register the job again") from None


def with_job_broker(settings: Settings, job_id: str, secret_file: Path | None = None) -> Settings:
    """`settings` with the broker of this job: the one kept beside `secret_file`, else beside the secret that
    this machine keeps, else that of the settings. Raises as `find_broker`, and UsageError for no job id.
    """
    kept = secret_path(settings, job_id)
    for file in (kept,) if secret_file is None else (secret_file, kept):
        broker = find_broker(file, job_id)
        if broker is not None:
            return settings.model_copy(update={"mqtt": broker.resolve(settings.mqtt)})
    return settings


def named_fields(broker: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields that an overlay names; none for a job without a broker of its own."""
    return {name: value for name, value in (broker or {}).items() if value is not None}


def shown_fields(broker: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same without the password: what may be printed."""
    return {name: value for name, value in named_fields(broker).items() if name != _PASSWORD}
