"""The fold of the stream `task/<id>`: a task of the hub, and the token of its agent (HH-02 to HH-04).

The state is the entry `task`, and older requests in `requests/<hex digits>`. It remains after the task has
ended, without the description and the token's capabilities, which no later row needs. The token is known only
by its hash.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.fold.entries import StructEntries
from schemas.fold.memories import RequestChunk, RequestMemory
from schemas.fold.settled import Change, Outcome, accepted, changed, duplicate, rejected
from schemas.fold.stream_kind import CANCELLED, COMPLETED, PENDING, RUNNING, FoldInput, StreamKind, wrong_state
from schemas.fold.view_rows import row_maker
from schemas.streams.principal.principals import ACTIVE, REVOKED
from schemas.streams.task.task_registry import (
    FAILED,
    TASK_CANCELLED,
    TASK_COMPLETED,
    TASK_CREATED,
    TASK_FAILED,
    TASK_MODELS,
    TASK_STARTED,
    TASK_TRANSITIONS,
    TOKEN_REVOKED,
    TaskRow,
    TokenRow,
    token_id_of,
)
from trunkline_agent.wire.ids import TASK
from trunkline_agent.wire.verdicts import ACCEPTED, SEQ_CONFLICT, UNKNOWN_STREAM

ENTRY_VERSION: Final = 1
_NOT_ENDED: Final = dict.fromkeys(("result", "error", "ended_at", "ended_by"))
_END_BY_TYPE: Final = {
    TASK_COMPLETED: COMPLETED,
    TASK_FAILED: FAILED,
    TASK_CANCELLED: CANCELLED,
}


class TokenEntry(msgspec.Struct, array_like=True, gc=False):
    """The token of a task's agent, as part of `TaskEntry`. Only its hash is known.

    `issued` and `expiry` are milliseconds since 1970 UTC, `revoked_at` is microseconds, or `None`.
    """

    sha256: str
    capabilities: list[str]
    issued: int
    expiry: int
    revoked_at: int | None = None
    revoked_why: str | None = None


class TaskEntry(msgspec.Struct, array_like=True, gc=False):
    """The stream state of a task: the fields of its row, its token, and a memory of accepted requests.

    `token` is `None` until the task starts. Times are in microseconds since 1970 UTC.
    """

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


_TASK: Final = StructEntries("task", TaskEntry)
_REQUESTS: Final = StructEntries("requests/", RequestChunk)
_task_row: Final = row_maker(TaskRow, TaskEntry)
_token_row: Final = row_maker(TokenRow, TokenEntry)


def settle_task(given: FoldInput) -> Outcome:
    """Settle a record of `task/<id>`: update the stream state, return verdict and changed rows.

    The record creates, starts or ends the task, or revokes its token. `schemas.streams.fold.settle` calls this
    function with a checked body. The changes of the stream state, `given.entries`, count only if the record is
    accepted.
    """
    task = _TASK.read(given.entries)
    if task is None:
        if given.type not in (TASK_CREATED, TASK_STARTED):
            return rejected(UNKNOWN_STREAM, "no task with this id")
        task = TaskEntry(
            version=ENTRY_VERSION,
            status=PENDING,
            description=given.body["description"],
            agent_name=given.body["agent_name"],
            submitted_by=given.sender,
            submitted_at=given.now_us,
            requests=RequestMemory(),
        )
    else:
        answer = _identity_fault(given, task)
        if answer is not None:
            return answer
    outcome = _apply(given, task)
    if outcome.verdict == ACCEPTED:
        task.requests.add(given, _REQUESTS)
        _TASK.write(given.entries, task)
    return outcome


def _identity_fault(given: FoldInput, task: TaskEntry) -> Outcome | None:
    """Return the outcome if the token is wrong, the request is repeated or the task conflicts, else `None`."""
    status, token, body = task.status, task.token, given.body
    if given.type == TOKEN_REVOKED and (token is None or token_id_of(token.sha256) != body["token_id"]):
        return rejected(UNKNOWN_STREAM, "the task has no such token", status)
    repeated = task.requests.repeated(given, _REQUESTS, status)
    if repeated is not None:
        return repeated
    is_start = given.type == TASK_STARTED
    if given.type == TASK_CREATED or (is_start and RUNNING not in TASK_TRANSITIONS[status]):
        return rejected(SEQ_CONFLICT, "a task with this id exists already", status)
    if is_start and (task.description, task.agent_name) != (body["description"], body["agent_name"]):
        return rejected(SEQ_CONFLICT, "the task was created with another description or agent", status)
    return None


def _apply(given: FoldInput, task: TaskEntry) -> Outcome:
    """Change `task`, or return the rejection."""
    token = task.token
    if given.type == TASK_CREATED:
        return accepted(task.status, (_task_change(given.name, task),))
    if given.type == TASK_STARTED:
        return _start(given, task)
    if given.type != TOKEN_REVOKED:
        return _end(given, task)
    # A second revocation has no effect.
    if token is None or token.revoked_at is not None:
        return duplicate(task.status)
    _revoke(given, token, given.body.get("reason") or None)
    return accepted(task.status, (_token_change(given.name, task.agent_name, token),))


def _start(given: FoldInput, task: TaskEntry) -> Outcome:
    body, issued = given.body, given.now_us // 1000
    token = TokenEntry(body["token_sha256"], body["capabilities"], issued, issued + body["expiry_ms"])
    task.status = RUNNING
    task.token = token
    task.session_name = body.get("session_name")
    task.image = body.get("image")
    task.started_at = given.now_us
    changes = (_task_change(given.name, task), _token_change(given.name, task.agent_name, token))
    return accepted(task.status, changes)


def _end(given: FoldInput, task: TaskEntry) -> Outcome:
    token, body = task.token, given.body
    wanted = _END_BY_TYPE[given.type]
    if wanted not in TASK_TRANSITIONS[task.status]:
        return wrong_state(TASK_TRANSITIONS, task.status, "task")
    task.status = wanted
    ended = _task_change(
        given.name,
        task,
        result=body.get("result"),
        error=body.get("error") or body.get("reason") or None,
        ended_at=given.now_us,
        ended_by=given.envelope.ce_id,
    )
    changes = [ended]
    if token is not None:
        if token.revoked_at is None:
            _revoke(given, token, f"task {wanted}")
            changes.append(_token_change(given.name, task.agent_name, token))
        token.capabilities = []
    task.description = ""
    return accepted(wanted, tuple(changes))


def _revoke(given: FoldInput, token: TokenEntry, why: str | None) -> None:
    token.revoked_at = given.now_us
    token.revoked_why = why


def _task_change(name: str, task: TaskEntry, **ended: str | int | None) -> Change:
    """Return the change of the task's row. `ended` has the fields of `_NOT_ENDED` of a task that has ended."""
    token_id = None if task.token is None else token_id_of(task.token.sha256)
    return changed(_task_row(task, task_id=name, token_id=token_id, **{**_NOT_ENDED, **ended}))


def _token_change(name: str, agent_name: str, token: TokenEntry) -> Change:
    row = _token_row(
        token,
        token_id=token_id_of(token.sha256),
        token_sha256=token.sha256,
        agent_name=agent_name,
        task_id=name,
        status=ACTIVE if token.revoked_at is None else REVOKED,
    )
    return changed(row)


TASK_KIND: Final = StreamKind(
    name=TASK,
    models=TASK_MODELS,
    settle=settle_task,
    row_of_each_stream=(TaskRow,),
    rows=(TaskRow, TokenRow),
    named_by="task_id",
)
