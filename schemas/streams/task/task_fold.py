"""The fold of `task/<id>` (HH-02 to HH-04): a task and the one token that it has while it runs.

One entry, `task`. A finished task keeps it as its tombstone, without the texts: nothing makes a row of it
again. Of the token only the hash is anywhere.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.fold import life_cycles as states
from schemas.fold.entries import Entries
from schemas.fold.request_memory import RequestMemory
from schemas.fold.settled import Change, Outcome, accepted, duplicate, rejected
from schemas.fold.view_rows import REGISTRY_TASKS, REGISTRY_TOKENS, TaskRow, TokenRow
from schemas.streams.principal.principals import ACTIVE, REVOKED
from schemas.streams.task.task_registry import token_id_of
from schemas.wire.record import (
    TASK_CANCELLED,
    TASK_COMPLETED,
    TASK_CREATED,
    TASK_FAILED,
    TASK_STARTED,
    TOKEN_REVOKED,
    Envelope,
    Record,
)
from schemas.wire.verdicts import ACCEPTED, AFTER_TERMINAL, ILLEGAL_TRANSITION, SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
_TASK: Final = "task"
_END_BY_TYPE: Final = {
    TASK_COMPLETED: states.COMPLETED,
    TASK_FAILED: states.FAILED,
    TASK_CANCELLED: states.CANCELLED,
}


class TokenEntry(msgspec.Struct, array_like=True, gc=False):
    """The task's token. `issued`, `expiry`: milliseconds since 1970 UTC."""

    sha256: str
    capabilities: list[str]
    issued: int
    expiry: int
    revoked_at: int | None = None
    revoked_why: str | None = None


class TaskEntry(msgspec.Struct, array_like=True, gc=False):
    """All that is known of a task; the fields of its row, its token, and the requests that were settled."""

    version: int
    status: str
    description: str
    agent_name: str
    submitted_by: str
    submitted_at: int
    requests: RequestMemory
    session_name: str | None = None
    started_at: int | None = None
    token: TokenEntry | None = None
    image: str | None = None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(TaskEntry).decode


def settle_task(
    record: Record, envelope: Envelope, name: str, body: dict[str, Any], entries: Entries
) -> Outcome:
    """Settle one record of the task's stream whose body passed the checks of its wire model."""
    raw = entries.get(_TASK)
    if raw is None:
        if envelope.type not in (TASK_CREATED, TASK_STARTED):
            return rejected(UNKNOWN_STREAM, "no task with this id")
        task = TaskEntry(
            version=ENTRY_VERSION,
            status=states.PENDING,
            description=body["description"],
            agent_name=body["agent_name"],
            submitted_by=f"{envelope.door}/{envelope.principal}",
            submitted_at=record.logged_at_us,
            requests=RequestMemory(),
        )
    else:
        task = _decode(raw)
        answer = _identity_fault(envelope, body, task)
        if answer is not None:
            return answer
    outcome = _apply(record, envelope, name, body, task)
    if outcome.verdict == ACCEPTED:
        task.requests.add(envelope.ce_id, body)
        entries.put(_TASK, _encode(task))
    return outcome


def _identity_fault(envelope: Envelope, body: dict[str, Any], task: TaskEntry) -> Outcome | None:
    """What is settled by which task, token and request the record names, before any rule of the life cycle."""
    status, token = task.status, task.token
    if envelope.type == TOKEN_REVOKED and (token is None or token_id_of(token.sha256) != body["token_id"]):
        return rejected(UNKNOWN_STREAM, "the task has no such token", status)
    seen = task.requests.seen(envelope.ce_id, body)
    if seen == "same":
        return duplicate(status)
    if seen == "other":
        return rejected(SEQ_CONFLICT, "this request id was used with other content", status)
    if envelope.type == TASK_CREATED:
        return rejected(SEQ_CONFLICT, "a task with this id exists already", status)
    if envelope.type == TASK_STARTED:
        if status != states.PENDING:
            return rejected(SEQ_CONFLICT, "a task with this id exists already", status)
        if (task.description, task.agent_name) != (body["description"], body["agent_name"]):
            return rejected(SEQ_CONFLICT, "the task was created with another description or agent", status)
    return None


def _apply(record: Record, envelope: Envelope, name: str, body: dict[str, Any], task: TaskEntry) -> Outcome:
    """Change `task`, or say why not."""
    kind, token = envelope.type, task.token
    if kind == TASK_CREATED:
        return accepted(task.status, (_task_change(name, task),))
    if kind == TASK_STARTED:
        return _start(record, name, body, task)
    if kind != TOKEN_REVOKED:
        return _end(record, envelope, name, body, task)
    # A second revocation has no effect, whoever asks for it.
    if token is None or token.revoked_at is not None:
        return duplicate(task.status)
    _revoke(record, token, body.get("reason") or None)
    return accepted(task.status, (_token_change(name, task.agent_name, token),))


def _start(record: Record, name: str, body: dict[str, Any], task: TaskEntry) -> Outcome:
    issued = record.logged_at_us // 1000
    token = TokenEntry(body["token_sha256"], body["capabilities"], issued, issued + body["expiry_ms"])
    task.status = states.RUNNING
    task.token = token
    task.session_name = body.get("session_name")
    task.image = body.get("image")
    task.started_at = record.logged_at_us
    changes = (_task_change(name, task), _token_change(name, task.agent_name, token))
    return accepted(task.status, changes)


def _end(record: Record, envelope: Envelope, name: str, body: dict[str, Any], task: TaskEntry) -> Outcome:
    status, token = task.status, task.token
    wanted = _END_BY_TYPE[envelope.type]
    if status in states.TASK_TERMINAL:
        return rejected(AFTER_TERMINAL, f"the task is {status}", status)
    if wanted not in states.TASK_TRANSITIONS[status]:
        return rejected(ILLEGAL_TRANSITION, f"the task is {status}", status)
    task.status = wanted
    row = msgspec.structs.replace(
        _row(name, task),
        result=body.get("result"),
        error=body.get("error") or body.get("reason") or None,
        ended_at=record.logged_at_us,
        ended_by=envelope.ce_id,
    )
    changes = [Change(REGISTRY_TASKS, name, row)]
    if token is not None:
        if token.revoked_at is None:
            _revoke(record, token, f"task {wanted}")
            changes.append(_token_change(name, task.agent_name, token))
        token.capabilities = []
    task.description = ""
    return accepted(wanted, tuple(changes))


def _revoke(record: Record, token: TokenEntry, why: str | None) -> None:
    token.revoked_at = record.logged_at_us
    token.revoked_why = why


def _task_change(name: str, task: TaskEntry) -> Change:
    return Change(REGISTRY_TASKS, name, _row(name, task))


def _row(name: str, task: TaskEntry) -> TaskRow:
    """The row of a task that has not ended."""
    return TaskRow(
        task_id=name,
        status=task.status,
        description=task.description,
        agent_name=task.agent_name,
        token_id=None if task.token is None else token_id_of(task.token.sha256),
        session_name=task.session_name,
        result=None,
        error=None,
        submitted_by=task.submitted_by,
        submitted_at=task.submitted_at,
        started_at=task.started_at,
        ended_at=None,
        ended_by=None,
        image=task.image,
    )


def _token_change(name: str, agent_name: str, token: TokenEntry) -> Change:
    token_id = token_id_of(token.sha256)
    row = TokenRow(
        token_id=token_id,
        token_sha256=token.sha256,
        agent_name=agent_name,
        task_id=name,
        capabilities=token.capabilities,
        status=ACTIVE if token.revoked_at is None else REVOKED,
        issued=token.issued,
        expiry=token.expiry,
        revoked_at=token.revoked_at,
        revoked_why=token.revoked_why,
    )
    return Change(REGISTRY_TOKENS, token_id, row)
