"""One agent and one task as the dashboard shows them (DL-12), and the list of the newest tasks."""

from __future__ import annotations

import time
from typing import Any, Final

from connectors.doors.dashboard.agent_board import AgentBoard
from connectors.doors.dashboard.mailbox_board import MailboxBoard
from connectors.doors.dashboard.shown_rows import milliseconds, task_as_json
from connectors.hub.lists.row_lists import RowLists, task_lists
from connectors.hub.live.live_view import LiveView
from connectors.hub.services.mailboxes import token_mailbox
from connectors.hub.services.task_keeper import container_of
from schemas.streams.agents.agent_registry import DEFINED, AgentRow
from schemas.streams.agents.participants import ParticipantRow
from schemas.streams.container.container_registry import ContainerRow
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.principal.principals import ACTIVE
from schemas.streams.task.task_registry import TaskRow, TokenRow

# The number of tasks that are shown, the newest first.
TASKS_SHOWN: Final = 100
EXPIRED: Final = "expired"


class TaskBoard:
    """Agents and tasks in detail, as JSON made from the live view at each call. Thread-safe.

    `per_token` is the setting `gateway.mailbox_per_token`: each task has a mailbox of its own.
    """

    def __init__(
        self,
        live_view: LiveView,
        lists: RowLists,
        agents: AgentBoard,
        mailboxes: MailboxBoard,
        *,
        per_token: bool,
    ) -> None:
        self._live_view = live_view
        self._lists = lists
        self._agents = agents
        self._mailboxes = mailboxes
        self._per_token = per_token

    def newest(self, agent_name: str | None = None) -> dict[str, Any]:
        """Return the newest 100 tasks as JSON, newest first, and their whole number as `total`.

        With `agent_name`, only the tasks of this agent.
        """
        lists = task_lists(None, agent_name)
        newest = self._lists.tasks.newest(lists, TASKS_SHOWN)
        total = self._lists.tasks.count(lists)
        return {"tasks": [task_as_json(self._live_view, row) for row in newest], "total": total}

    def agent(self, name: str) -> dict[str, Any] | None:
        """Return an agent with its mailbox's counts and its newest tasks; None if nothing of this name exists.

        `agent` is the row of the participant, and None for an agent that is no participant. `definition` is
        that of the folder `conf/agents`, and None without one. It may have been removed since.
        """
        participant = self._live_view.get(ParticipantRow, name)
        definition = self._live_view.get(AgentRow, name)
        tasks = self.newest(name)
        if participant is None and definition is None and not tasks["total"]:
            return None
        return {
            "name": name,
            "agent": None if participant is None else self._agents.participant(participant),
            "definition": None if definition is None else _definition_as_json(definition),
            "mailbox": self._mailbox(name),
            **tasks,
        }

    def task(self, task_id: str) -> dict[str, Any] | None:
        """Return a task with its token's state, its container and its result; None for an unknown task.

        `token` has neither the token nor its hash or id. `token` and `container` are None if there is none.
        `result` is the stored text of the result.
        """
        row = self._live_view.get(TaskRow, task_id)
        if row is None:
            return None
        token = None if row.token_id is None else self._live_view.get(TokenRow, row.token_id)
        container = self._live_view.get(ContainerRow, container_of(task_id))
        own = self._per_token and row.token_id is not None
        name = token_mailbox(row.agent_name, str(row.token_id)) if own else row.agent_name
        return {
            "task": {
                **task_as_json(self._live_view, row),
                "description": row.description,
                "error": row.error,
                "submitted_by": row.submitted_by,
                "session_name": row.session_name,
                "image": row.image,
            },
            "result": row.result,
            "capabilities": [] if token is None else token.capabilities,
            "token": None if token is None else _token_as_json(token),
            "container": None if container is None else _container_as_json(container),
            "mailbox": self._mailbox(name),
        }

    def _mailbox(self, name: str) -> dict[str, Any]:
        return {"realm": DEFAULT_REALM, "recipient": name, **self._mailboxes.counts((DEFAULT_REALM, name))}


def _definition_as_json(row: AgentRow) -> dict[str, Any]:
    return {
        "status": row.status,
        "is_defined": row.status == DEFINED,
        "image": row.image,
        "description": row.description,
        "capabilities": row.capabilities,
        "hardened": row.hardened,
        "defined_ms": milliseconds(row.defined_at),
        "removed_ms": milliseconds(row.removed_at),
    }


def _token_as_json(row: TokenRow) -> dict[str, Any]:
    is_expired = row.status == ACTIVE and row.expiry <= time.time() * 1000
    return {
        "status": EXPIRED if is_expired else row.status,
        "issued_ms": row.issued,
        "expiry_ms": row.expiry,
        "revoked_ms": milliseconds(row.revoked_at),
        "revoked_why": row.revoked_why,
    }


def _container_as_json(row: ContainerRow) -> dict[str, Any]:
    return {
        "container": row.container,
        "state": row.state,
        "backend": row.backend,
        "host": row.host,
        "port": row.port,
        "error": row.error,
        "created_ms": milliseconds(row.created_at),
        "changed_ms": milliseconds(row.changed_at),
    }
