"""A background service of the gateway that keeps the MQTT accounts at the local stack's Mosquitto.

**Reads** jobs and agents from the live view. Their passwords are derived from their secrets
(`trunkline_agent.wire.mqtt_password`).
**Owns** the password file in `mqtt.accounts_dir` and the ACL file next to it. Each role, each registered agent
and each pending or running job has an account. A finished job keeps it for `mqtt.account_grace_s`, so that a
resend is still accepted. A job whose secret was rotated has an account for the new secret. It keeps the old
account until the end of the overlap, by this machine's clock; then the old account's connections end, too.
**Guarantees** that `wait_effective` returns True only after the broker itself has accepted the account. Changes
that come together make one new file and one SIGHUP. The first change after a quiet time is written at once.
Under load the next file is written after a rest of twice the time that the last one took, at most a second. So
a broker that needs long to read its files is not told to read them again meanwhile.
It also pauses the accounts that the gateway names: they may publish nothing for a while, and still read.
**On restart** it compares the file with the live view. Accounts that are right stay unchanged. Pauses end.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from pathlib import Path
from typing import Final

import structlog

from connectors.doors.mqtt_accounts.mosquitto_files import (
    PASSWORDS,
    AccountPauses,
    line_fits,
    password_line,
    read_lines,
    reload_broker,
    with_roles,
    write_acl,
    write_lines,
)
from connectors.hub.live.live_view import LiveView
from connectors.plumbing.mqtt_link.broker_settings import ensure_role_passwords, socket_dir
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring, UnsealError
from schemas.settings.settings import Settings
from schemas.streams.agents.mqtt_agents import REGISTERED, MqttAgentRow, mqtt_agent_secret
from schemas.streams.job.job_fold import job_grant
from schemas.streams.job.job_registry import JOB_TERMINAL, JobRow
from trunkline_agent.mqtt.mqtt_client import LoginAnswer, try_login
from trunkline_agent.wire.agent_message import agent_of_user, mqtt_user
from trunkline_agent.wire.ids import AGENT, JOB, is_job_id, stream_key
from trunkline_agent.wire.mqtt_password import job_of_rotated_user, job_user, mqtt_password

log = structlog.stdlib.get_logger(__name__)

REGISTER_WAIT_S: Final = 1.0
# How long to wait until the broker accepts a new account. It is silent while it reads its files, and each file
# of a million accounts takes seconds. So the wait doubles after one that was too short.
_PROOF_S: Final = 1.0
_PROOF_MOST_S: Final = 60.0
_PROOF_TICK_S: Final = 0.005
_RETRY_S: Final = 1.0
# A reload costs the broker time that grows with the accounts. The rest after it is so many times that long.
_REST_FACTOR: Final = 2
_REST_MOST_S: Final = 1.0
_TIDY_MOST_S: Final = 30.0
_TIDY_LEAST_S: Final = 0.2
_CLOSE_S: Final = 5.0
# The number of rotations of a job that has no lines yet.
_NONE: Final = -1


class MqttAccounts:
    """The MQTT accounts of jobs and agents at the local stack's Mosquitto, updated by a thread. Thread-safe.

    Call `open` when the live view has caught up, pass `on_change` to the live view, and call `close` at the
    end. Raises ValueError when `mqtt.accounts_dir` is not set, because the broker is then not the local
    stack's.

    Args:
        settings: the broker, and the folder of its password file.
        keyring: opens the sealed secrets of jobs and agents, from which their passwords are derived.
        view: the live view with the jobs and agents.
    """

    follows = (JobRow, MqttAgentRow)

    def __init__(self, settings: Settings, keyring: Keyring, view: LiveView) -> None:
        if settings.mqtt.accounts_dir is None:
            raise ValueError("mqtt.accounts_dir is not set: the broker is not the local stack's")
        self._settings = settings
        self._private = settings.mqtt.model_copy(update={"socket_dir": socket_dir(settings)})
        self._keyring = keyring
        self._view = view
        self._folder: Path = settings.mqtt.accounts_dir
        self._lines: dict[str, str] = {}  # by user; only the worker thread uses it
        # Finished job to the time at which its accounts are removed, and the same as a heap.
        self._ends: dict[str, float] = {}
        self._ends_due: list[tuple[float, str]] = []
        self._is_acl_old = True
        self._overlaps: dict[str, float] = {}  # job to the time at which its old account is removed
        self._pauses = AccountPauses()  # guarded by `_changed`; only the worker thread changes `applied`
        # The users of each owner, which is a job or an agent, and the rotations of each live job with its
        # lines.
        self._users: dict[str, list[str]] = {}
        self._taken: dict[str, int | None] = {}
        self._role_lines: dict[str, str] = {}
        self._changed = threading.Condition()
        self._to_look_at: set[str] = set()
        self._effective: set[str] = set()
        # Status and registration of each agent in `on_change`. Its messages change its row, but no account.
        self._agents: dict[str, tuple[str, int]] = {}
        self._closing = False
        self._next_tidy = 0.0
        self._proof_s = _PROOF_S
        self._thread = threading.Thread(target=self._run, name="mqtt-accounts", daemon=True)

    def open(self) -> None:
        """Start the thread that writes Mosquitto's password and ACL files. Returns before they are written.

        The thread first corrects both files for all jobs and agents of the live view. It then updates them at
        each change, until `close`. Raises SettingsError when other users can read the file of role passwords,
        or when that file is wrong.
        """
        passwords = ensure_role_passwords(self._settings)
        roles = {role: password.get_secret_value() for role, password in passwords.items()}
        known = read_lines(self._folder / PASSWORDS)
        self._role_lines = with_roles({user: line for user, line in known.items() if user in roles}, roles)
        self._lines = {
            user: line
            for user, line in known.items()
            if _job_of(user) is not None or agent_of_user(user) is not None
        }
        for user in self._lines:
            self._users.setdefault(_job_of(user) or user, []).append(user)
        with self._changed:
            self._to_look_at |= self._users.keys()
            self._to_look_at |= {row.job_id for row in self._view.live(JobRow)}
            self._to_look_at |= {mqtt_user(row.agent_name) for row in self._view.live(MqttAgentRow)}
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it, at most 5 s. The accounts stay in Mosquitto's files."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def on_change(self, change: AppliedChange) -> None:
        """Queue a changed job or agent, so that the thread updates its MQTT account. Returns at once.

        The live view calls it for each change of a row, on the live view's thread. Changes that affect no
        account are ignored.
        """
        row, user = change.row, change.key
        if change.view == JobRow.VIEW:
            known = self._taken.get(user, _NONE)
            if isinstance(row, JobRow) and row.status not in JOB_TERMINAL and known == row.secret_rotations:
                return  # One of the many events of a job that has its account.
        elif isinstance(row, MqttAgentRow):
            user, now = mqtt_user(change.key), (row.status, row.registered_at)
            if self._agents.get(user) == now:
                return
            self._agents[user] = now
        else:
            return
        with self._changed:
            if isinstance(row, MqttAgentRow):
                self._effective.discard(user)
            self._to_look_at.add(user)
            self._changed.notify_all()

    def registered(self, user: str) -> None:
        """Wait until the broker accepts the MQTT account of `user`, at most 1 s.

        When that takes longer, it logs a warning and returns as well. The gateway calls it before it answers a
        registration or a rotation of a secret, so that the client can connect at once. `user` is the MQTT user
        name: a job's id, `<job id>.<tag>` after a rotation, or `agent.<name>`.
        """
        if not self.wait_effective(user, REGISTER_WAIT_S):
            log.warning("account_late", user=user)

    def pause(self, owner: str, seconds: float) -> None:
        """Let all MQTT users of a job or an agent publish nothing for so many seconds. Returns at once.

        Their connections stay, and they still read. The broker refuses what they publish: with QoS 1 or 2, an
        MQTT 5 client gets the reason 0x87. A shorter pause does not end a longer one. `owner` is a job's id, or
        `agent.<name>`. An owner without an account is ignored.
        """
        with self._changed:
            self._pauses.pause(owner, seconds)
            self._changed.notify_all()

    def wait_effective(self, user: str, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds until the broker accepts the MQTT account with the user name `user`.

        Returns True when the broker accepts it. Returns False after the timeout, also for a user that has no
        account.
        """
        with self._changed:
            return self._changed.wait_for(lambda: user in self._effective, timeout_s)

    def _run(self) -> None:
        apply_by: float | None = 0.0
        while True:
            users = self._wait_for_work(apply_by)
            if users is None:
                return
            # An exception here would end the thread and leave new jobs without accounts.
            try:
                begun = time.monotonic()
                newest, is_changed = self._take(users)
                if (
                    self._pause_and_resume()
                    or self._tidy()
                    or is_changed
                    or newest is not None
                    or apply_by is not None
                ):
                    proven = self._apply(newest)
                    rest_s = _REST_FACTOR * (time.monotonic() - begun)
                    apply_by = None if proven else time.monotonic() + _RETRY_S
                    self._rest(min(rest_s, _REST_MOST_S))
            except Exception:
                log.exception("accounts_failed")
                with self._changed:
                    self._to_look_at |= users
                self._rest(_RETRY_S)
                apply_by = time.monotonic() + _RETRY_S

    def _wait_for_work(self, apply_by: float | None) -> set[str] | None:
        """Return the jobs and agents to look at, none when only time has passed, None at the end."""
        wake_at = self._next_tidy if apply_by is None else min(apply_by, self._next_tidy)
        left_s = min(self._overlaps.values(), default=math.inf) - time.time()
        with self._changed:
            wake_s = self._pauses.next_end(wake_at) - time.monotonic()
            self._changed.wait_for(
                lambda: self._to_look_at or self._closing or self._pauses.has_new,
                max(0.0, min(wake_s, left_s)),
            )
            if self._closing:
                return None
            users, self._to_look_at = self._to_look_at, set()
        over = {job_id for job_id, end in self._overlaps.items() if end <= time.time()}
        for job_id in over:
            del self._overlaps[job_id]
            self._taken.pop(job_id, None)
        return users | over

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    def _pause_and_resume(self) -> bool:
        """Find the owners that are paused now. Returns whether the ACL file has others."""
        with self._changed:
            begun, ended = self._pauses.turn()
        if begun or ended:
            log.info("publishing_paused", begun=begun, ended=ended)
            self._is_acl_old = True
        return bool(begun or ended)

    def _take(self, owners: set[str]) -> tuple[str | None, bool]:
        """Make and remove the lines of these jobs and agents.

        Returns one user to test, with a new line or not known to be effective (None: there is no such user),
        and whether a line was removed.
        """
        newest, is_removed = None, False
        for owner in sorted(owners):
            passwords = self._changed_passwords(owner)
            if passwords is None:
                continue
            is_removed = self._drop(set(self._users.get(owner, ())) - passwords.keys()) or is_removed
            self._users[owner] = list(passwords)
            for user, password in passwords.items():
                if not line_fits(self._lines.get(user, ""), user, password):
                    # The ACL's patterns have the rules of all users that are named as their jobs.
                    self._is_acl_old = self._is_acl_old or not is_job_id(user) or owner in self._pauses.applied
                    self._lines[user] = password_line(user, password)
                elif user in self._effective:
                    continue
                newest = user
        return newest, is_removed

    def _changed_passwords(self, owner: str) -> dict[str, str] | None:
        """Return the passwords that the owner's users must have now, None if its lines stay as they are."""
        if (agent := agent_of_user(owner)) is not None:
            registration = self._view.get(MqttAgentRow, agent)
            is_registered = registration is not None and registration.status == REGISTERED
            return self._passwords(owner) if is_registered else {}
        row = self._view.get(JobRow, owner)
        if row is None:
            self._end(owner, 0.0)
            return None
        if row.status in JOB_TERMINAL:
            self._end(owner, (row.ended_at or 0) / 1e6 + self._settings.mqtt.account_grace_s)
            if self._ends[owner] <= time.time():
                return None
        if self._taken.get(owner, _NONE) == row.secret_rotations:
            return None
        passwords = self._passwords(owner)
        if not passwords:
            return None
        self._taken[owner] = row.secret_rotations
        return passwords

    def _end(self, job_id: str, end: float) -> None:
        """Note the time at which the accounts of a finished job are removed."""
        if self._ends.get(job_id) != end:
            self._ends[job_id] = end
            heapq.heappush(self._ends_due, (end, job_id))

    def _drop(self, users: set[str]) -> bool:
        """Remove the accounts of these users. Returns whether there were any."""
        removed = {user for user in users if self._lines.pop(user, None) is not None}
        self._is_acl_old = self._is_acl_old or not all(map(is_job_id, removed))
        with self._changed:
            self._effective -= removed
        return bool(removed)

    def _passwords(self, owner: str) -> dict[str, str]:
        """Return the passwords by user: of an agent, or of a job for its current secret and a valid old one.

        Notes the time at which the old secret expires.
        """
        agent = agent_of_user(owner)
        entries = self._view.entries(stream_key(JOB, owner) if agent is None else stream_key(AGENT, agent))
        try:
            if agent is not None:
                secret = mqtt_agent_secret(agent, entries, self._keyring)
                return {} if secret is None else {owner: mqtt_password(secret, owner)}
            grant = job_grant(owner, entries, self._keyring)
        except UnsealError as error:
            log.warning("secret_sealed_under_another_key", user=owner, error=str(error))
            return {}
        if grant is None:
            return {}
        found = [grant.secret]
        if grant.old_secret is not None and (grant.old_until or 0) / 1e6 > time.time():
            found.insert(0, grant.old_secret)
            self._overlaps[owner] = (grant.old_until or 0) / 1e6
        return {user: mqtt_password(one, user) for one in found for user in [job_user(owner, one)]}

    def _tidy(self) -> bool:
        """Remove the accounts whose grace time is over. Returns whether there were any."""
        now = time.monotonic()
        if now < self._next_tidy:
            return False
        grace_s = self._settings.mqtt.account_grace_s
        self._next_tidy = now + min(_TIDY_MOST_S, max(_TIDY_LEAST_S, grace_s / 10))
        over = []
        while self._ends_due and self._ends_due[0][0] <= time.time():
            end, job_id = heapq.heappop(self._ends_due)
            if self._ends.get(job_id) != end:
                continue
            over.append(job_id)
            del self._ends[job_id]
            self._taken.pop(job_id, None)
            self._overlaps.pop(job_id, None)
        return self._drop({user for job_id in over for user in self._users.pop(job_id, ())})

    def _apply(self, newest: str | None) -> bool:
        """Write the files, signal the broker, and return whether it accepts a new account."""
        # The ACL first: an account that is accepted must have its limits.
        if self._is_acl_old:
            paused = {user for owner in self._pauses.applied for user in self._users.get(owner, ())}
            write_acl(self._folder, self._settings.mqtt, self._lines, paused)
            self._is_acl_old = False
        write_lines(self._folder / PASSWORDS, (*self._role_lines.values(), *self._lines.values()))
        signalled = reload_broker(self._folder)
        proven = self._prove(newest or next(reversed(self._lines), None)) if signalled else False
        if proven:
            with self._changed:
                self._effective |= self._lines.keys()
                self._changed.notify_all()
        else:
            self._is_acl_old = True
            if signalled:
                self._proof_s = min(2 * self._proof_s, _PROOF_MOST_S)
            log.warning("accounts_not_effective_yet", accounts=len(self._lines), broker_told=signalled)
        return proven

    def _prove(self, user: str | None) -> bool:
        """Return whether the broker has read the file: it accepts the last user, or there is none."""
        password = None if user is None else self._passwords(_job_of(user) or user).get(user)
        if user is None or password is None:
            return True
        deadline = time.monotonic() + self._proof_s
        while time.monotonic() < deadline and not self._closing:
            if try_login(self._private, user, password) is LoginAnswer.LET_IN:
                return True
            time.sleep(_PROOF_TICK_S)
        return False


def _job_of(user: str) -> str | None:
    """Return the job of this user, None for any other user."""
    return user if is_job_id(user) else job_of_rotated_user(user)
