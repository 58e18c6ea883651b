"""A reader of the gateway's streams, server-sent events, and copies of registries that it keeps up to date.

The events are received on a thread of their own. A lost connection is made again with `Last-Event-ID`, after a
back-off. So no event is missed as long as the gateway still has it in memory; events that it no longer has are
announced by an event `gap`.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple, Self

import structlog

from connectors.plumbing.gateway_client.gateway_access import explained
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.streams.job.job_registry import REGISTRY_JOBS
from schemas.streams.session.sessions import REGISTRY_SESSIONS
from trunkline_agent.errors import BackboneUnreachable, NotFound, TrunklineError
from trunkline_agent.hub.http_exchange import EventParser
from trunkline_agent.hub.plans import Request
from trunkline_agent.wire.ids import JOB, SESSION
from trunkline_agent.wire.verdicts import ACCEPTED

log = structlog.stdlib.get_logger(__name__)

SNAPSHOT: Final = "snapshot"
SETTLED: Final = "settled"
MESSAGE: Final = "message"
GAP: Final = "gap"
# The gateway sends a comment at least this often; a connection that is silent for longer is dead.
_SILENCE_S: Final = 45.0
# A pause is between half of it and all of it, at random, so that not all readers come back in the same moment.
_BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
_WAITING: Final = 1000
_TICK_S: Final = 0.25
_STOP_S: Final = 5.0


def log_lost(why: str | None) -> None:
    """Log that the connection of a stream was lost, or is there again (None): the `lost` of a program."""
    if why is None:
        log.info("gateway_back")
    else:
        log.warning("gateway_away", why=why)


class ServerEvent(NamedTuple):
    """One server-sent event of the gateway: its name, its JSON as Python values, and the id to resume from.

    The name is `snapshot` (state at the start), `settled` (one settled record), or `gap` (events were missed);
    on the stream of a mailbox, `message`.
    """

    name: str
    data: Any
    id: str | None


class EventStream:
    """A stream of server-sent events from the gateway, read and reconnected by a thread of its own.

    Open it with `with`. Then call `next` for each event.

    Args:
        client: the gateway to read from, or several that have the same events. When a connection is lost, the
            next one is made to the next gateway.
        path: the path of the stream, such as `/api/hub/events`.
        parameters: query parameters that choose the events. None values are left out.
        give_up_s: after so many seconds without a connection, `next` raises BackboneUnreachable.
        lost: called on the thread, with a reason when a connection is lost, and with None when there is one
            again. Failed attempts in between are not reported.
        last_id: the id of the last event that was received before; None begins as the gateway does without one.
    """

    def __init__(
        self,
        client: GatewayClient | Sequence[GatewayClient],
        path: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        give_up_s: float = 60.0,
        lost: Callable[[str | None], object] = lambda _why: None,
        last_id: str | None = None,
    ) -> None:
        self._clients = [client] if isinstance(client, GatewayClient) else list(client)
        self._client = self._clients[0]
        self._path = path
        self._parameters = {k: v for k, v in (parameters or {}).items() if v is not None}
        self._give_up_s = give_up_s
        self._on_lost = lost
        self._found: queue.Queue[ServerEvent | Exception] = queue.Queue(_WAITING)
        self._closed = threading.Event()
        self._hub: GatewayClient | None = None
        self._last_id = last_id
        self._thread = threading.Thread(target=self._run, name="event-stream", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, timeout_s: float) -> ServerEvent | None:
        """Wait for the next event and return it, or None if none arrives within `timeout_s` seconds.

        The thread reconnects a lost connection, which is no error here. Raises the TrunklineError that ended
        the stream, such as BackboneUnreachable (no connection for `give_up_s`) or Refused (the gateway refused
        the token).
        """
        try:
            found = self._found.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def first(self, timeout_s: float) -> ServerEvent:
        """Wait for the stream's first event, which is the snapshot, and return it. Call it before `next`.

        Raises BackboneUnreachable when no event arrives within `timeout_s` seconds, and the error that ended
        the stream, such as Refused.
        """
        found = self.next(timeout_s)
        if found is None:
            raise self._client.unreachable("it sends no snapshot")
        return found

    def close(self) -> None:
        """Close the connection and stop the thread, for which it waits at most 5 s.

        `with` calls it at the end.
        """
        self._closed.set()
        if self._hub is not None:
            self._hub.close()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001  passed to the reader
            self._put(error)

    def _follow(self) -> None:
        since, failures, is_lost = time.monotonic(), 0, False
        while not self._closed.is_set():
            try:
                for event in self._connection():
                    if is_lost:
                        self._on_lost(None)
                    since, failures, is_lost = time.monotonic(), 0, False
                    if event is not None:
                        self._last_id = event.id or self._last_id
                        self._put(event)
                why = "it ended the stream"
            except BackboneUnreachable as error:
                why = explained(error.__cause__ or error)
            except TrunklineError:
                if not self._closed.is_set():
                    raise
            if self._closed.is_set():
                return
            if not is_lost:
                self._on_lost(why)
                is_lost = True
            if time.monotonic() - since > self._give_up_s:
                raise self._client.unreachable(why)
            failures += 1
            self._client = self._clients[(self._clients.index(self._client) + 1) % len(self._clients)]
            # Each gateway is asked once before the next pause is longer.
            rounds = (failures - 1) // len(self._clients)
            longest_s = _BACKOFF_S[min(rounds, len(_BACKOFF_S) - 1)]
            self._closed.wait(longest_s * random.uniform(0.5, 1.0))  # noqa: S311  no secret depends on it

    def _connection(self) -> Iterator[ServerEvent | None]:
        """Yield None when a connection is made, then its events."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-cache"}
        if self._last_id is not None:
            headers["Last-Event-ID"] = self._last_id
        request = Request("GET", self._path, self._parameters, headers)
        # A client of its own, because another thread closes its connection.
        with self._client.another() as hub:
            self._hub = hub
            if self._closed.is_set():
                return
            parser = EventParser()
            with closing(hub.parts(request, _SILENCE_S, self._client.error_of)) as parts:
                for part in parts:
                    if not part:  # the answer has begun
                        yield None
                    for event in parser.feed(part):
                        yield ServerEvent(event.name, event.json(), event.id)

    def _put(self, found: ServerEvent | Exception) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._found.put(found, timeout=_TICK_S)
                return


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
