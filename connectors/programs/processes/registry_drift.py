"""Finds and repairs contradictions between the registries of jobs and sessions and this machine (JE-25).

`mend` repairs the kinds of disagreement in MENDED. The others are only reported: a stopped session and its job
are kept for a resume, and a session that goes on after a job may get another job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.processes.session_host import GRACE_S, SessionHost
from schemas.fold.life_cycles import RUNNING as IS_RUNNING
from schemas.fold.life_cycles import STOPPED
from schemas.streams.job.job_registry import JOB_TERMINAL
from schemas.streams.session.session_registry import HARD, TERMINATED

Row = dict[str, Any]
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
