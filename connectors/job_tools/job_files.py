"""The secrets and the own brokers (JE-13) of jobs that were registered or picked on this machine.

Each is in a 0600 file. `watch` verifies with the secrets and `publish` signs with them; they are used for
nothing else. After a rotation, `<id>.former` holds the former secret and the time at which it expires.

`<id>.broker` holds the broker that the job was registered with, with its password. It also has the job's id, so
that a file of another job is ignored.
"""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import SecretStr, ValidationError

from connectors.mqtt_link.broker_settings import resolve_mqtt
from schemas.errors import TrunklineError, UsageError
from schemas.keys.private_files import replace_file
from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.job.job_registry import BrokerOverlay
from schemas.wire.ids import is_job_id

_FOLDER: Final = "job-secrets"
_PRIVATE: Final = 0o077
_WHAT: Final = "the job's secret"
_BROKER: Final = "the job's broker"
_PASSWORD: Final = "password"  # noqa: S105  a field's name


class KeptSecrets(NamedTuple):
    """A job's secret, and the former one, which is valid until `former_ends_at` (seconds since 1970)."""

    secret: str
    former: str | None = None
    former_ends_at: float = 0.0


def secret_path(settings: Settings, job_id: str) -> Path:
    """Return the file of a job's secret on this machine. Raises UsageError for an invalid job id."""
    if not is_job_id(job_id):
        raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
    return settings.data_path / _FOLDER / job_id


def find_secret(settings: Settings, job_id: str) -> str | None:
    """Return the stored secret of a job, None when this machine has none.

    Raises UsageError for a file that others can read, TrunklineError for one that cannot be read.
    """
    found = read_private(secret_path(settings, job_id), _WHAT)
    return None if found is None else found.strip() or None


def stored_jobs(settings: Settings) -> list[str]:
    """Return the jobs whose secrets this machine has, sorted."""
    try:
        return sorted(p.name for p in (settings.data_path / _FOLDER).iterdir() if is_job_id(p.name))
    except FileNotFoundError:
        return []


def store_secret(settings: Settings, job_id: str, secret: str) -> Path:
    """Store a job's secret and return its file. Raises TrunklineError."""
    path = secret_path(settings, job_id)
    replace_private(path, secret + "\n", _WHAT)
    return path


def store_rotated(settings: Settings, job_id: str, secret: str, former_ends_at: float) -> Path:
    """Store a job's new secret, keep the current one as the former one, and return the file of the new one.

    `former_ends_at` is in seconds since 1970. Raises as `find_secret` and `store_secret`.
    """
    former = find_secret(settings, job_id)
    # When the same rotation is stored again, the current secret is the new one already.
    if former not in (None, secret):
        replace_private(_former_path(settings, job_id), f"{former_ends_at} {former}\n", _WHAT)
    return store_secret(settings, job_id, secret)


def kept_secrets(settings: Settings, job_id: str) -> KeptSecrets | None:
    """Return the stored secrets of a job that are valid now, None when this machine has none.

    Raises as `find_secret`, and TrunklineError for a file with other content.
    """
    secret, path = find_secret(settings, job_id), _former_path(settings, job_id)
    if secret is None:
        return None
    ends_at, _, former = (read_private(path, _WHAT) or "0 ").strip().partition(" ")
    try:
        is_good = former not in ("", secret) and float(ends_at) > time.time()
    except ValueError:
        raise TrunklineError(f"{path} does not hold {_WHAT}; remove it") from None
    return KeptSecrets(secret, former, float(ends_at)) if is_good else KeptSecrets(secret)


def _former_path(settings: Settings, job_id: str) -> Path:
    path = secret_path(settings, job_id)
    return path.with_name(f"{path.name}.former")


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
    replace_private(broker_file(secret_file), text + "\n", _BROKER)


def find_broker(secret_file: Path, job_id: str) -> JobBroker | None:
    """Return the broker stored next to the secret, None when this job's broker is unknown.

    Raises UsageError for a file that others can read, TrunklineError for one that cannot be read.
    """
    path = broker_file(secret_file)
    text = read_private(path, _BROKER)
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
        raise TrunklineError(f"{path} does not hold {_BROKER}; pick or register the job again") from None


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


def read_private(path: Path, what: str) -> str | None:
    """Return the text of a private file, None when there is none.

    Raises UsageError for a file that others can read, and TrunklineError, which names `what`, for an unreadable
    one.
    """
    try:
        if stat.S_IMODE(path.stat().st_mode) & _PRIVATE:
            raise UsageError(f"{path} is readable by others; run: chmod 600 {path}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TrunklineError(f"cannot read {what} in {path}: {type(error).__name__}") from None


def replace_private(path: Path, text: str, what: str) -> None:
    """Replace a private file in one step; it is on disk when this returns.

    Raises TrunklineError, which names `what`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, text.encode("utf-8"))
    except OSError as error:
        raise TrunklineError(f"cannot keep {what} in {path}: {error.strerror}") from None
