"""Files with the secrets and the brokers (JE-13) of jobs that were registered or picked on this machine.

Each file has mode 0600 and is in `data_dir/job-secrets`. `watch` verifies with the secrets and `publish` signs
with them; they are used for nothing else. After a rotation, `<id>.former` holds the former secret and the time
at which it expires.

`<id>.broker` holds the broker that the job was registered with, with its password. It also has the job's id, so
that a file of another job is ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import SecretStr, ValidationError

from connectors.plumbing.mqtt_link.broker_settings import resolve_mqtt
from schemas.settings.settings import MqttSettings, Settings
from schemas.streams.job.job_registry import BrokerOverlay
from trunkline_agent.errors import TrunklineError, UsageError
from trunkline_agent.private_files import read_private as read_secret
from trunkline_agent.private_files import replace_file
from trunkline_agent.wire.ids import is_job_id

_FOLDER: Final = "job-secrets"
_WHAT: Final = "the job's secret"
_BROKER: Final = "the job's broker"
_PASSWORD: Final = "password"  # noqa: S105  a field's name


class KeptSecrets(NamedTuple):
    """The secrets of a job that are valid now: the present one, and the former one during a rotation's overlap.

    `former` is None when no former secret is valid. It expires at `former_ends_at`, in seconds since 1970.
    """

    secret: str
    former: str | None = None
    former_ends_at: float = 0.0


def secret_path(settings: Settings, job_id: str) -> Path:
    """Return the path of the file for a job's secret on this machine. The file need not exist.

    Raises UsageError for an invalid job id.
    """
    if not is_job_id(job_id):
        raise UsageError(f"not a job id (8 lower-case hex digits): {job_id!r}")
    return settings.data_path / _FOLDER / job_id


def find_secret(settings: Settings, job_id: str) -> str | None:
    """Read a job's secret from its file on this machine and return it, None when the file is missing or empty.

    Raises UsageError for an invalid job id and for a file that others can read. Raises TrunklineError for a
    file that cannot be read.
    """
    found = read_private(secret_path(settings, job_id), _WHAT)
    return None if found is None else found.strip() or None


def stored_jobs(settings: Settings) -> list[str]:
    """Return the ids of the jobs whose secrets are stored on this machine, sorted.

    Empty when there are none.
    """
    try:
        return sorted(p.name for p in (settings.data_path / _FOLDER).iterdir() if is_job_id(p.name))
    except FileNotFoundError:
        return []


def store_secret(settings: Settings, job_id: str, secret: str) -> Path:
    """Write a job's secret to its file on this machine, replacing a previous one, and return the file's path.

    Raises UsageError for an invalid job id, and TrunklineError when the file cannot be written.
    """
    path = secret_path(settings, job_id)
    replace_private(path, secret + "\n", _WHAT)
    return path


def store_rotated(settings: Settings, job_id: str, secret: str, former_ends_at: float) -> Path:
    """Write a job's new secret to its file, and the previous secret to another file. Return the first path.

    Call it after a rotation. `secret` is the new secret. `former_ends_at` is when the previous one expires, in
    seconds since 1970. Storing the same new secret again changes nothing.

    Raises UsageError for an invalid job id and for a file that others can read. Raises TrunklineError when a
    file cannot be read or written.
    """
    former = find_secret(settings, job_id)
    # When the same rotation is stored again, the current secret is the new one already.
    if former not in (None, secret):
        replace_private(_former_path(settings, job_id), f"{former_ends_at} {former}\n", _WHAT)
    return store_secret(settings, job_id, secret)


def kept_secrets(settings: Settings, job_id: str) -> KeptSecrets | None:
    """Read the secrets of a job that are valid now, None when this machine has no secret of the job.

    A former secret that has expired is left out. Raises UsageError for an invalid job id and for a file that
    others can read. Raises TrunklineError for a file that cannot be read or has other content.
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
    """The MQTT broker of a job. `overlay` has the fields that differ from the settings; None: there are none.

    `password` is the broker's password in clear text, None when it has none of its own.
    """

    overlay: BrokerOverlay | None
    password: SecretStr | None = None

    def resolve(self, mqtt: MqttSettings) -> MqttSettings:
        """Return the MQTT settings for this job: a copy of `mqtt` with the fields of the job's broker.

        The user name and password in `mqtt` are left out when the job's broker has another host or port.
        Without `overlay`, the result equals `mqtt`.
        """
        return resolve_mqtt(mqtt, self.overlay, self.password)

    @property
    def is_locked(self) -> bool:
        """True if the broker may require a password that we do not know."""
        overlay = self.overlay
        if overlay is None or self.password is not None:
            return False
        return overlay.username is not None or overlay.sealed_password is not None


def broker_file(secret_file: Path) -> Path:
    """Return the path of the file for a job's broker. The file need not exist.

    `secret_file` is the path of the file with the job's secret. The broker's file is next to it.
    """
    return secret_file.with_name(f"{secret_file.name}.broker")


def store_broker(secret_file: Path, job_id: str, broker: Mapping[str, Any] | None) -> None:
    """Write a job's broker, with its password, to the file next to the job's secret, replacing a previous one.

    `secret_file` is the path of the file with the job's secret. `broker` has the fields that the job was
    registered with, such as `host`, `port` and `password`; None: the job uses the broker of the settings.
    Raises TrunklineError when the file cannot be written.
    """
    text = json.dumps({"job_id": job_id, "broker": named_fields(broker)})
    replace_private(broker_file(secret_file), text + "\n", _BROKER)


def find_broker(secret_file: Path, job_id: str) -> JobBroker | None:
    """Read a job's broker from the file next to the job's secret, whose path is `secret_file`.

    Returns None when there is no such file, or when it is of another job. Raises UsageError for a file that
    others can read. Raises TrunklineError for a file that cannot be read or has other content.
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
    """Return the settings with the MQTT broker of a job in place of the common one.

    Looks for the broker's file next to `secret_file`, then next to the job's secret on this machine.
    `secret_file` is a file with the job's secret in another place; None: there is none. If no broker's file is
    found, `settings` are returned unchanged. Raises UsageError for an invalid job id and for a file that others
    can read. Raises TrunklineError for a file that cannot be read or has other content.
    """
    kept = secret_path(settings, job_id)
    for file in (kept,) if secret_file is None else (secret_file, kept):
        broker = find_broker(file, job_id)
        if broker is not None:
            return settings.model_copy(update={"mqtt": broker.resolve(settings.mqtt)})
    return settings


def named_fields(broker: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a job's broker that are not None.

    `broker` has the fields that the job was registered with. None, for a job without a broker of its own, gives
    an empty dict.
    """
    return {name: value for name, value in (broker or {}).items() if value is not None}


def shown_fields(broker: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a job's broker that are not None, without the password, for printing.

    `broker` has the fields that the job was registered with. None gives an empty dict.
    """
    return {name: value for name, value in named_fields(broker).items() if name != _PASSWORD}


def read_private(path: Path, what: str) -> str | None:
    """Read a text file that only its owner may read. Return None when it does not exist.

    `what` names the content in error texts, such as "the job's secret". Raises UsageError for a file that
    others can read, and TrunklineError for a file that cannot be read.
    """
    try:
        return read_secret(path).decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TrunklineError(f"cannot read {what} in {path}: {type(error).__name__}") from None


def replace_private(path: Path, text: str, what: str) -> None:
    """Write `text` to a file with mode 0600, replacing the file in one step. The text is on disk on return.

    The folder is created if it is missing. `what` names the content in error texts, such as "the job's secret".
    Raises TrunklineError when the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, text.encode("utf-8"))
    except OSError as error:
        raise TrunklineError(f"cannot keep {what} in {path}: {error.strerror}") from None
