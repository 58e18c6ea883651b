"""The records about tasks: which bodies are good, and of a token no more than its hash is anywhere."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import AppliedChange
from schemas.streams.fold import settle
from schemas.streams.task import task_registry as tasks
from schemas.tables.ledger import ledger_row
from tests.schemas.hub_records import (
    HOUR_MS,
    TASK_KEY,
    TASK_TOKEN_ID,
    TASK_TOKEN_SHA256,
    asked,
    hub_told,
    task_creation,
    task_start,
    token_revocation,
)
from tests.schemas.job_records import KEYRING, said
from tests.schemas.stream_records import accepted_and_refolded, as_read

pytestmark = pytest.mark.requirement("HH-11")


def running() -> Entries:
    """The entries of a task that runs."""
    entries = Entries()
    assert hub_told(entries, "task.started", task_start("first")).verdict == "accepted"
    return entries


BODIES = (
    tasks.TaskCreation(task_id="t1", request_id="q1", description="count\tthe stars", agent_name="coder"),
    tasks.TaskStart(
        task_id="t1",
        request_id="q1",
        description="count\tthe stars",
        agent_name="coder",
        capabilities=["read"],
        token_sha256=TASK_TOKEN_SHA256,
        expiry_ms=HOUR_MS,
    ),
    tasks.TokenRevocation(task_id="t1", request_id="q1", token_id=TASK_TOKEN_ID),
    tasks.TaskCompletion(task_id="t1", request_id="q1", result="bell \a\0"),
)
LAST = (
    tasks.TaskFailure(task_id="t1", request_id="q1", error="no telescope"),
    tasks.TaskCancellation(task_id="t1", request_id="q1", reason="it rains"),
)


def test_every_record_that_a_door_makes_is_accepted_and_refolded() -> None:
    for end in (BODIES[3], *LAST):
        sent = [body.record(door="http", principal="ann") for body in (*BODIES[:3], end)]
        rows, _ = accepted_and_refolded(as_read(made, offset) for offset, made in enumerate(sent))
        assert {(row.wire, row.principal) for row in rows} == {(None, "ann")}


def test_the_id_of_a_request_names_it_and_not_its_content() -> None:
    def made(body: Any, **changed: Any) -> str:
        return body.record(**{"door": "http", "principal": "ann", **changed}).ce_id

    end = LAST[1]
    assert made(end) == made(tasks.TaskCancellation(task_id="t1", request_id="q1"))
    others = [
        *(made(body) for body in (*BODIES, LAST[0])),
        made(tasks.TaskCancellation(task_id="t1", request_id="q2")),
        made(tasks.TaskCancellation(task_id="t2", request_id="q1")),
        made(end, principal="bo"),
        made(end, door="mcp"),
    ]
    assert made(end) not in others
    assert len(set(others)) == len(others)
    assert made(end, ce_id="told") == "told"


@pytest.mark.requirement("CM-05")
@pytest.mark.requirement("HH-02")
def test_no_more_than_the_hash_of_a_token_is_in_any_record_row_entry_or_change() -> None:
    token = "3f2b8c1e-canary-4a57-9a3e-5d2f6f0e7b11"
    sha256 = hashlib.sha256(token.encode()).hexdigest()
    assert tasks.token_id_of(sha256) == sha256[:12]
    start = BODIES[1].model_copy(update={"token_sha256": sha256})
    revocation = tasks.TokenRevocation(task_id="t1", request_id="q1", token_id=tasks.token_id_of(sha256))
    entries, seen = Entries(), []
    for offset, body in enumerate((BODIES[0], start, start, revocation, BODIES[3])):
        record = as_read(body.record(door="http", principal="ann"), offset)
        settled = settle(record, entries, KEYRING, Entries())
        assert settled.verdict in ("accepted", "duplicate")
        changes = [AppliedChange(c.view, c.key, offset, c.row) for c in settled.changes]
        row = ledger_row(record, settled, KEYRING, changes, entries.take_writes(), offset)
        seen.append(repr((record, settled, row, entries.stored())) + msgspec.json.encode(changes).decode())
    assert not [one for one in seen if token in one or "canary" in one]
    assert sum(sha256 in one for one in seen) >= 4


@pytest.mark.requirement("HH-02")
@pytest.mark.parametrize("field", ["token", "bearer", "data"])
def test_a_body_that_carries_a_token_is_malformed_and_the_reason_does_not_repeat_it(field: str) -> None:
    entries = Entries()
    settled = hub_told(entries, "task.started", task_start(**{field: "canary"}))
    assert said(settled) == ("rejected", "malformed")
    assert "canary" not in repr(settled)
    assert entries.stored() == {}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("task.created", task_creation(description="")),
        ("task.created", task_creation(description="x" * 32_001)),
        ("task.created", task_creation(description="bell \a")),
        ("task.created", task_creation(description=None)),
        ("task.created", task_creation(agent_name="a/b")),
        ("task.created", task_creation("a b")),
        ("task.created", task_creation(token_sha256=TASK_TOKEN_SHA256)),
        ("task.created", asked()),
        ("task.started", task_creation()),
        ("task.started", task_start(token_sha256=TASK_TOKEN_SHA256.upper())),
        ("task.started", task_start(token_sha256=TASK_TOKEN_SHA256 + "\n")),
        ("task.started", task_start(token_sha256=TASK_TOKEN_ID)),
        ("task.started", task_start(capabilities=["read", "read"])),
        ("task.started", task_start(capabilities=[f"c{n}" for n in range(65)])),
        ("task.started", task_start(capabilities=["a b"])),
        ("task.started", task_start(capabilities="read")),
        ("task.started", task_start(capabilities=[7])),
        ("task.started", task_start(expiry_ms=0)),
        ("task.started", task_start(expiry_ms=7 * 24 * HOUR_MS + 1)),
        ("task.started", task_start(expiry_ms=True)),
        ("task.started", task_start(expiry_ms=1.5)),
        ("task.started", task_start(session_name="a/b")),
        ("task.completed", asked()),
        ("task.completed", asked(result=None)),
        ("task.completed", asked(result={"stars": 7})),
        ("task.completed", asked(result="\u00e9" * 32768 + "x")),
        ("task.failed", asked()),
        ("task.failed", asked(error="x" * 2001)),
        ("task.failed", asked(error="bell \a")),
        ("task.cancelled", asked(reason="x" * 501)),
        ("task.cancelled", asked(result="x")),
        ("token.revoked", asked()),
        ("token.revoked", token_revocation(token_id=TASK_TOKEN_SHA256)),
        ("task.cancelled", {**asked(), "task_id": "t2"}),
        ("task.painted", asked()),
    ],
)
def test_a_body_that_its_model_refuses_is_malformed(kind: str, body: dict[str, Any]) -> None:
    for entries in (Entries(), running()):
        assert said(hub_told(entries, kind, body, ce_id="new", key=TASK_KEY)) == ("rejected", "malformed")


def test_the_largest_bodies_are_accepted() -> None:
    start = task_start(
        description="x" * 32_000, capabilities=[f"c{n}" for n in range(64)], expiry_ms=7 * 24 * HOUR_MS
    )
    entries = Entries()
    assert said(hub_told(entries, "task.started", start)) == ("accepted", None)
    result = "\u00e9" * 32768
    (row, _) = (change.row for change in hub_told(entries, "task.completed", asked(result=result)).changes)
    assert isinstance(row, tasks.TaskRow)
    assert row.result == result
    assert said(hub_told(running(), "task.failed", asked("end", error="x" * 2000))) == ("accepted", None)
    assert said(hub_told(Entries(), "task.started", task_start(capabilities=[], expiry_ms=1))) == (
        "accepted",
        None,
    )


def test_a_result_that_is_no_text_is_refused_by_its_model() -> None:
    with pytest.raises(ValidationError, match="surrogate"):
        tasks.TaskCompletion(task_id="t1", request_id="q1", result="\ud800")


@pytest.mark.requirement("CM-01")
@pytest.mark.parametrize("name", ["", "../x", "a/b", "#", "x" * 129])
def test_no_record_is_made_for_a_task_that_is_no_name(name: str) -> None:
    with pytest.raises(ValidationError):
        tasks.TaskCancellation(task_id=name, request_id="q1")
