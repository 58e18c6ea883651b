"""Copies of the registries of jobs and sessions, kept up to date by the gateway's settled stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from connectors.plumbing.gateway_client.event_stream import GAP, SETTLED, SNAPSHOT, EventStream, ServerEvent
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.session.session_registry import REGISTRY_SESSIONS
from trunkline_agent.errors import BackboneUnreachable, NotFound
from trunkline_agent.wire.ids import JOB, SESSION
from trunkline_agent.wire.verdicts import ACCEPTED

Row = dict[str, Any]
_PATHS: Final = {JOB: "jobs", SESSION: "sessions"}
# The most rows that one `refresh` looks up.
_LOOK_UP_MOST: Final = 200


class RowChange(NamedTuple):
    """A change of one row in the registry of jobs or of sessions.

    Attributes:
        kind: `job` or `session`.
        name: the id of the job, or the name of the session.
        before: the previous row; None: there was none in the copy.
        row: the present row.
        by: the principal whose record changed the row; None: unknown.
    """

    kind: str
    name: str
    before: Row | None
    row: Row
    by: str | None


class RegistryFollower:
    """A copy of the registries of jobs and sessions: their rows by name, in `jobs` and `sessions`.

    Pass each event of the gateway's stream to `take`, then call `refresh`, which makes HTTP requests. The class
    has no thread and is not thread-safe.

    Attributes:
        has_snapshot: whether the first snapshot has come.
        missed: whether an event `gap` has come, so changes may have been missed.
        failure: the error of the last request, if the gateway did not answer it; else None. The next `refresh`
            tries again.
    """

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self.jobs: dict[str, Row] = {}
        self.sessions: dict[str, Row] = {}
        self._rows = {JOB: self.jobs, SESSION: self.sessions}
        self._changed: dict[tuple[str, str], str | None] = {}
        self._unknown: set[str] = set()
        self.has_snapshot = False
        self.missed = False
        self.failure: BackboneUnreachable | None = None

    def take(self, event: ServerEvent) -> None:
        """Note which rows an event of the gateway's stream has changed.

        Makes no request: `refresh` reads the rows. The first snapshot fills the copy. A later snapshot, after a
        gap, marks the rows that differ from the copy. An event `gap` sets `missed`.
        """
        if event.name == SNAPSHOT:
            # After a gap the changes themselves are lost. Comparing the rows finds the rows that have changed.
            for kind, view in ((JOB, REGISTRY_JOBS), (SESSION, REGISTRY_SESSIONS)):
                for row in event.data["rows"].get(view, ()):
                    name = row["job_id"] if kind == JOB else row["session"]
                    if not self.has_snapshot:
                        self._rows[kind][name] = row
                    elif self._rows[kind].get(name) != row:
                        self._changed.setdefault((kind, name), None)
            self.has_snapshot = True
        elif event.name == GAP:
            self.missed = True
        elif event.name == SETTLED and event.data["verdict"] == ACCEPTED:
            kind, _, name = event.data["stream"].partition("/")
            if kind in _PATHS:
                self._changed[kind, name] = event.data["principal"]

    def touch(self, sessions: Iterable[str], jobs: Iterable[str]) -> None:
        """Mark the rows of these sessions and jobs as changed, so that the next `refresh` reads them again.

        `sessions` are names and `jobs` are ids. Makes no request.
        """
        for kind, names in ((SESSION, sessions), (JOB, jobs)):
            for name in names:
                self._changed.setdefault((kind, name), None)

    def refresh(self) -> list[RowChange]:
        """Read the changed rows from the gateway, update the copy, and return the changes.

        Reads at most 200 rows; the next call reads the rest. An empty list means that no row differs from the
        copy, or that the gateway did not answer: `failure` is then set, else None. A row that the gateway does
        not know is skipped. Raises TrunklineError for any other error of a request, such as Refused.
        """
        found: list[RowChange] = []
        self.failure = None
        for kind, name in list(self._changed)[:_LOOK_UP_MOST]:
            by = self._changed.pop((kind, name))
            try:
                row = self._gateway.get(path_of(_PATHS[kind], name))
            except NotFound:
                continue
            except BackboneUnreachable as error:
                self._changed[kind, name] = by
                self.failure = error
                return found
            before = self._rows[kind].get(name)
            if row != before:
                self._rows[kind][name] = row
                found.append(RowChange(kind, name, before, row, by))
        return found

    def job_status(self, job_id: str) -> str | None:
        """Return a job's status from the copy, or from the gateway if the copy does not have the job.

        None means that the job is unknown if `failure` is None, and otherwise that the gateway does not answer.
        After a failure no request is made until the next `refresh`. Raises TrunklineError for any other error
        of a request.
        """
        if job_id not in self.jobs and job_id not in self._unknown and self.failure is None:
            try:
                self.jobs[job_id] = self._gateway.get(path_of("jobs", job_id))
            except NotFound:
                self._unknown.add(job_id)
            except BackboneUnreachable as error:
                self.failure = error
        row = self.jobs.get(job_id)
        return None if row is None else str(row["status"])


def follow_registries(gateway: GatewayClient, **options: Any) -> EventStream:
    """Return the gateway's stream of all events that the caller may see. Open it with `with`.

    Pass its events to `RegistryFollower.take`. `options` are keyword arguments of EventStream, such as
    `give_up_s`.
    """
    return EventStream(gateway, path_of("events"), **options)
