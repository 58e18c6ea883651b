"""Copies of the registries of jobs and sessions, kept up to date by the gateway's settled stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from connectors.gateway_client.event_stream import GAP, SETTLED, SNAPSHOT, EventStream, ServerEvent
from connectors.gateway_client.gateway_client import GatewayClient, path_of
from schemas.errors import BackboneUnreachable, NotFound
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.session.session_registry import REGISTRY_SESSIONS
from schemas.wire.ids import JOB, SESSION
from schemas.wire.verdicts import ACCEPTED

Row = dict[str, Any]
_PATHS: Final = {JOB: "jobs", SESSION: "sessions"}
# The most rows that one `refresh` looks up.
_LOOK_UP_MOST: Final = 200


class RowChange(NamedTuple):
    """A row of `kind` (job or session) that has changed. `by` is the principal whose record changed it."""

    kind: str
    name: str
    before: Row | None
    row: Row
    by: str | None


class RegistryFollower:
    """The rows by name, in `jobs` and `sessions`. Pass events to `take`; `refresh` looks up the changed rows.

    A gateway that does not answer is not fatal: `failure` is set until the next `refresh`, which looks the
    changed rows up. The event stream gives up after a longer time.
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
        """Note an event of the stream."""
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
        """Mark these rows to be looked up by the next `refresh`."""
        for kind, names in ((SESSION, sessions), (JOB, jobs)):
            for name in names:
                self._changed.setdefault((kind, name), None)

    def refresh(self) -> list[RowChange]:
        """Look up the rows that have changed since the last call.

        Raises TrunklineError, but for BackboneUnreachable it sets `failure`.
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
        """Return a job's state; ask the gateway if the job is not among the rows.

        None means that the job is unknown or that the gateway does not answer.
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
    """Return the stream for a RegistryFollower: all events that this caller may see."""
    return EventStream(gateway, path_of("events"), **options)
