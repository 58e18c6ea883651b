"""The lists of jobs, sessions, tasks and so on that the gateway shows and counts, without scans of all rows."""

from __future__ import annotations

from typing import Any, Final

from connectors.hub.live.ordered_rows import OrderedRows, Rows
from schemas.fold.life_cycles import STOPPED
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.streams.agents.participants import PRESENT, AgentKeyRow, ParticipantRow, list_of_agent, list_of_key
from schemas.streams.container.container_registry import OPEN, RECYCLED, ContainerRow
from schemas.streams.job.job_registry import JOB_STATES, JobRow
from schemas.streams.principal.principals import ACTIVE, REVOKED
from schemas.streams.session.session_registry import SessionRow
from schemas.streams.task.task_registry import TASK_STATES, TaskRow, TokenRow
from schemas.streams.thread.threads import ThreadRow

CONTAINER_LISTS: Final = (OPEN, RECYCLED)
TOKEN_LISTS: Final = (ACTIVE, REVOKED)


class RowLists:
    """The lists of the rows of `view`, kept up to date by the live view.

    Register `changed` before the view opens, and call `load` once it is open. The rows are newest first.

    Attributes:
        jobs: By registration. The lists are those of `job_lists`.
        sessions: By creation. A list is named by a state.
        tasks: By submission. The lists are those of `task_lists`.
        tokens: By issue. The lists are `TOKEN_LISTS`. An expired token is in the list of active ones.
        containers: By creation. The lists are `CONTAINER_LISTS`.
        threads: By opening. The lists are `ALL` and the root threads' ids.
        participants: By their stop. The lists are `PRESENT` and `STOPPED`.
        keys: The active keys of participants, by registration. There are lists of agents and of key ids.
    """

    def __init__(self, view: Rows) -> None:
        self._view = view
        self.jobs = OrderedRows(JobRow, view)
        self.sessions = OrderedRows(SessionRow, view)
        self.tasks = OrderedRows(TaskRow, view)
        self.tokens = OrderedRows(TokenRow, view)
        self.containers = OrderedRows(ContainerRow, view)
        self.threads = OrderedRows(ThreadRow, view)
        self.participants = OrderedRows(ParticipantRow, view)
        self.keys = OrderedRows(AgentKeyRow, view)
        of_all = (self.jobs, self.sessions, self.tasks, self.tokens, self.containers, self.threads)
        self._by_type: dict[type[Row], OrderedRows[Any]] = {
            one.follows[0]: one for one in (*of_all, self.participants, self.keys)
        }
        self.follows = tuple(self._by_type)

    def load(self) -> None:
        """Add the live rows when the live view is open. Call it once, after `LiveView.open`."""
        for row_type, index in self._by_type.items():
            index.load(self._view.live(row_type))

    def changed(self, change: AppliedChange) -> None:
        """Update the list of a changed row. The live view's thread calls it. Other rows are ignored."""
        index = self._by_type.get(type(change.row))  # type: ignore[arg-type]
        if index is not None:
            index.changed(change)

    def jobs_by_state(self) -> dict[str, int]:
        """Return the number of jobs in each state. A state without jobs is not a key of the result."""
        counts = {state: self.jobs.count([state]) for state in JOB_STATES}
        return {state: count for state, count in counts.items() if count}

    def participants_with(self, status: str | None, capability: str | None = None) -> list[ParticipantRow]:
        """Return the participants in a state that have a capability, sorted by name.

        Without `status` they are those that have not stopped, and without `capability` those with any. Only the
        stopped ones are read from the store.
        """
        are_stopped = status == STOPPED
        rows = self.participants.newest([STOPPED]) if are_stopped else self.participants.live(PRESENT)
        fit = (row for row in rows if status in (None, row.status))
        found = [row for row in fit if capability is None or capability in row.capabilities]
        return sorted(found, key=lambda row: row.agent_name)

    def keys_of(self, agent_name: str) -> list[AgentKeyRow]:
        """Return the active keys of a participant, in the order of their registration."""
        return self.keys.live(list_of_agent(agent_name))[::-1]

    def keys_with(self, key_id: str) -> list[AgentKeyRow]:
        """Return the active keys of all participants that have this id."""
        return self.keys.live(list_of_key(key_id))


def job_lists(state: str | None, session: str | None) -> list[str]:
    """Return the lists of the jobs in a state, or in any, that a session runs, ran or waits for, or any."""
    return [_with(one, session)[-1] for one in (JOB_STATES if state is None else (state,))]


def task_lists(status: str | None, agent_name: str | None) -> list[str]:
    """Return the lists of the tasks in a state, or in any, of an agent, or of any."""
    return [_with(one, agent_name)[-1] for one in (TASK_STATES if status is None else (status,))]


def _with(state: str, name: str | None) -> tuple[str, ...]:
    return (state,) if name is None else (state, f"{state}/{name}")
