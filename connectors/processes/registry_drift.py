"""Where the registries of jobs and sessions have drifted apart (JE-25), and how that is mended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from connectors.gateway_client.gateway_client import GatewayClient, path_of
from connectors.processes.session_host import GRACE_S, SessionHost
from schemas.fold.life_cycles import JOB_TERMINAL, STOPPED, TERMINATED
from schemas.fold.life_cycles import RUNNING as IS_RUNNING
from schemas.streams.session.session_registry import HARD

Row = dict[str, Any]
JOB_WITHOUT_SESSION: Final = "job_without_session"
SESSION_WITHOUT_JOB: Final = "session_without_job"
DEAD_SESSION: Final = "dead_session"
JOB_IN_STOPPED_SESSION: Final = "job_in_stopped_session"
SESSION_WITH_ENDED_JOB: Final = "session_with_ended_job"
# The others are told and left alone: a stopped session is kept for a resume, and with it its job; and a session
# that goes on after a job may have another one to do.
MENDED: Final = frozenset({JOB_WITHOUT_SESSION, SESSION_WITHOUT_JOB, DEAD_SESSION})


class Drift(NamedTuple):
    """One disagreement. `job_id`: the job to cancel, or that has ended; `why` says it in words."""

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
    """All disagreements, sorted. `job_status` knows also jobs that are not in `jobs`; `is_dead_here`: whether
    what a session's row names should run on this machine and does not.
    """
    by_name = {row["session"]: row for row in sessions}
    found = []
    dead = {name for name, row in by_name.items() if row["status"] == IS_RUNNING and is_dead_here(row)}
    for job in jobs:
        name = job["session"]
        if job["status"] != IS_RUNNING or name is None or name not in by_name:
            continue
        status = by_name[name]["status"]
        if status in (TERMINATED, STOPPED):
            kind = JOB_WITHOUT_SESSION if status == TERMINATED else JOB_IN_STOPPED_SESSION
            found.append(Drift(kind, name, job["job_id"], f"the job runs, its session is {status}"))
        elif name in dead:
            why = "the job runs, but the process of its session is gone"
            found.append(Drift(JOB_WITHOUT_SESSION, name, job["job_id"], why))
    for name, row in by_name.items():
        drift = _drift_of(row, job_status, is_dead=name in dead) if row["status"] == IS_RUNNING else None
        if drift is not None:
            found.append(drift)
    return sorted(found, key=lambda drift: (drift.session, drift.kind, drift.job_id or ""))


def _drift_of(row: Row, job_status: Callable[[str], str | None], *, is_dead: bool) -> Drift | None:
    """What is wrong with a session that runs: it was made for a job that has ended, it is dead, or it still has
    a job that has ended.
    """
    name, for_job, job_id = row["session"], row["for_job"], row["job_id"]
    ended = {
        job: status
        for job in (for_job, job_id)
        if job is not None and (status := job_status(job)) in JOB_TERMINAL
    }
    if for_job in ended:
        return Drift(SESSION_WITHOUT_JOB, name, for_job, f"the session runs for a job that is {ended[for_job]}")
    if is_dead:
        return Drift(DEAD_SESSION, name, None, "the session's process is gone")
    if job_id in ended:
        return Drift(
            SESSION_WITH_ENDED_JOB, name, job_id, f"the session still has a job that is {ended[job_id]}"
        )
    return None


def dead_here(host: SessionHost) -> Callable[[Row], bool]:
    """Whether a session's row names this machine and a handle that does not live."""

    def is_dead(row: Row) -> bool:
        return row["host"] == host.name and row["handle"] is not None and not host.alive(row["handle"])

    return is_dead


def mend(gateway: GatewayClient, host: SessionHost, drift: Drift, row: Row | None) -> str:
    """Mend one of a kind in MENDED; what was done, in words. `row`: the session's. Raises TrunklineError, such
    as Refused when it has changed meanwhile.
    """
    if drift.kind == JOB_WITHOUT_SESSION and drift.job_id is not None:
        gateway.post(path_of("jobs", drift.job_id, "cancel"), {"reason": f"monitor: {drift.why}"})
        return f"job {drift.job_id} is cancelled"
    body = {"mode": HARD, "reason": f"monitor: {drift.why}", "graceful": True}
    gateway.post(path_of("sessions", drift.session, "stop"), body)
    if row is not None and row["host"] == host.name and row["handle"] is not None:
        host.stop(row["handle"], grace_s=GRACE_S)
    return f"session {drift.session} is terminated"
