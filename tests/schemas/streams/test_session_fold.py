"""The fold of a session agrees with the model of JE-14, and the records that doors make say what they mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.fold import memories
from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.fold import settle
from schemas.streams.session import sessions
from tests.schemas.job_records import JOB_ID, KEYRING, SENDER, document_record, said
from tests.schemas.stream_records import SESSION_KEY, accepted_and_refolded, as_read, assignment, creation
from tests.schemas.streams.session_model import Said, SessionModel

pytestmark = pytest.mark.requirement("JE-14")

JOBS = st.sampled_from(("0000000a", "0000000b"))
REQUESTS = st.sampled_from([f"q{n}" for n in range(12)])
Sent = tuple[str, str, dict[str, Any]]


@st.composite
def commands(draw: st.DrawFn) -> Sent:
    """A record's type, its CloudEvents id and a body that is right in itself."""
    kind = draw(
        st.sampled_from(("created", "stopped", "stopped", "resumed", "job_assigned", "job_ended", "job_ended"))
    )
    request, job = draw(REQUESTS), draw(JOBS)
    if kind == "job_assigned":
        return kind, f"assigned {job}", assignment(job)
    if kind == "job_ended":
        return (
            kind,
            f"ended {job} {request}",
            assignment(job, outcome=draw(st.sampled_from(("completed", "error")))),
        )
    body = creation(request)
    if kind == "created":
        optional = {"description": "an agent", "host": "h1", "handle": "tmux/t/s1", "for_job": job}
    elif kind == "stopped":
        mode = draw(st.sampled_from(("stop", "soft", "soft", "hard")))
        optional = {"mode": mode, "reason": "lunch", "capture_id": "cap1", "graceful": True}
    else:
        optional = {"host": "h2", "handle": "process/7/99"}
    body |= {name: optional[name] for name in draw(st.sets(st.sampled_from(sorted(optional))))}
    return kind, request, body


def seen(settled: Settled) -> Said:
    """The fold's answer in the model's words."""
    rows = [change.row for change in settled.changes]
    assert {(change.view, change.key) for change in settled.changes} <= {("registry_sessions", "s1")}
    row = msgspec.structs.asdict(rows[0]) if rows and rows[0] else None
    return Said(settled.verdict, settled.reason, settled.status_after, row)


def assert_agree(sent: list[Sent], kept: int) -> None:
    """Settle `sent` by both and compare after every record."""
    model, entries = SessionModel("s1", kept), Entries()
    for offset, (kind, ce_id, body) in enumerate(sent):
        record = document_record(body, f"session.{kind}", key=SESSION_KEY, ce_id=ce_id, offset=offset)
        before = dict(entries.stored())
        settled = settle(record, entries, KEYRING, Entries())
        assert seen(settled) == model.settle(kind, ce_id, SENDER, body, record.logged_at_us), (offset, kind)
        assert (dict(entries.stored()) == before) == (settled.verdict != "accepted")


SEQUENCES = st.builds(
    lambda first, rest: first + rest,
    st.sampled_from(
        [[("created", "c", creation("c"))], [("created", "c", creation("c", for_job="0000000a"))], []]
    ),
    st.lists(commands(), max_size=25),
)


@given(SEQUENCES)
@settings(max_examples=200, deadline=None)
def test_the_fold_says_of_every_record_of_a_session_what_the_model_says(sent: list[Sent]) -> None:
    assert_agree(sent, kept=256)


@given(SEQUENCES)
@settings(max_examples=100, deadline=None)
def test_the_fold_forgets_the_requests_that_the_model_forgets(sent: list[Sent]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories, "REQUESTS_KEPT", 3)
        patch.setattr(memories, "REQUESTS_INSIDE", 2)
        assert_agree(sent, kept=3)


def in_state(state: str, **changed: Any) -> Entries:
    """The entries of a session that is `state`."""
    modes = {"running": None, "stopped": "stop", "archived": "soft", "terminated": "hard"}
    entries, records = Entries(), [("created", creation("first", **changed))]
    if modes[state] is not None:
        records.append(("stopped", creation("second", mode=modes[state])))
    for kind, body in records:
        assert told(entries, kind, body).verdict == "accepted"
    return entries


def told(
    entries: Entries, kind: str, body: dict[str, Any], ce_id: str | None = None, offset: int = 0
) -> Settled:
    """Settle one record. Without `ce_id` its id is the request's id."""
    ce_id = ce_id or body.get("request_id") or f"{kind} {body}"
    record = document_record(body, f"session.{kind}", key=SESSION_KEY, ce_id=ce_id, offset=offset)
    return settle(record, entries, KEYRING, Entries())


def row_after(settled: Settled) -> sessions.SessionRow:
    """The row of the registry."""
    (change,) = settled.changes
    assert isinstance(change.row, sessions.SessionRow)
    return change.row


@pytest.mark.parametrize("state", sessions.SESSION_STATES)
def test_exactly_the_transitions_of_the_life_cycle_are_possible(state: str) -> None:
    ways = {"stop": "stopped", "soft": "archived", "hard": "terminated", None: "running"}
    reached = set()
    for mode, wanted in ways.items():
        kind = "resumed" if mode is None else "stopped"
        settled = told(in_state(state), kind, creation("new", **({} if mode is None else {"mode": mode})))
        if settled.verdict == "accepted":
            assert settled.status_after == wanted
            reached.add(wanted)
    assert reached == sessions.SESSION_TRANSITIONS[state]


@pytest.mark.parametrize("state", sessions.SESSION_STATES)
def test_the_same_request_again_is_a_duplicate_and_with_other_content_a_conflict(state: str) -> None:
    entries = in_state(state)
    assert said(told(entries, "created", creation("first"))) == ("duplicate", None)
    assert said(told(entries, "created", creation("first", host="h"))) == ("rejected", "seq_conflict")
    assert said(told(entries, "resumed", creation("first", host="h"))) == ("rejected", "seq_conflict")
    assert said(told(entries, "created", creation("third"))) == ("rejected", "seq_conflict")


def test_a_terminated_session_stays_so_and_its_name_is_not_used_again() -> None:
    entries = in_state("terminated")
    for kind, body in (
        ("resumed", creation("new")),
        ("stopped", creation("new", mode="hard")),
        ("job_assigned", assignment()),
    ):
        settled = told(entries, kind, body)
        assert (*said(settled), settled.status_after) == ("rejected", "after_terminal", "terminated")
    assert said(told(entries, "created", creation("new"))) == ("rejected", "seq_conflict")
    assert row_after(told(entries, "job_ended", assignment(outcome="error"))).status == "terminated"


def test_a_session_that_nobody_created_is_known_from_the_job_that_it_picked() -> None:
    entries = Entries()
    for kind, body in (
        ("stopped", creation()),
        ("resumed", creation()),
        ("job_ended", assignment(outcome="error")),
    ):
        assert said(told(entries, kind, body)) == ("rejected", "unknown_stream")
    found = row_after(told(entries, "job_assigned", assignment()))
    assert (found.status, found.job_id, found.created_by, found.handle) == ("running", JOB_ID, SENDER, None)
    assert said(told(entries, "job_assigned", assignment())) == ("duplicate", None)


def test_what_a_stop_said_stands_in_the_row_until_the_session_runs_again() -> None:
    entries = in_state("running", host="h1", handle="tmux/t/s1")
    stop = creation("q", mode="stop", reason="lunch", capture_id="cap1", graceful=True)
    found = row_after(told(entries, "stopped", stop))
    assert (found.status, found.reason, found.capture_id) == ("stopped", "lunch", "cap1")
    found = row_after(told(entries, "resumed", creation("r", handle="process/7/99")))
    assert (found.status, found.reason, found.stopped_at) == ("running", None, None)
    assert (found.host, found.handle) == ("h1", "process/7/99")


BODIES = (
    sessions.SessionCreation(session="s1", request_id="q1", handle="tmux/t/s1", for_job=JOB_ID),
    sessions.SessionStop(session="s1", request_id="q2", mode="soft", reason="a\tb"),
    sessions.SessionResumption(session="s1", request_id="q3"),
    sessions.SessionJobAssigned(session="s1", job_id=JOB_ID),
    sessions.SessionJobEnded(session="s1", job_id=JOB_ID, outcome="error"),
)


def test_every_record_that_a_door_makes_is_accepted_and_refolded() -> None:
    bodies = (BODIES[0], BODIES[3], BODIES[1], BODIES[2], BODIES[4])
    sent = [body.record(door="http", principal="ann") for body in bodies]
    rows, _ = accepted_and_refolded(as_read(made, offset) for offset, made in enumerate(sent))
    assert {(row.wire, row.principal) for row in rows} == {(None, "ann")}


def made(body: Any, **changed: Any) -> str:
    """The id of the record that a door makes of a body."""
    return body.record(**{"door": "http", "principal": "ann", **changed}).ce_id


def test_the_id_of_a_request_names_it_and_not_its_content() -> None:
    """Else the same request with other content would be another request, and be carried out."""
    stop = sessions.SessionStop(session="s1", request_id="q1")
    assert made(stop) == made(sessions.SessionStop(session="s1", request_id="q1", mode="hard"))
    others = [
        made(sessions.SessionStop(session="s1", request_id="q2")),
        made(sessions.SessionStop(session="s2", request_id="q1")),
        made(sessions.SessionResumption(session="s1", request_id="q1")),
        made(stop, principal="bo"),
        made(stop, door="mcp"),
    ]
    assert made(stop) not in others
    assert len(set(others)) == len(others)
    assert made(stop, ce_id="told") == "told"


def test_what_follows_from_a_job_is_told_apart_by_all_that_it_says() -> None:
    ended = [sessions.SessionJobEnded(session="s1", job_id=JOB_ID, outcome=o) for o in ("completed", "error")]  # type: ignore[arg-type]
    assert len({made(body) for body in (*ended, sessions.SessionJobAssigned(session="s1", job_id=JOB_ID))}) == 3


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("created", creation(handle="ssh/x")),
        ("created", creation(handle="tmux/a b")),
        ("created", creation(handle="tmux/" + "x" * 256)),
        ("created", creation(for_job="AB12CD34")),
        ("created", creation(host="a/b")),
        ("created", creation(description="x" * 501)),
        ("created", creation(description="bell \u0007")),
        ("created", creation(more=1)),
        ("created", creation("../x")),
        ("created", {"schema_version": 1, "session": "s1"}),
        ("stopped", creation(mode="kill")),
        ("stopped", creation(mode=None)),
        ("stopped", creation(graceful="yes")),
        ("stopped", creation(capture_id="a/b")),
        ("resumed", creation(mode="stop")),
        ("job_assigned", assignment("x")),
        ("job_assigned", assignment(outcome="error")),
        ("job_ended", assignment()),
        ("job_ended", assignment(outcome="running")),
        ("created", {**creation(), "session": "s2"}),
        ("painted", creation()),
    ],
)
def test_a_body_that_its_model_refuses_is_malformed(kind: str, body: dict[str, Any]) -> None:
    for entries in (Entries(), in_state("running")):
        assert said(told(entries, kind, body, ce_id="new")) == ("rejected", "malformed")


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("name", ["", "../x", "a/b", "#", "x" * 129])
def test_no_record_is_made_for_a_session_that_is_no_name(name: str) -> None:
    with pytest.raises(ValidationError):
        sessions.SessionCreation(session=name, request_id="q1")
