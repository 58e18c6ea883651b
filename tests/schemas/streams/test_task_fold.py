"""Tasks: one record makes task and token, and the end of the task is the end of the token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.task.task_registry import TASK_STATES, TASK_TERMINAL, TASK_TRANSITIONS, TaskRow, TokenRow
from tests.schemas.hub_records import (
    HOUR_MS,
    TASK_TOKEN_ID,
    TASK_TOKEN_SHA256,
    asked,
    hub_told,
    task_creation,
    task_start,
    token_revocation,
)
from tests.schemas.job_records import SENDER, START_US, said
from tests.schemas.streams.task_model import TaskModel

pytestmark = pytest.mark.requirement("HH-04")

ENDS = {
    "task.completed": ("completed", {"result": "7 stars"}),
    "task.failed": ("failed", {"error": "no telescope"}),
    "task.cancelled": ("cancelled", {"reason": "it rains"}),
}
STARTED = {"pending": False, "running": True, "completed": True, "failed": True, "cancelled": True}


def told(entries: Entries, kind: str, body: dict[str, Any], **changed: Any) -> Settled:
    """Settle one record of the task."""
    return hub_told(entries, kind, body, **changed)


def in_state(state: str) -> Entries:
    """The entries of a task that is `state`; it has had a token unless it is pending."""
    records = [("task.started", task_start("first"))] if STARTED[state] else []
    records = records or [("task.created", task_creation("first"))]
    records += [(kind, asked("last", **said)) for kind, (after, said) in ENDS.items() if after == state]
    entries = Entries()
    for kind, body in records:
        settled = told(entries, kind, body)
        assert settled.verdict == "accepted"
    assert settled.status_after == state
    entries.take_writes()
    return entries


def task_row(settled: Settled) -> TaskRow:
    """The row of the task."""
    (row,) = (change.row for change in settled.changes if change.view == "registry_tasks")
    assert isinstance(row, TaskRow)
    return row


def token_row(settled: Settled) -> TokenRow:
    """The row of the token."""
    (row,) = (change.row for change in settled.changes if change.view == "registry_tokens")
    assert isinstance(row, TokenRow)
    return row


def test_a_task_that_was_created_waits_without_a_token() -> None:
    settled = told(Entries(), "task.created", task_creation())
    assert task_row(settled) == TaskRow(
        task_id="t1",
        status="pending",
        description="count the stars",
        agent_name="coder",
        token_id=None,
        session_name=None,
        result=None,
        error=None,
        submitted_by=SENDER,
        submitted_at=START_US,
        started_at=None,
        ended_at=None,
        ended_by=None,
    )
    assert len(settled.changes) == 1


@pytest.mark.requirement("HH-03")
def test_one_record_makes_the_task_and_its_token_and_sets_it_running() -> None:
    settled = told(Entries(), "task.started", task_start(session_name="s1"), offset=2)
    task, token = task_row(settled), token_row(settled)
    assert (task.status, task.token_id, task.session_name) == ("running", TASK_TOKEN_ID, "s1")
    assert task.submitted_at == task.started_at == START_US + 2000
    assert settled.status_after == "running"
    issued = START_US // 1000 + 2
    assert token == TokenRow(
        token_id=TASK_TOKEN_ID,
        token_sha256=TASK_TOKEN_SHA256,
        agent_name="coder",
        task_id="t1",
        capabilities=["read", "write"],
        status="active",
        issued=issued,
        expiry=issued + HOUR_MS,
        revoked_at=None,
        revoked_why=None,
    )
    assert [(change.view, change.key) for change in settled.changes] == [
        ("registry_tasks", "t1"),
        ("registry_tokens", TASK_TOKEN_ID),
    ]


@pytest.mark.requirement("HH-03")
def test_a_pending_task_starts_by_a_request_that_says_the_same_of_it_and_keeps_who_submitted_it() -> None:
    entries = in_state("pending")
    for other in ({"description": "count the moons"}, {"agent_name": "bo"}):
        settled = told(entries, "task.started", task_start(**other))
        assert (*said(settled), settled.status_after) == ("rejected", "seq_conflict", "pending")
    settled = told(entries, "task.started", task_start(), offset=3, sender="http/ann")
    row = task_row(settled)
    assert (row.status, row.submitted_by, row.submitted_at) == ("running", SENDER, START_US)
    assert (row.started_at, token_row(settled).issued) == (START_US + 3000, START_US // 1000 + 3)


@pytest.mark.requirement("CM-04")
@pytest.mark.parametrize("state", TASK_STATES)
def test_the_same_request_again_is_a_duplicate_and_every_other_start_a_conflict(state: str) -> None:
    entries = in_state(state)
    kind, body = ("task.started", task_start) if STARTED[state] else ("task.created", task_creation)
    assert said(told(entries, kind, body("first"))) == ("duplicate", None)
    assert said(told(entries, kind, body("first", description="else"))) == ("rejected", "seq_conflict")
    assert said(told(entries, "task.created", task_creation("third"))) == ("rejected", "seq_conflict")
    if STARTED[state]:
        other_token = task_start("first", token_sha256="0" * 64)
        assert said(told(entries, "task.started", other_token)) == ("rejected", "seq_conflict")
        assert said(told(entries, "task.started", task_start("third"))) == ("rejected", "seq_conflict")
    assert entries.take_writes() == {}


@pytest.mark.parametrize("wanted", TASK_STATES)
@pytest.mark.parametrize("state", TASK_STATES)
def test_exactly_the_transitions_of_the_life_cycle_are_possible(state: str, wanted: str) -> None:
    entries = in_state(state)
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "pending": ("task.created", task_creation("new")),
        "running": ("task.started", task_start("new")),
        **{after: (kind, asked("new", **fields)) for kind, (after, fields) in ENDS.items()},
    }
    settled = told(entries, *ways[wanted])
    if wanted in TASK_TRANSITIONS[state]:
        assert (*said(settled), settled.status_after) == ("accepted", None, wanted)
        return
    if wanted in ("pending", "running"):
        reason = "seq_conflict"
    else:
        reason = "after_terminal" if state in TASK_TERMINAL else "illegal_transition"
    assert (*said(settled), settled.status_after) == ("rejected", reason, state)
    assert (settled.changes, entries.take_writes()) == ((), {})


@pytest.mark.requirement("HH-02")
@pytest.mark.parametrize("kind", ENDS)
def test_the_end_of_a_task_is_the_revocation_of_its_token(kind: str) -> None:
    status, fields = ENDS[kind]
    settled = told(in_state("running"), kind, asked("end", **fields), ce_id="the end", offset=9)
    task, token = task_row(settled), token_row(settled)
    time_us = START_US + 9000
    assert (task.status, task.ended_at, task.ended_by) == (status, time_us, "the end")
    assert (task.result, task.error) == (fields.get("result"), fields.get("error", fields.get("reason")))
    assert (task.description, task.token_id) == ("count the stars", TASK_TOKEN_ID)
    assert (token.status, token.revoked_at, token.revoked_why) == ("revoked", time_us, f"task {status}")
    assert token.capabilities == ["read", "write"]


@pytest.mark.parametrize("kind", ENDS)
def test_an_end_that_comes_again_is_a_duplicate_and_another_one_too_late(kind: str) -> None:
    status, fields = ENDS[kind]
    entries = in_state(status)
    settled = told(entries, kind, asked("last", **fields))
    assert (*said(settled), settled.status_after) == ("duplicate", None, status)
    for body in (asked("last", **dict.fromkeys(fields, "else")), asked("last", **fields, more=1)):
        assert told(entries, kind, body).verdict == "rejected"
    assert said(told(entries, kind, asked("new", **fields))) == ("rejected", "after_terminal")
    assert entries.take_writes() == {}


def test_a_task_that_never_started_is_cancelled_without_a_token() -> None:
    entries = in_state("pending")
    settled = told(entries, "task.cancelled", asked("end"))
    row = task_row(settled)
    assert (row.status, row.token_id, row.error, row.started_at) == ("cancelled", None, None, None)
    assert len(settled.changes) == 1
    assert said(told(entries, "task.started", task_start())) == ("rejected", "seq_conflict")


def test_a_task_that_nobody_submitted_is_an_unknown_stream() -> None:
    for kind, (_, fields) in ENDS.items():
        assert said(told(Entries(), kind, asked(**fields))) == ("rejected", "unknown_stream")
    assert said(told(Entries(), "token.revoked", token_revocation())) == ("rejected", "unknown_stream")


@pytest.mark.requirement("HH-02")
def test_a_revoked_token_stays_so_while_its_task_goes_on_and_ends() -> None:
    entries = in_state("running")
    settled = told(entries, "token.revoked", token_revocation(reason="lost"), offset=4)
    assert settled.status_after == "running"
    assert [change.view for change in settled.changes] == ["registry_tokens"]
    token = token_row(settled)
    assert (token.status, token.revoked_at, token.revoked_why) == ("revoked", START_US + 4000, "lost")
    for request in ("q3", "another"):
        again = told(entries, "token.revoked", token_revocation(request, reason="lost"))
        assert (*said(again), again.status_after, again.changes) == ("duplicate", None, "running", ())
    other = told(entries, "token.revoked", token_revocation(reason="found"))
    assert said(other) == ("rejected", "seq_conflict")
    end = told(entries, "task.completed", asked("end", result="x"))
    assert [change.view for change in end.changes] == ["registry_tasks"]
    assert told(entries, "token.revoked", token_revocation("late")).verdict == "duplicate"


@pytest.mark.requirement("HH-02")
@pytest.mark.parametrize("state", TASK_STATES)
def test_a_token_that_the_task_does_not_have_is_unknown(state: str) -> None:
    entries = in_state(state)
    settled = told(entries, "token.revoked", token_revocation(token_id="0" * 12))
    assert (*said(settled), settled.status_after) == ("rejected", "unknown_stream", state)
    has_one = told(entries, "token.revoked", token_revocation()).verdict != "rejected"
    assert has_one == STARTED[state]


REQUESTS = st.sampled_from([f"q{n}" for n in range(6)])
STEPS = st.one_of(
    st.builds(lambda q: ("task.created", task_creation(q)), REQUESTS),
    st.builds(
        lambda q, d, n: ("task.started", task_start(q, description=d, expiry_ms=n)),
        REQUESTS,
        st.sampled_from(("count the stars", "count the moons")),
        st.sampled_from((1, HOUR_MS)),
    ),
    st.builds(
        lambda q, t: ("token.revoked", token_revocation(q, token_id=t)),
        REQUESTS,
        st.sampled_from((TASK_TOKEN_ID, TASK_TOKEN_ID, "0" * 12)),
    ),
    st.builds(lambda q, kind: (kind, asked(q, **ENDS[kind][1])), REQUESTS, st.sampled_from(sorted(ENDS))),
)


@pytest.mark.requirement("HH-02")
@given(st.lists(STEPS, max_size=20))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_the_end_is_final_and_the_token_lives_while_the_task_runs(
    steps: list[tuple[str, dict[str, Any]]],
) -> None:
    model, entries = TaskModel(), Entries()
    task: TaskRow | None = None
    token: TokenRow | None = None
    was_revoked = False
    for offset, (kind, body) in enumerate(steps):
        before = dict(entries.stored())
        ce_id = f"{kind} {body['request_id']}"
        settled = told(entries, kind, body, ce_id=ce_id, offset=offset)
        assert said(settled) == model.settle(kind, ce_id, body), (offset, kind)
        assert settled.status_after == model.status
        assert (entries.stored() == before) == (settled.verdict != "accepted") == (settled.changes == ())
        was_final = task is not None and task.status in TASK_TERMINAL
        assert not (was_final and settled.changes)
        for change in settled.changes:
            if isinstance(change.row, TaskRow):
                task = change.row
            elif isinstance(change.row, TokenRow):
                token = change.row
        was_revoked |= kind == "token.revoked" and settled.verdict == "accepted"
        is_running = task is not None and task.status == "running"
        assert (token is not None and token.status == "active") == (is_running and not was_revoked)
        assert (None if token is None else token.status) == model.token
        assert (None if task is None else task.status) == model.status


def test_a_finished_task_keeps_no_text_and_no_capability() -> None:
    words = ("stars", "telescope", "rains", "write")
    running = repr(in_state("running").stored())
    assert "stars" in running
    assert "write" in running
    for state in TASK_TERMINAL:
        kept = repr(in_state(state).stored())
        assert not [word for word in words if word in kept]
        assert len(kept) < 600
