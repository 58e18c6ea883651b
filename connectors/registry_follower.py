"""Keeps copies of the registries of jobs and sessions up to date, by the gateway's settled stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from connectors.event_stream import GAP, SETTLED, SNAPSHOT, EventStream, ServerEvent
from connectors.gateway_client import GatewayClient, path_of
from schemas.errors import NotFound
from schemas.ids import JOB, SESSION
from schemas.verdicts import ACCEPTED
from schemas.view_rows import REGISTRY_JOBS, REGISTRY_SESSIONS

Row = dict[str, Any]
_PATHS: Final = {JOB: "jobs", SESSION: "sessions"}
# More changes than this at once: read the rows as they are asked for, not one by one.
_LOOK_UP_MOST: Final = 200


class RowChange(NamedTuple):
    """A row of `kind` (job or session) that has changed; `by`: the principal whose record did it."""

    kind: str
    name: str
    before: Row | None
    row: Row
    by: str | None


class RegistryFollower:
    """The rows by name, in `jobs` and `sessions`. Feed it with `take`; `refresh` looks up what has changed."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self.jobs: dict[str, Row] = {}
        self.sessions: dict[str, Row] = {}
        self._rows = {JOB: self.jobs, SESSION: self.sessions}
        self._changed: dict[tuple[str, str], str | None] = {}
        self._looked_up: dict[str, str | None] = {}
        self.has_snapshot = False
        self.missed = False

    def take(self, event: ServerEvent) -> None:
        """Note an event of the stream."""
        if event.name == SNAPSHOT:
            # After a gap the rows are all there is to know; what has changed shows when they are compared.
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
        """Have these looked up with the next `refresh`."""
        for name in sessions:
            self._changed.setdefault((SESSION, name), None)
        for name in jobs:
            self._changed.setdefault((JOB, name), None)

    def refresh(self) -> list[RowChange]:
        """Look up what has changed since the last call. Raises TrunklineError."""
        found = []
        for kind, name in list(self._changed)[:_LOOK_UP_MOST]:
            by = self._changed.pop((kind, name))
            try:
                row = self._gateway.get(path_of(_PATHS[kind], name))
            except NotFound:
                continue
            before = self._rows[kind].get(name)
            if row != before:
                self._rows[kind][name] = row
                found.append(RowChange(kind, name, before, row, by))
        return found

    def job_status(self, job_id: str) -> str | None:
        """A job's state, asked for when it is not among the rows; None for an unknown job."""
        if job_id in self.jobs:
            status: str = self.jobs[job_id]["status"]
            return status
        if job_id not in self._looked_up:
            try:
                self.jobs[job_id] = self._gateway.get(path_of("jobs", job_id))
                return self.job_status(job_id)
            except NotFound:
                self._looked_up[job_id] = None
        return None


def follow_registries(gateway: GatewayClient, **options: Any) -> EventStream:
    """The stream to feed a RegistryFollower with: everything that this caller may see."""
    return EventStream(gateway, path_of("events"), **options)
