"""Drift between the registries of jobs and sessions is found, and nothing else is taken for it (JE-25)."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.programs.processes.session_registry_client import (
    DEAD_SESSION,
    JOB_IN_STOPPED_SESSION,
    JOB_WITHOUT_SESSION,
    MENDED,
    SESSION_WITH_ENDED_JOB,
    SESSION_WITHOUT_JOB,
    find_drift,
)

pytestmark = pytest.mark.requirement("JE-25")

JOB = "0a1b2c3d"


def _find(job: dict[str, Any], session: dict[str, Any], *, dead: bool = False) -> list[tuple[str, str | None]]:
    jobs = [{"job_id": JOB, "status": "running", "session": "s1", **job}]
    sessions = [{"session": "s1", "status": "running", "for_job": None, "job_id": JOB, **session}]
    status = {row["job_id"]: row["status"] for row in jobs}
    return [(d.kind, d.job_id) for d in find_drift(jobs, sessions, status.get, lambda _row: dead)]


def test_a_job_that_runs_in_a_session_that_is_gone_is_drift() -> None:
    assert _find({}, {"status": "terminated"}) == [(JOB_WITHOUT_SESSION, JOB)]


@pytest.mark.requirement("JE-14")
def test_a_job_whose_session_is_kept_for_a_resume_is_told_and_not_mended() -> None:
    assert _find({}, {"status": "stopped"}) == [(JOB_IN_STOPPED_SESSION, JOB)]
    assert {JOB_WITHOUT_SESSION, SESSION_WITHOUT_JOB, DEAD_SESSION} == MENDED


def test_a_session_whose_process_is_dead_is_drift_with_and_without_a_job() -> None:
    assert _find({}, {}, dead=True) == [(DEAD_SESSION, None), (JOB_WITHOUT_SESSION, JOB)]
    assert _find({"status": "completed"}, {"job_id": None}, dead=True) == [(DEAD_SESSION, None)]
    assert _find({"status": "completed"}, {"status": "archived"}, dead=True) == []


@pytest.mark.parametrize("status", ["completed", "error", "cancelled"])
def test_a_session_that_runs_for_a_job_that_has_ended_is_drift(status: str) -> None:
    assert _find({"status": status}, {"for_job": JOB}) == [(SESSION_WITHOUT_JOB, JOB)]
    # One that hosts several jobs goes on, and a stopped one is only kept.
    assert _find({"status": status}, {"job_id": None}) == []
    assert _find({"status": status}, {"for_job": JOB, "status": "stopped"}) == []


@pytest.mark.parametrize("status", ["completed", "error", "cancelled"])
def test_a_session_that_still_has_a_job_that_has_ended_is_told_and_not_mended(status: str) -> None:
    assert _find({"status": status}, {}) == [(SESSION_WITH_ENDED_JOB, JOB)]
    assert _find({"status": status}, {"status": "archived"}) == []
    assert _find({"status": status}, {}, dead=True) == [(DEAD_SESSION, None)]


def test_what_is_in_step_is_no_drift() -> None:
    assert _find({}, {"for_job": JOB}) == []
    assert _find({"status": "pending", "session": None}, {}) == []
    assert _find({}, {"status": "archived"}) == []
    # The reactor needs a moment to tell the registry of sessions.
    assert _find({"session": "not-known-yet"}, {}) == []
