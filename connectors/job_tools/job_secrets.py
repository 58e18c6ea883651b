"""The secrets of jobs that were registered or picked on this machine, in one 0600 file per job.

`watch` verifies with them and `publish` signs with them. They are used for nothing else. A job's own broker is
stored next to its secret (`connectors.job_tools.job_brokers`). After a rotation, `<id>.former` holds the former
secret and the time at which it expires.
"""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Final, NamedTuple

from schemas.errors import TrunklineError, UsageError
from schemas.keys.private_files import replace_file
from schemas.settings.settings import Settings
from schemas.wire.ids import is_job_id

_FOLDER: Final = "job-secrets"
_PRIVATE: Final = 0o077
_WHAT: Final = "the job's secret"


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
