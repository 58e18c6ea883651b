"""Keeps an MQTT account for each live job at the local stack's Mosquitto: a companion of the gateway.

**Reads** the jobs of the live view; their passwords follow from their secrets (`schemas.mqtt_password`).
**Owns** the password file in `mqtt.accounts_dir`: a line for each role, each pending or running job, and for
`mqtt.account_grace_s` after its end each finished one, so that a resend still gets in.
**Guarantees** that `wait_effective` says yes only after the broker itself has let the account in. Changes that
come together are one new file and one SIGHUP.
**On restart** it compares the file with the live view; accounts that are right stay as they are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import structlog

from connectors.mqtt_credentials import ensure_role_passwords
from connectors.mqtt_login import LoginAnswer, try_login
from connectors.mqtt_password_file import (
    PASSWORDS,
    password_line,
    read_lines,
    reload_broker,
    with_roles,
    write_lines,
)
from schemas.entries import Entries
from schemas.ids import JOB, is_job_id, stream_key
from schemas.job_fold import job_grant
from schemas.life_cycles import JOB_TERMINAL
from schemas.mqtt_password import mqtt_password
from schemas.sealing import Keyring, UnsealError
from schemas.settings import Settings
from schemas.settled import AppliedChange
from schemas.view_rows import REGISTRY_JOBS, JobRow, ViewRow

log = structlog.stdlib.get_logger(__name__)

REGISTER_WAIT_S: Final = 1.0
_PROOF_S: Final = 1.0
_PROOF_TICK_S: Final = 0.005
_RETRY_S: Final = 1.0
# A reload costs the broker time that grows with the accounts: it is left alone for so many times that long.
_REST_FACTOR: Final = 2
_TIDY_MOST_S: Final = 30.0
_TIDY_LEAST_S: Final = 0.2
_CLOSE_S: Final = 5.0


class JobsView(Protocol):
    """What of the live view is needed here."""

    def row(self, view: str, key: str) -> ViewRow | None:
        """One row, None where there is none."""

    def rows(self, view: str) -> list[ViewRow]:
        """All rows of a view."""

    def entries(self, stream: str) -> Entries:
        """A copy of a stream's entries."""


class MqttAccounts:
    """Thread-safe. Give `on_change` to the live view, `open` it when that has caught up, `close` it at the end.

    Raises SettingsError for a role file that others can read.
    """

    def __init__(
        self,
        settings: Settings,
        keyring: Keyring,
        view: JobsView,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if settings.mqtt.accounts_dir is None:
            raise ValueError("mqtt.accounts_dir is not set: the broker is not ours")
        self._settings = settings
        self._keyring = keyring
        self._view = view
        self._clock = clock
        self._folder: Path = settings.mqtt.accounts_dir
        self._lines: dict[str, str] = {}  # job id to its line; the worker's own
        self._ends: dict[str, float] = {}  # finished job to the time at which its account goes
        self._role_lines: dict[str, str] = {}
        self._changed = threading.Condition()
        self._to_look_at: set[str] = set()
        self._effective: set[str] = set()
        self._closing = False
        self._next_tidy = 0.0
        self._thread = threading.Thread(target=self._run, name="mqtt-accounts", daemon=True)

    def open(self) -> None:
        """Put the file right for the jobs of the live view, and keep it so from now on."""
        passwords = ensure_role_passwords(self._settings)
        roles = {role: password.get_secret_value() for role, password in passwords.items()}
        known = read_lines(self._folder / PASSWORDS)
        self._role_lines = with_roles({user: line for user, line in known.items() if user in roles}, roles)
        self._lines = {user: line for user, line in known.items() if is_job_id(user)}
        with self._changed:
            self._to_look_at |= self._lines.keys()
            self._to_look_at |= {
                row.job_id for row in self._view.rows(REGISTRY_JOBS) if isinstance(row, JobRow)
            }
        self._thread.start()

    def close(self) -> None:
        """End the thread. The accounts stay."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def on_change(self, change: AppliedChange) -> None:
        """A row has changed. Quick, for the live view's thread."""
        if change.view == REGISTRY_JOBS:
            row = change.row
            if change.key in self._effective and isinstance(row, JobRow) and row.status not in JOB_TERMINAL:
                return  # One of the many events of a job that has its account.
            with self._changed:
                self._to_look_at.add(change.key)
                self._changed.notify_all()

    def registered(self, job_id: str) -> None:
        """Called before a registration is answered: gives the account up to a second to become effective."""
        if not self.wait_effective(job_id, REGISTER_WAIT_S):
            log.warning("account_late", job_id=job_id)

    def wait_effective(self, job_id: str, timeout_s: float) -> bool:
        """Wait until the broker lets this job in; False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: job_id in self._effective, timeout_s)

    def _run(self) -> None:
        apply_by: float | None = 0.0
        while True:
            job_ids = self._wait_for_work(apply_by)
            if job_ids is None:
                return
            # An exception here would end the thread and leave new jobs without accounts.
            try:
                begun = time.monotonic()
                newest = self._take(job_ids)
                if self._tidy() or newest is not None or apply_by is not None:
                    proven = self._apply(newest)
                    rest_s = _REST_FACTOR * (time.monotonic() - begun)
                    apply_by = None if proven else time.monotonic() + _RETRY_S
                    self._rest(min(rest_s, _RETRY_S))
            except Exception:
                log.exception("accounts_failed")
                with self._changed:
                    self._to_look_at |= job_ids
                self._rest(_RETRY_S)
                apply_by = time.monotonic() + _RETRY_S

    def _wait_for_work(self, apply_by: float | None) -> set[str] | None:
        """Job ids to look at; none when only time has passed. None: the end."""
        wake_at = self._next_tidy if apply_by is None else min(apply_by, self._next_tidy)
        with self._changed:
            self._changed.wait_for(
                lambda: self._to_look_at or self._closing, max(0.0, wake_at - time.monotonic())
            )
            if self._closing:
                return None
            job_ids, self._to_look_at = self._to_look_at, set()
            return job_ids

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    def _take(self, job_ids: set[str]) -> str | None:
        """Note what has become of these jobs. Returns one that got a line, None when no line is new."""
        newest = None
        for job_id in job_ids:
            row = self._view.row(REGISTRY_JOBS, job_id)
            if not isinstance(row, JobRow):
                self._ends[job_id] = 0.0
                continue
            if row.status in JOB_TERMINAL:
                self._ends[job_id] = (row.ended_at or 0) / 1e6 + self._settings.mqtt.account_grace_s
                if self._ends[job_id] <= self._clock():
                    continue
            if job_id not in self._lines and (password := self._password(job_id)) is not None:
                self._lines[job_id] = password_line(job_id, password)
                newest = job_id
        return newest

    def _password(self, job_id: str) -> str | None:
        try:
            grant = job_grant(job_id, self._view.entries(stream_key(JOB, job_id)), self._keyring)
        except UnsealError as error:
            log.warning("secret_sealed_under_another_key", job_id=job_id, error=str(error))
            return None
        return None if grant is None else mqtt_password(grant.secret, job_id)

    def _tidy(self) -> bool:
        """Drop the accounts whose time is over. Returns whether there were any."""
        now = time.monotonic()
        if now < self._next_tidy:
            return False
        grace_s = self._settings.mqtt.account_grace_s
        self._next_tidy = now + min(_TIDY_MOST_S, max(_TIDY_LEAST_S, grace_s / 10))
        over = [job_id for job_id, end in self._ends.items() if end <= self._clock()]
        for job_id in over:
            del self._ends[job_id]
        gone = {job_id for job_id in over if self._lines.pop(job_id, None) is not None}
        with self._changed:
            self._effective -= gone
        return bool(gone)

    def _apply(self, newest: str | None) -> bool:
        """Write the file, tell the broker, and see that it lets a new account in. Returns whether it does."""
        write_lines(self._folder / PASSWORDS, (*self._role_lines.values(), *self._lines.values()))
        told = reload_broker(self._folder)
        proven = self._prove(newest or next(reversed(self._lines), None)) if told else False
        if proven:
            with self._changed:
                self._effective |= self._lines.keys()
                self._changed.notify_all()
        else:
            log.warning("accounts_not_effective_yet", accounts=len(self._lines), broker_told=told)
        return proven

    def _prove(self, job_id: str | None) -> bool:
        """Whether the broker has read the file: it lets in the job that came last, or there is none."""
        password = None if job_id is None else self._password(job_id)
        if job_id is None or password is None:
            return True
        deadline = time.monotonic() + _PROOF_S
        while time.monotonic() < deadline and not self._closing:
            if try_login(self._settings.mqtt, job_id, password) is LoginAnswer.LET_IN:
                return True
            time.sleep(_PROOF_TICK_S)
        return False
