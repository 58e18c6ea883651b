"""The dashboard's routes for one mailbox, message, agent or task, and for a replay (DL-11, DL-12).

All but the replay only read. The replay is the hub's own: the same rights, and the same record.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query, Request, Response

from connectors.doors.dashboard.entrance import Entrance
from connectors.doors.dashboard.mailbox_board import MailboxBoard
from connectors.doors.dashboard.task_board import TaskBoard
from connectors.hub.engine.operation import Asked, owner_by
from connectors.hub.engine.operation_routes import serve_carefully
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import json_answer, not_found
from connectors.hub.serving.idempotency import IdempotencyKey
from connectors.hub.serving.models import LIST_LIMIT, NAMED
from connectors.hub.serving.policy import Action, decide
from connectors.operations.messages.deliveries import never_gone
from connectors.operations.principals.dead_messages import ReplayMessage
from connectors.operations.rules.owners import owner_of_mailbox

_MAILBOX: Final = "/api/mailboxes/{realm}/{name}"
_MESSAGE: Final = f"{_MAILBOX}/messages/{{message_id}}"
_REPLAY: Final = f"{_MESSAGE}/replay"
_FIRST_MESSAGES: Final = 100
# The number of answers that may go through a whole mailbox at once, so that callers cannot occupy all threads.
_MAILBOX_READERS: Final = 2

NamePath = Annotated[str, Path(**NAMED)]


def add_detail_routes(
    app: FastAPI, hub: Hub, entrance: Entrance, mailboxes: MailboxBoard, tasks: TaskBoard
) -> None:
    """Add the routes that show one mailbox, message, agent or task, and the route that replays a message.

    Each route calls `entrance.admit` first, and the replay also `entrance.check_change`.
    """
    _add_mailbox(app, hub, entrance, mailboxes)
    _add_replay(app, hub, entrance)
    _add_agents_and_tasks(app, entrance, tasks)


def _add_mailbox(app: FastAPI, hub: Hub, entrance: Entrance, mailboxes: MailboxBoard) -> None:
    places = asyncio.Semaphore(_MAILBOX_READERS)
    owner_of = owner_by(hub, partial(owner_of_mailbox, hub))

    async def may_replay(request: Request) -> bool:
        caller = request.state.caller
        return decide(caller, Action.MESSAGE_REPLAY, await owner_of(request)).allowed

    @app.get(_MAILBOX)
    async def show_mailbox(
        request: Request,
        realm: NamePath,
        name: NamePath,
        limit: Annotated[int, Query(ge=1, le=LIST_LIMIT)] = _FIRST_MESSAGES,
    ) -> Response:
        """Return a mailbox's waiting, leased and dead messages, without bodies: at most `limit` of each.

        Each list has the whole `count`. `waiting` is in the order in which messages are handed out. Of `dead`,
        the message that died last is the first. `may_replay` is whether the caller may replay them. The lists
        of an unknown mailbox are empty.
        """
        request.state.caller = entrance.admit(request, _MAILBOX)
        async with places:
            found = await asyncio.to_thread(mailboxes.contents, (realm, name), limit)
        shown = {"realm": realm, "recipient": name, "limit": limit, **found}
        return json_answer({**shown, "may_replay": await may_replay(request)})

    @app.get(_MESSAGE)
    async def show_message(request: Request, realm: NamePath, name: NamePath, message_id: NamePath) -> Response:
        """Return one message of a mailbox. Only the operator gets its `body`.

        The answer is 404 if the message is unknown, or ended so long ago that it is not in memory.
        """
        caller = request.state.caller = entrance.admit(request, _MESSAGE)
        found = mailboxes.message((realm, name), message_id, caller.role)
        if found is None:
            raise not_found("no such message in this mailbox, or it ended too long ago")
        return json_answer({**found, "may_replay": await may_replay(request)})


def _add_replay(app: FastAPI, hub: Hub, entrance: Entrance) -> None:
    operation = ReplayMessage(hub)

    @app.post(_REPLAY)
    async def replay_message(
        request: Request, realm: NamePath, name: NamePath, message_id: NamePath, key: IdempotencyKey = None
    ) -> Response:
        """Post a dead message again, as the hub's route with `/api/hub/mailboxes` in its path does.

        The answer is `{"replayed": true, "message_id": ...}` with the id of the new message. It is 403 if the
        caller may not replay the message, 404 for an unknown message, and 409 for one that is not dead.
        """
        caller = request.state.caller = entrance.admit(request, _REPLAY)
        owner = await operation.owner_of(request)
        entrance.check_change(request, caller, _REPLAY, Action.MESSAGE_REPLAY, owner)
        path = {"realm": realm, "name": name, "message_id": message_id}
        asked = Asked(caller, None, None, key, lambda: False, path)
        return await serve_carefully(operation, asked, never_gone)


def _add_agents_and_tasks(app: FastAPI, entrance: Entrance, tasks: TaskBoard) -> None:
    def existing(found: dict[str, Any] | None, message: str) -> Response:
        if found is None:
            raise not_found(message)
        return json_answer(found)

    @app.get("/api/agents/{name}")
    async def show_agent(request: Request, name: NamePath) -> Response:
        """Return one agent: participant, definition, counts of its mailbox, and its newest 100 tasks."""
        entrance.admit(request, "/api/agents/{name}")
        return existing(await asyncio.to_thread(tasks.agent, name), "no agent with this name")

    @app.get("/api/tasks")
    async def list_tasks(request: Request) -> Response:
        """Return the newest 100 tasks, newest first, and the number of all tasks."""
        entrance.admit(request, "/api/tasks")
        return json_answer(await asyncio.to_thread(tasks.newest))

    @app.get("/api/tasks/{task_id}")
    async def show_task(request: Request, task_id: NamePath) -> Response:
        """Return one task: its texts and times, its token's state, its container, its result or error."""
        entrance.admit(request, "/api/tasks/{task_id}")
        return existing(tasks.task(task_id), "no task with this id")
