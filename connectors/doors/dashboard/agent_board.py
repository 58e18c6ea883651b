"""The agents and tasks as the dashboard shows them (AM-11, DL-12): as rows of lists, and one in detail."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from typing import Any, Final

from connectors.doors.dashboard.mailbox_board import MailboxBoard
from connectors.doors.dashboard.shown_rows import RowView, milliseconds, task_as_json
from connectors.hub.live.row_lists import task_lists
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailboxes import token_mailbox
from connectors.hub.services.task_keeper import container_of
from schemas.fold.life_cycles import RUNNING, STOPPED
from schemas.streams.agents.agent_registry import DEFINED, AgentRow
from schemas.streams.agents.participants import ParticipantRow
from schemas.streams.container.container_registry import ContainerRow
from schemas.streams.principal.principals import ACTIVE
from schemas.streams.task.task_registry import TaskRow, TokenRow

WORKING: Final = "working"
EXPIRED: Final = "expired"
# The number of stopped agents that are shown, and of tasks, the newest first.
_STOPPED_SHOWN: Final = 50
_TASKS_SHOWN: Final = 100

_PARTICIPANT: Final = RowView(
    ParticipantRow,
    "task_id status task capabilities stopped_why",
    moments="started_at updated_at stopped_at",
)
_DEFINITION: Final = RowView(
    AgentRow, "status image description capabilities hardened", moments="defined_at removed_at"
)
_TASK_DETAILS: Final = RowView(TaskRow, "description error submitted_by session_name image")
_CONTAINER: Final = RowView(
    ContainerRow, "container state backend host port error", moments="created_at changed_at"
)


def worker_key(task_id: str) -> str:
    """Return `task:<task id>`, the row key of an agent that runs for a task and is no participant."""
    return f"task:{task_id}"


class AgentBoard:
    """The dashboard's agents and tasks as JSON, made from the live view at each call. Thread-safe.

    The `key` of an agent's row is the participant's name, or `task:<task id>` for an agent that is no
    participant.
    """

    def __init__(self, hub: Hub, mailboxes: MailboxBoard) -> None:
        self._live_view = hub.live_view
        self._lists = hub.lists
        self._mailboxes = mailboxes
        self._per_token = hub.settings.gateway.mailbox_per_token

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all agents as JSON, for a page that has none yet.

        First come the present participants by name, then the agents of running tasks that are no participants,
        then the 50 participants that stopped last.
        """
        present = self._lists.participants_with(None)
        tasks = [task for task in self._lists.tasks.newest([RUNNING]) if not self._has_joined(task)]
        return [
            *map(self._participant, present),
            *map(self._worker, sorted(tasks, key=lambda task: (task.agent_name, task.task_id))),
            *map(self._participant, self._lists.participants.newest([STOPPED], _STOPPED_SHOWN)),
        ]

    def changed(
        self, agents: Iterable[str], tasks: Iterable[str], turned: Container[str]
    ) -> list[dict[str, Any]]:
        """Return the current rows of some agents and tasks, to update a page that already has earlier rows.

        A row that the page must remove has only its `key` and `gone: true`. A task's row is removed when the
        task ends, or when the task's agent joins as a participant with a row of its own.

        Args:
            agents: Names of participants whose rows may have changed. Unknown names are ignored.
            tasks: Ids of tasks whose rows may have changed. An unknown id gives a row to remove.
            turned: The names of the agents that have joined or stopped. The rows of the tasks for which they
                were started are returned, too.
        """
        found: list[dict[str, Any]] = []
        touched = set(tasks)
        for name in sorted(set(agents)):
            row = self._live_view.get(ParticipantRow, name)
            if row is not None:
                found.append(self._participant(row))
                if row.task_id is not None and name in turned:
                    touched.add(row.task_id)
        for task_id in sorted(touched):
            task = self._live_view.get(TaskRow, task_id)
            if task is not None and task.status == RUNNING and not self._has_joined(task):
                found.append(self._worker(task))
            else:
                found.append({"key": worker_key(task_id), "gone": True})
        return found

    def tasks(self, agent_name: str | None = None) -> dict[str, Any]:
        """Return the newest 100 tasks as JSON, newest first, and their whole number as `total`.

        With `agent_name`, only the tasks of this agent.
        """
        lists = task_lists(None, agent_name)
        newest = self._lists.tasks.newest(lists, _TASKS_SHOWN)
        total = self._lists.tasks.count(lists)
        return {"tasks": [task_as_json(self._live_view, row) for row in newest], "total": total}

    def agent(self, name: str) -> dict[str, Any] | None:
        """Return an agent with its mailbox's counts and its newest tasks; None if nothing of this name exists.

        `agent` is the row of the participant, and None for an agent that is no participant. `definition` is
        that of the folder `conf/agents`, and None without one. It may have been removed since.
        """
        participant = self._live_view.get(ParticipantRow, name)
        definition = self._live_view.get(AgentRow, name)
        tasks = self.tasks(name)
        if participant is None and definition is None and not tasks["total"]:
            return None
        shown = None
        if definition is not None:
            shown = {**_DEFINITION.of(definition), "is_defined": definition.status == DEFINED}
        return {
            "name": name,
            "agent": None if participant is None else self._participant(participant),
            "definition": shown,
            "mailbox": self._mailboxes.counted(name),
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
        return {
            "task": {**task_as_json(self._live_view, row), **_TASK_DETAILS.of(row)},
            "result": row.result,
            "capabilities": [] if token is None else token.capabilities,
            "token": None if token is None else _token_as_json(token),
            "container": None if container is None else _CONTAINER.of(container),
            "mailbox": self._mailboxes.counted(
                token_mailbox(row.agent_name, str(row.token_id)) if own else row.agent_name
            ),
        }

    def _has_joined(self, task: TaskRow) -> bool:
        """Return whether the agent of a task is a present participant, which has the task's agent name."""
        agent = self._live_view.get(ParticipantRow, task.agent_name)
        return agent is not None and agent.task_id == task.task_id and agent.status != STOPPED

    def _participant(self, row: ParticipantRow) -> dict[str, Any]:
        return {
            **_PARTICIPANT.of(row),
            "key": row.agent_name,
            "agent": row.agent_name,
            "kind": "participant",
            "waiting": self._mailboxes.depth(row.agent_name),
        }

    def _worker(self, row: TaskRow) -> dict[str, Any]:
        began_ms = milliseconds(row.started_at or row.submitted_at)
        return {
            "key": worker_key(row.task_id),
            "agent": row.agent_name,
            "kind": "task",
            "task_id": row.task_id,
            "status": WORKING,
            "task": row.description,
            "capabilities": [],
            "started_ms": began_ms,
            "updated_ms": began_ms,
            "stopped_ms": None,
            "stopped_why": None,
            "waiting": self._mailboxes.depth(row.agent_name),
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
