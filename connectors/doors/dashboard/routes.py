"""The dashboard's JSON routes, its stream of live events (AM-11), and the replay of a dead message (DL-11).

All but the replay only read. The replay is the hub's own: the same rights, and the same record.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from connectors.doors.dashboard.boards import AgentBoard, MailboxBoard
from connectors.doors.dashboard.entrance import Entrance
from connectors.doors.dashboard.event_broadcast import DOOR, LENGTH_LIMIT, EventBroadcast
from connectors.doors.dashboard.event_frames import Pulse
from connectors.doors.dashboard.past_records import (
    KEPT,
    Rejections,
    is_shown,
    job_as_json,
    job_history,
    jobs_page,
    record_as_json,
)
from connectors.hub.engine.family import serve_carefully
from connectors.hub.engine.operation import Asked, owner_by
from connectors.hub.live.table_reader import verdict_in_ledger
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import encoded_within, json_answer, not_found
from connectors.hub.serving.identities import IdempotencyKey
from connectors.hub.serving.models import JOB_ID_PATTERN, LIST_LIMIT, NAMED
from connectors.hub.serving.policy import Action, Caller, decide
from connectors.hub.serving.streaming_answer import EVENT_STREAM, StreamPlaces
from connectors.operations.messages.deliveries import never_gone
from connectors.operations.principals.dead_messages import ReplayMessage
from connectors.operations.rules.owners import owner_of_mailbox
from schemas.streams.job.job_registry import JobRow
from schemas.wire.record import Position
from trunkline_agent.errors import TrunklineError

_OFFSET_LIMIT: Final = 10**15
# The number of answers that may read the ledger at once, or go through a whole mailbox, so that callers cannot
# occupy all threads of the gateway.
_READERS: Final = 2
_FIRST_JOBS: Final = 200
_FIRST_REJECTED: Final = 50
_FIRST_MESSAGES: Final = 100
# The longest time that one write of an event waits for the client.
_STALLED_S: Final = 5.0

JobPath = Annotated[str, Path(pattern=JOB_ID_PATTERN)]
NamePath = Annotated[str, Path(**NAMED)]
JobState = Literal["pending", "running", "completed", "error", "cancelled"]
Limit = Annotated[int, Query(ge=1, le=LIST_LIMIT)]
Offset = Annotated[int, Query(ge=-1, le=_OFFSET_LIMIT)]

router = APIRouter()


class Shown:
    """The objects from which the dashboard's routes read their answers, and the limits of reading.

    The application has them as `app.state.shown`.
    """

    def __init__(self, hub: Hub, entrance: Entrance, broadcast: EventBroadcast, rejections: Rejections) -> None:
        self.hub, self.entrance, self.broadcast, self.rejections = hub, entrance, broadcast, rejections
        self.agents: AgentBoard = broadcast.agents
        self.mailboxes: MailboxBoard = broadcast.mailboxes
        self.pulse: Pulse = broadcast.pulse
        self.owner_of_mailbox = owner_by(hub, partial(owner_of_mailbox, hub))
        self.replay = ReplayMessage(hub)
        self.ledger_readers, self.mailbox_readers = asyncio.Semaphore(_READERS), asyncio.Semaphore(_READERS)
        self.streams = StreamPlaces(
            hub.answer_memory,
            hub.settings.gateway.streams,
            unread_s=_STALLED_S,
            on_unread=partial(hub.metrics.dropped, DOOR),
        )

    def rejected(self, reason: str | None, role: str, limit: int) -> dict[str, Any]:
        """Return each reason of rejections with its count, and the newest records that have `reason`."""
        events = [record_as_json(record, role) for record in self.rejections.newest(reason, role, limit)]
        return {"reasons": self.rejections.by_reason(role), "events": events}


class Admitted(NamedTuple):
    """A request of a caller that may see the dashboard."""

    request: Request
    caller: Caller
    shown: Shown

    async def may_replay(self) -> bool:
        """Return whether the caller may replay the messages of the mailbox in the request's path."""
        owner = await self.shown.owner_of_mailbox(self.request)
        return decide(self.caller, Action.MESSAGE_REPLAY, owner).allowed


async def _admitted(request: Request) -> Admitted:
    """Admit a request. Each route depends on this, before its other parameters are looked at."""
    shown: Shown = request.app.state.shown
    caller = request.state.caller = shown.entrance.admit(request)
    return Admitted(request, caller, shown)


At = Annotated[Admitted, Depends(_admitted)]


def _existing(found: dict[str, Any] | None, message: str) -> dict[str, Any]:
    if found is None:
        raise not_found(message)
    return found


@router.get("/api/snapshot")
async def show_snapshot(at: At) -> Response:
    """Return all data that the web page shows at first, and the log position of this data.

    A browser requests it after it has received the event `hello`, so that no change is missed in between.
    """
    shown, role = at.shown, at.caller.role
    position = shown.broadcast.position

    def rows() -> dict[str, Any]:
        return {
            "agents": shown.agents.rows(),
            "tasks": shown.agents.tasks(),
            "jobs": shown.hub.lists.jobs_by_state(),
            "first_jobs": jobs_page(shown.hub.live_view, shown.hub.lists, None, None, _FIRST_JOBS),
            "mailboxes": shown.pulse.mailboxes,
            "webhooks": shown.mailboxes.webhooks(),
            "rejections": shown.rejected(None, role, _FIRST_REJECTED),
            "history": shown.pulse.history(),
        }

    found = await asyncio.to_thread(rows)
    return json_answer({"position": position, "principal": at.caller.principal, "role": role, **found})


@router.get("/api/agents")
def list_agents(at: At) -> Response:
    """Return participants, then agents of running tasks, then the 50 participants that stopped last."""
    return json_answer({"agents": at.shown.agents.rows()})


@router.get("/api/agents/{name}")
def show_agent(at: At, name: NamePath) -> Response:
    """Return one agent: participant, definition, counts of its mailbox, and its newest 100 tasks."""
    return json_answer(_existing(at.shown.agents.agent(name), "no agent with this name"))


@router.get("/api/tasks")
def list_tasks(at: At) -> Response:
    """Return the newest 100 tasks, newest first, and the number of all tasks."""
    return json_answer(at.shown.agents.tasks())


@router.get("/api/tasks/{task_id}")
async def show_task(at: At, task_id: NamePath) -> Response:
    """Return one task: its texts and times, its token's state, its container, its result or error."""
    return json_answer(_existing(at.shown.agents.task(task_id), "no task with this id"))


@router.get("/api/jobs")
def list_jobs(
    at: At,
    state: JobState | None = None,
    after: Annotated[str | None, Query(pattern=JOB_ID_PATTERN)] = None,
    limit: Limit = LIST_LIMIT,
) -> Response:
    """Return at most `limit` jobs in one state (without `state`: in any), newest first.

    `next` in the answer is the `after` of the following page, and null on the last page.
    """
    return json_answer(jobs_page(at.shown.hub.live_view, at.shown.hub.lists, state, after, limit))


@router.get("/api/jobs/{job_id}")
async def show_job(at: At, job_id: JobPath, after: Offset | None = None) -> Response:
    """Return one job and its newest records, oldest first, from memory and the ledger.

    With `after`, only the records beyond that offset of the job's partition. `older_left_out` is true if
    earlier records may be missing. If the ledger cannot be read, the answer has no records, and `why` has the
    reason; otherwise `why` is null. The answer is 404 for an unknown job.
    """
    hub = at.shown.hub
    if hub.job_row(job_id) is None:
        raise not_found("no job with this id")
    async with at.shown.ledger_readers:
        why = None
        try:
            records, cut = await asyncio.to_thread(job_history, hub.settings, hub.live_view, job_id, after)
        except TrunklineError as error:
            records, cut, why = [], True, str(error)
    row = hub.job_row(job_id)
    most = hub.settings.limits.answer_bytes
    shown = encoded_within((record_as_json(record, at.caller.role) for record in reversed(records)), most)
    return json_answer(
        {
            "job": None if row is None else job_as_json(hub.live_view, row),
            "description": None if row is None else row.description,
            "records": shown[::-1],
            "older_left_out": cut or len(shown) < len(records),
            "why": why,
            "offset": hub.live_view.row_offset(JobRow.VIEW, job_id),
        }
    )


@router.get("/api/rejections")
def list_rejections(
    at: At,
    reason: Annotated[str | None, Query(pattern=r"^[a-z_]{1,40}$")] = None,
    limit: Annotated[int, Query(ge=1, le=KEPT)] = _FIRST_REJECTED,
) -> Response:
    """Return each reason with its count, and the newest `limit` records that were rejected for `reason`.

    Without `reason`, the records are those of all reasons. Records that the caller's role may not see are left
    out, but counted.
    """
    return json_answer(at.shown.rejected(reason, at.caller.role, limit))


@router.get("/api/records/{partition}/{offset}")
async def show_record(
    at: At,
    partition: Annotated[int, Path(ge=0, le=1023)],
    offset: Annotated[int, Path(ge=0, le=_OFFSET_LIMIT)],
) -> Response:
    """Return the settled record at a position of the log, from memory or from the ledger.

    The answer is 404 while no record is settled there, and for a record that the caller's role may not see.
    """
    hub, position = at.shown.hub, Position(partition, offset)
    found = hub.live_view.feed.find(position)
    if found is None:
        async with at.shown.ledger_readers:
            found = await asyncio.to_thread(verdict_in_ledger, hub.settings, position)
    if found is None or not is_shown(found, at.caller.role):
        raise not_found("no record was settled at this position, or it is not in the ledger yet")
    return json_answer(record_as_json(found, at.caller.role))


@router.get("/api/mailboxes")
async def list_mailboxes(at: At) -> Response:
    """Return the 200 deepest mailboxes. The answer is at most about a second old."""
    return json_answer(at.shown.pulse.mailboxes)


@router.get("/api/mailboxes/{realm}/{name}")
async def show_mailbox(at: At, realm: NamePath, name: NamePath, limit: Limit = _FIRST_MESSAGES) -> Response:
    """Return a mailbox's waiting, leased and dead messages, without bodies: at most `limit` of each.

    Each list has the whole `count`. `waiting` is in the order in which messages are handed out. Of `dead`, the
    message that died last is the first. `may_replay` is whether the caller may replay them. The lists of an
    unknown mailbox are empty.
    """
    async with at.shown.mailbox_readers:
        found = await asyncio.to_thread(at.shown.mailboxes.contents, (realm, name), limit)
    shown = {"realm": realm, "recipient": name, "limit": limit, **found}
    return json_answer({**shown, "may_replay": await at.may_replay()})


@router.get("/api/mailboxes/{realm}/{name}/messages/{message_id}")
async def show_message(at: At, realm: NamePath, name: NamePath, message_id: NamePath) -> Response:
    """Return one message of a mailbox. Only the operator gets its `body`.

    The answer is 404 if the message is unknown, or ended so long ago that it is not in memory.
    """
    found = at.shown.mailboxes.message((realm, name), message_id, at.caller.role)
    known = _existing(found, "no such message in this mailbox, or it ended too long ago")
    return json_answer({**known, "may_replay": await at.may_replay()})


@router.post("/api/mailboxes/{realm}/{name}/messages/{message_id}/replay")
async def replay_message(
    at: At, realm: NamePath, name: NamePath, message_id: NamePath, key: IdempotencyKey = None
) -> Response:
    """Post a dead message again, as the hub's route with `/api/hub/mailboxes` in its path does.

    The answer is `{"replayed": true, "message_id": ...}` with the id of the new message. It is 403 if the
    caller may not replay the message, 404 for an unknown message, and 409 for one that is not dead.
    """
    operation = at.shown.replay
    owner = await operation.owner_of(at.request)
    at.shown.entrance.check_change(at.request, at.caller, Action.MESSAGE_REPLAY, owner)
    path = {"realm": realm, "name": name, "message_id": message_id}
    return await serve_carefully(operation, Asked(at.caller, None, None, key, lambda: False, path), never_gone)


@router.get("/api/events")
async def follow(
    at: At,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=LENGTH_LIMIT)] = None,
    after: Annotated[str | None, Query(max_length=LENGTH_LIMIT)] = None,
) -> Response:
    """Stream changes of agents, jobs, tasks and messages, and the verdict of each record.

    The stream ends when the client disconnects or is too slow, its login becomes invalid, or the gateway stops.
    `after` is the same as `Last-Event-ID`: the id of the last event received. It is for a client that
    reconnects by itself.
    """
    request, caller, shown = at

    def goes_on() -> bool:
        return not shown.hub.stopping.is_set() and shown.entrance.still_holds(request, caller)

    source = partial(shown.broadcast.follow, caller.role, last_event_id or after, goes_on)
    return shown.streams.answer(caller, source, EVENT_STREAM)
