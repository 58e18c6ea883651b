"""The dashboard's rows of agents: participants, and agents that exist only for a running task."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Final

from connectors.doors.dashboard.shown_rows import milliseconds
from connectors.hub.lists.row_lists import RowLists
from connectors.hub.live.live_view import LiveView
from connectors.hub.services.mailboxes import MailboxIndex
from schemas.fold.life_cycles import RUNNING
from schemas.streams.agents.participants import ParticipantRow
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.task.task_registry import TaskRow

STOPPED: Final = "stopped"
WORKING: Final = "working"
# The number of stopped agents that are shown, the newest first.
_STOPPED_SHOWN: Final = 50


def worker_key(task_id: str) -> str:
    """Return `task:<task id>`, the row key of an agent that runs for a task and is no participant."""
    return f"task:{task_id}"


class AgentBoard:
    """The dashboard's rows of agents as JSON, made from the live view at each call.

    A row's `key` is the participant's name, or `task:<task id>` for an agent that is no participant.
    """

    def __init__(self, live_view: LiveView, lists: RowLists, mailboxes: MailboxIndex) -> None:
        self._live_view = live_view
        self._lists = lists
        self._mailboxes = mailboxes

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all agents as JSON, for a page that has none yet.

        First come the present participants by name, then the agents of running tasks that are no participants,
        then the 50 participants that stopped last.
        """
        present = self._lists.participants_with(None)
        tasks = [task for task in self._lists.tasks.newest([RUNNING]) if not self._has_joined(task)]
        return [
            *map(self.participant, present),
            *map(self._worker, sorted(tasks, key=lambda task: (task.agent_name, task.task_id))),
            *map(self.participant, self._lists.participants.newest([STOPPED], _STOPPED_SHOWN)),
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
                found.append(self.participant(row))
                if row.task_id is not None and name in turned:
                    touched.add(row.task_id)
        for task_id in sorted(touched):
            task = self._live_view.get(TaskRow, task_id)
            if task is not None and task.status == RUNNING and not self._has_joined(task):
                found.append(self._worker(task))
            else:
                found.append({"key": worker_key(task_id), "gone": True})
        return found

    def participant(self, row: ParticipantRow) -> dict[str, Any]:
        """Return the row of one participant as JSON."""
        return {
            **self._row(row, row.agent_name, row.started_at, row.updated_at),
            "kind": "participant",
            "status": row.status,
            "task": row.task,
            "capabilities": row.capabilities,
            "stopped_ms": milliseconds(row.stopped_at),
            "stopped_why": row.stopped_why,
        }

    def _has_joined(self, task: TaskRow) -> bool:
        """Return whether the agent of a task is a present participant, which has the task's agent name."""
        agent = self._live_view.get(ParticipantRow, task.agent_name)
        return agent is not None and agent.task_id == task.task_id and agent.status != STOPPED

    def _worker(self, row: TaskRow) -> dict[str, Any]:
        began = row.started_at or row.submitted_at
        return {
            **self._row(row, worker_key(row.task_id), began, began),
            "kind": "task",
            "status": WORKING,
            "task": row.description,
            "capabilities": [],
            "stopped_ms": None,
            "stopped_why": None,
        }

    def _row(self, row: ParticipantRow | TaskRow, key: str, started_us: int, updated_us: int) -> dict[str, Any]:
        return {
            "key": key,
            "agent": row.agent_name,
            "task_id": row.task_id,
            "started_ms": milliseconds(started_us),
            "updated_ms": milliseconds(updated_us),
            "waiting": self._mailboxes.depth((DEFAULT_REALM, row.agent_name)),
        }
