"""The lists of jobs, sessions, tasks and so on that the gateway shows and counts, without scans of all rows."""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeVar

from connectors.gateway.services.ordered_rows import OrderedRows
from schemas.fold.life_cycles import STOPPED
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.streams.agents.participants import AgentKeyRow, ParticipantRow
from schemas.streams.container.container_registry import RECYCLED, ContainerRow
from schemas.streams.job.job_registry import JOB_STATES, JOB_TERMINAL, JobRow
from schemas.streams.principal.principals import ACTIVE, REVOKED
from schemas.streams.session.session_registry import TERMINATED, SessionRow
from schemas.streams.task.task_registry import TASK_STATES, TASK_TERMINAL, TaskRow, TokenRow
from schemas.streams.thread.threads import ThreadRow

R = TypeVar("R", bound=Row)

# The groups of the lists whose groups are not named by a state.
ALL: Final = ""
OPEN: Final = "open"
PRESENT: Final = "present"
CONTAINER_GROUPS: Final = (OPEN, RECYCLED)
TOKEN_GROUPS: Final = (ACTIVE, REVOKED)


class Rows(Protocol):
    """The rows of all views, such as a `LiveView`."""

    def get(self, row_type: type[R], key: str) -> R | None:
        """Return the row of this type and key, None without one."""

    def all(self, row_type: type[R]) -> list[R]:
        """Return all rows of this type."""


class RowLists:
    """The ordered indexes over the rows of `view`, kept up to date by the live view.

    Register `changed` before the view opens, and call `load` once it is open. Lists are newest first.

    Attributes:
        jobs: By registration. The groups are those of `job_groups`.
        sessions: By creation. A group is a state.
        tasks: By submission. The groups are those of `task_groups`.
        tokens: By issue. The groups are `TOKEN_GROUPS`. An expired token is in the group of active ones.
        containers: By creation. The groups are `CONTAINER_GROUPS`.
        threads: By opening. The groups are `ALL` and the root threads' ids.
        participants: By their stop. The groups are `PRESENT` and `STOPPED`.
        keys: The active keys of participants, by registration. There are groups for agents and for key ids.
    """

    def __init__(self, view: Rows) -> None:
        self._view = view
        self.jobs = OrderedRows(
            JobRow,
            view.get,
            lambda row: row.registered_at,
            # A pending job counts as one of the session that it waits for.
            lambda row: _with(row.status, row.session or row.session_wanted),
            lambda row: row.status in JOB_TERMINAL,
        )
        self.sessions = OrderedRows(
            SessionRow,
            view.get,
            lambda row: row.created_at,
            lambda row: (row.status,),
            lambda row: row.status == TERMINATED,
        )
        self.tasks = OrderedRows(
            TaskRow,
            view.get,
            lambda row: row.submitted_at,
            lambda row: _with(row.status, row.agent_name),
            lambda row: row.status in TASK_TERMINAL,
        )
        self.tokens = OrderedRows(
            TokenRow,
            view.get,
            lambda row: row.issued,
            lambda row: (row.status,),
            lambda row: row.status == REVOKED,
        )
        self.containers = OrderedRows(
            ContainerRow,
            view.get,
            lambda row: row.created_at,
            lambda row: (RECYCLED if row.state == RECYCLED else OPEN,),
            lambda row: row.state == RECYCLED,
        )
        self.threads = OrderedRows(
            ThreadRow,
            view.get,
            lambda row: row.opened_at,
            lambda row: (ALL, row.root_thread),
            # Two gateways may mark a thread's first message at once. The later one makes the row again.
            lambda row: False,
        )
        self.participants = OrderedRows(
            ParticipantRow,
            view.get,
            lambda row: row.stopped_at or 0,
            lambda row: (STOPPED if row.status == STOPPED else PRESENT,),
            lambda row: False,
        )
        self.keys = OrderedRows(
            AgentKeyRow,
            view.get,
            lambda row: row.registered_at,
            lambda row: (_of_agent(row.agent_name), _of_key(row.key_id)) if row.status == ACTIVE else (),
            lambda row: False,
        )
        self._by_type: dict[type[Row], OrderedRows[Any]] = {
            JobRow: self.jobs,
            SessionRow: self.sessions,
            TaskRow: self.tasks,
            TokenRow: self.tokens,
            ContainerRow: self.containers,
            ThreadRow: self.threads,
            ParticipantRow: self.participants,
            AgentKeyRow: self.keys,
        }

    def load(self) -> None:
        """Add the rows that the live view contains when it is open. Call it once, after `LiveView.open`."""
        for row_type, index in self._by_type.items():
            index.load(self._view.all(row_type))

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

        Without `status` they are those that have not stopped, and without `capability` those with any.
        """
        rows = self.participants.newest([STOPPED if status == STOPPED else PRESENT])
        fit = (row for row in rows if status in (None, row.status))
        found = [row for row in fit if capability is None or capability in row.capabilities]
        return sorted(found, key=lambda row: row.agent_name)

    def keys_of(self, agent_name: str) -> list[AgentKeyRow]:
        """Return the active keys of a participant, in the order of their registration."""
        return self.keys.newest([_of_agent(agent_name)])[::-1]

    def keys_with(self, key_id: str) -> list[AgentKeyRow]:
        """Return the active keys of all participants that have this id."""
        return self.keys.newest([_of_key(key_id)])


def job_groups(state: str | None, session: str | None) -> list[str]:
    """Return the groups of the jobs in a state, or in any, that a session runs, ran or waits for, or any."""
    return [_with(one, session)[-1] for one in (JOB_STATES if state is None else (state,))]


def task_groups(status: str | None, agent_name: str | None) -> list[str]:
    """Return the groups of the tasks in a state, or in any, of an agent, or of any."""
    return [_with(one, agent_name)[-1] for one in (TASK_STATES if status is None else (status,))]


def _of_agent(agent_name: str) -> str:
    return f"agent/{agent_name}"


def _of_key(key_id: str) -> str:
    return f"key/{key_id}"


def _with(state: str, name: str | None) -> tuple[str, ...]:
    return (state,) if name is None else (state, f"{state}/{name}")
