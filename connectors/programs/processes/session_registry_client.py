"""Creates, stops and resumes sessions in the registry and on this machine, in step (JE-14), and mends drift.

A new run is started without its command, registered, and only then released. A stop is registered before
anything is ended. So the registry knows every running command, and a refused stop ends nothing.

Drift (JE-25) is a contradiction between the registries of jobs and sessions and this machine. `mend` repairs
the kinds in MENDED. The others are only reported: a stopped session and its job are kept for a resume, and a
session that goes on after a job may get another job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.plumbing.machine.process_tree import clean_environment
from connectors.programs.processes.session_host import GRACE_S, SessionHost
from schemas.fold.stream_kind import RUNNING as IS_RUNNING
from schemas.fold.stream_kind import STOPPED
from schemas.streams.job.job_registry import JOB_TERMINAL
from schemas.streams.session.sessions import HARD, SOFT, TERMINATED
from trunkline_agent.errors import NotFound, Refused, UsageError
from trunkline_agent.wire.ids import is_name

Row = dict[str, Any]


def find_session(gateway: GatewayClient, name: str) -> Row | None:
    """Ask the gateway for a session, and return its row in the registry, or None if there is no such session.

    Raises:
        UsageError: `name` is not a valid name. The gateway is not asked.
        TrunklineError: The gateway refuses or does not answer.
    """
    if not is_name(name):
        raise UsageError(f"not a name (letters, digits, '.', '_', '-'; first a letter or digit): {name!r}")
    try:
        found: Row = gateway.get(path_of("sessions", name))
    except NotFound:
        return None
    return found


def refuse_taken(gateway: GatewayClient, name: str) -> None:
    """Raise Refused if a session with this name exists, whether it runs or has ended: a name is used once."""
    row = find_session(gateway, name)
    if row is not None:
        raise Refused(f"there is a session {name} already, it is {row['status']}; choose another name")


def create_session(
    gateway: GatewayClient,
    host: SessionHost,
    name: str,
    command: list[str],
    *,
    for_job: str | None = None,
    description: str | None = None,
    environment: dict[str, str] | None = None,
    instructions: str | None = None,
) -> Row:
    """Start a new session's wrapper process on this machine, register the session, and return its row.

    The wrapper waits. The command itself begins when the caller calls `host.release` with the row's handle.
    After an error nothing runs.

    Args:
        gateway: The client of the gateway.
        host: The sessions on this machine.
        name: The session's name.
        command: The program and its arguments. Empty: only register the name, and start nothing.
        for_job: The id of the job for which the session is made. The session is ended after this job. None: it
            is made for any jobs.
        description: A text for people.
        environment: The command's environment. None: this process's, without Trunkline's settings and secrets.
        instructions: The text on the command's standard input. None: it is the terminal of tmux, or empty.

    Raises:
        Refused: A session with this name exists.
        TrunklineError: The gateway does not answer, or the wrapper cannot be started.
    """
    refuse_taken(gateway, name)
    body = {"session": name, "description": description, "for_job": for_job, "host": host.name}
    if not command:
        row: Row = gateway.post(path_of("sessions"), body | {"host": None})
        return row
    given = clean_environment() if environment is None else environment
    spec = host.prepare(name, command, folder=Path.cwd(), environment=given, instructions=instructions)
    handle: str | None = None
    try:
        handle = host.start(name, spec)
        row = gateway.post(path_of("sessions"), body | {"handle": handle})
        # Only now: another client may have taken the name meanwhile, and the kept command must be its own.
        host.keep(name, spec)
    except BaseException:
        spec.unlink(missing_ok=True)
        if handle is not None:
            host.stop(handle)
        raise
    return row


def stop_session(
    gateway: GatewayClient,
    host: SessionHost,
    name: str,
    *,
    mode: str,
    reason: str | None = None,
    capture_id: str | None = None,
    graceful: bool = False,
) -> tuple[Row, Path | None]:
    """Register a session's stop at the gateway, then end its processes if they run on this machine.

    Args:
        gateway: The client of the gateway.
        host: The sessions on this machine.
        name: The session's name.
        mode: SOFT archives the session and leaves its processes. HARD terminates it for good. Other modes allow
            a resume.
        reason: A text for the registry.
        capture_id: Before the stop, write the session's screen to a file with this name. None: do not.
        graceful: True: send SIGTERM, and SIGKILL after 10 seconds. False: SIGKILL at once.

    Returns:
        The session's row after the stop, and the file with the screen, or None without `capture_id`.

    Raises:
        Refused: The gateway refuses the stop, or the screen is not on this machine. Nothing was ended.
        NotFound: There is no such session.
        TrunklineError: The gateway does not answer. Or the stop is registered, and a process does not end.
    """
    before = find_session(gateway, name)
    here = before is not None and before["host"] == host.name and before["handle"] is not None
    captured = None
    if capture_id is not None:
        if before is None or not here:
            raise Refused(f"session {name} does not run on this machine, so its screen cannot be kept here")
        if not is_name(capture_id):
            raise UsageError(f"--capture-id: not a name: {capture_id!r}")
        captured = host.keep_capture(name, before["handle"], capture_id)
    body = {"mode": mode, "reason": reason, "capture_id": capture_id, "graceful": graceful}
    row: Row = gateway.post(path_of("sessions", name, "stop"), body)
    if here and mode != SOFT:
        host.stop(row["handle"], grace_s=GRACE_S if graceful else 0.0)
        if mode == HARD:
            host.forget(name)
    return row, captured


def resume_session(gateway: GatewayClient, host: SessionHost, name: str) -> Row:
    """Start a stopped session's command again, or reactivate an archived session. Return the session's row.

    A session that was registered without a command, or still runs here, is only changed in the registry.
    Otherwise the command starts before the call returns.

    Raises:
        Refused: The session cannot be resumed, or runs on another host. Nothing runs.
        NotFound: There is no such session, or this machine has no kept command for it.
        TrunklineError: The gateway does not answer, or the command cannot be started.
    """
    row = find_session(gateway, name)
    if row is None:
        raise NotFound(f"there is no session {name}")
    path = path_of("sessions", name, "resume")
    handle = row["handle"]
    if handle is None or row["status"] == TERMINATED:
        # For a terminated session the gateway answers with the reason.
        return dict(gateway.post(path))
    if row["host"] != host.name:
        raise Refused(f"session {name} runs on host {row['host']}; resume it there")
    if host.alive(handle):
        return dict(gateway.post(path))
    again = host.start(name)
    try:
        found = gateway.post(path, {"host": host.name, "handle": again})
    except BaseException:
        host.stop(again)
        raise
    host.release(name, again)
    return dict(found)


JOB_WITHOUT_SESSION: Final = "job_without_session"
SESSION_WITHOUT_JOB: Final = "session_without_job"
DEAD_SESSION: Final = "dead_session"
JOB_IN_STOPPED_SESSION: Final = "job_in_stopped_session"
SESSION_WITH_ENDED_JOB: Final = "session_with_ended_job"
MENDED: Final = frozenset({JOB_WITHOUT_SESSION, SESSION_WITHOUT_JOB, DEAD_SESSION})


class Drift(NamedTuple):
    """One contradiction between the registries, or between a registry and this machine's processes.

    Attributes:
        kind: One of the constants of this module, such as DEAD_SESSION.
        session: The name of the session.
        job_id: The job to cancel, or the job that has ended. None: no job is concerned.
        why: A description for people.
    """

    kind: str
    session: str
    job_id: str | None
    why: str


def find_drift(
    jobs: Iterable[Row],
    sessions: Iterable[Row],
    job_status: Callable[[str], str | None],
    is_dead_here: Callable[[Row], bool],
) -> list[Drift]:
    """Return all contradictions between jobs, sessions and processes, sorted by session. Nothing is changed.

    Args:
        jobs: rows of the registry of jobs.
        sessions: rows of the registry of sessions.
        job_status: returns the status of the job with this id, also of one that is not in `jobs`. None: the
            status is unknown.
        is_dead_here: returns whether a session's row names a process of this machine that does not run. Use the
            result of `dead_here`.
    """
    by_name = {row["session"]: row for row in sessions}
    running = {name: row for name, row in by_name.items() if row["status"] == IS_RUNNING}
    dead = {name for name, row in running.items() if is_dead_here(row)}
    found = []
    for job in jobs:
        name = job["session"]
        if job["status"] != IS_RUNNING or name not in by_name:
            continue
        status = by_name[name]["status"]
        if status in (TERMINATED, STOPPED):
            kind = JOB_WITHOUT_SESSION if status == TERMINATED else JOB_IN_STOPPED_SESSION
            found.append(Drift(kind, name, job["job_id"], f"the job runs, its session is {status}"))
        elif name in dead:
            why = "the job runs, but the process of its session is gone"
            found.append(Drift(JOB_WITHOUT_SESSION, name, job["job_id"], why))
    drifts = (_drift_of(row, job_status, is_dead=name in dead) for name, row in running.items())
    found += [drift for drift in drifts if drift is not None]
    return sorted(found, key=lambda drift: (drift.session, drift.kind, drift.job_id or ""))


def _drift_of(row: Row, job_status: Callable[[str], str | None], *, is_dead: bool) -> Drift | None:
    """Return the first disagreement of a running session, or None.

    The session was made for a job that has ended, its process does not run, or its present job has ended.
    """
    name = row["session"]
    ended = {
        job: status
        for job in (row["for_job"], row["job_id"])
        if job is not None and (status := job_status(job)) in JOB_TERMINAL
    }
    if (job := row["for_job"]) in ended:
        return Drift(SESSION_WITHOUT_JOB, name, job, f"the session runs for a job that is {ended[job]}")
    if is_dead:
        return Drift(DEAD_SESSION, name, None, "the session's process is gone")
    if (job := row["job_id"]) in ended:
        return Drift(SESSION_WITH_ENDED_JOB, name, job, f"the session still has a job that is {ended[job]}")
    return None


def dead_here(host: SessionHost) -> Callable[[Row], bool]:
    """Return a function that checks whether a running session's process has ended on this machine.

    The returned function takes a row of the registry of sessions. It returns False for a row without a handle
    and for a session of another machine. Pass it to `find_drift` as `is_dead_here`.
    """

    def is_dead(row: Row) -> bool:
        return row["host"] == host.name and row["handle"] is not None and not host.alive(row["handle"])

    return is_dead


def mend(gateway: GatewayClient, host: SessionHost, drift: Drift, row: Row | None) -> str:
    """Repair a contradiction whose kind is in MENDED, through the gateway.

    A job without a session is cancelled. A session without a job or process is terminated, and its processes on
    this machine are ended.

    Args:
        gateway: The client of the gateway, with an operator's token.
        host: The sessions on this machine.
        drift: The contradiction, as `find_drift` returned it.
        row: The session's row. None: no process is ended.

    Returns:
        A sentence for people about what was done.

    Raises:
        TrunklineError: The repair failed, for example because session or job has changed meanwhile (Refused).
    """
    if drift.kind == JOB_WITHOUT_SESSION and drift.job_id is not None:
        gateway.post(path_of("jobs", drift.job_id, "cancel"), {"reason": f"monitor: {drift.why}"})
        return f"job {drift.job_id} is cancelled"
    body = {"mode": HARD, "reason": f"monitor: {drift.why}", "graceful": True}
    gateway.post(path_of("sessions", drift.session, "stop"), body)
    if row is not None and row["host"] == host.name and row["handle"] is not None:
        host.stop(row["handle"], grace_s=GRACE_S)
    return f"session {drift.session} is terminated"
