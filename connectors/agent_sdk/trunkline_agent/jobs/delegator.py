"""A delegator: submits jobs to the hub, watches them to their end, and cancels them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.hub.server_events import ServerEvent
from trunkline_agent.hub.sync_client import HubClient
from trunkline_agent.jobs.delegator_plans import JobUpdate, JobWatch, SubmittedJob, cancellation, submission

PATIENCE_S: Final = 30.0
_WAITING: Final = 1000
_TICK_S: Final = 0.25
# A wait without a limit of its own is divided, because a wait without a bound cannot be interrupted everywhere.
_LONGEST_WAIT_S: Final = 60.0
_END_S: Final = 5.0

Found = ServerEvent | BaseException | None
"""An event of the stream, the error that lost it, or None when the hub has ended it."""


class Delegator:
    """A delegator of jobs. It has no open connection between its calls. Thread-safe.

    Args:
        credentials: The credentials with a section `hub`, or the access to the hub.
        ca_certs: The file with the authority of the hub's TLS; None: that of the credentials, or those that
            this machine trusts.
        patience_s: How long a request without an answer is sent again, and how long a watch goes on without a
            connection.
    """

    def __init__(
        self,
        credentials: Credentials | HubAccess,
        *,
        ca_certs: str | os.PathLike[str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if isinstance(credentials, Credentials):
            ca_certs = ca_certs or credentials.ca_certs
            credentials = credentials.hub_access()
        self._access, self._ca_certs, self._patience_s = credentials, ca_certs, patience_s

    def submit(
        self,
        description: str,
        *,
        session: str | None = None,
        notify: Sequence[str] | None = None,
        broker: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> SubmittedJob:
        """Register a job, which an agent can pick then, and return its id and secret.

        Args:
            description: The task, for the agent that picks the job.
            session: The only agent session that may pick it; None: any.
            notify: The events of which the caller's mailbox gets a message, of `permission` and `end`; None:
                the end.
            broker: The job's own MQTT broker: `host`, `port`, `tls`, `username`, `password` ...; None: the
                common broker.
            key: An idempotency key: with the same key it is the same job. None: a new one for this call; within
                the handling of a message one that a repeated handling makes again for the same job.

        Raises:
            UsageError: An argument is not valid.
            Refused: The hub refuses the token, or the key was used for another job.
            RateLimited: The caller has too many live jobs.
            BackboneUnreachable: The hub does not answer. With the same `key` the call can be repeated.
        """
        with self._client() as client:
            return client.run(submission(description, session, notify, broker, key, self._patience_s))

    def cancel(self, job_id: str, reason: str = "", *, key: str | None = None) -> str:
        """Cancel a job that has not ended, and return its state: `cancelled`.

        Raises NotFound for an unknown job, Refused for one that has ended, and BackboneUnreachable.
        """
        with self._client() as client:
            return client.run(cancellation(job_id, reason, key, self._patience_s))

    def watch(
        self, job_id: str, *, idle_timeout_s: float | None = None, total_timeout_s: float | None = None
    ) -> Iterator[JobUpdate]:
        """Yield the events of a job as the hub accepts them, to its end. The last update has `is_end`.

        The watch begins with the first `next`, and earlier events are not in it. Of a job that has ended it
        yields the end alone. It reconnects by itself. Without a time limit it may wait for ever.

        Args:
            job_id: The job.
            idle_timeout_s: The longest time without an event; None: no limit. Each event restarts it.
            total_timeout_s: The longest time of the watch; None: no limit.

        Raises:
            WatchTimeout: A time limit has passed. The job goes on.
            NotFound: There is no such job.
            Refused: The hub refuses the token.
            BackboneUnreachable: There was no connection to the hub for the delegator's patience.
        """
        return _followed(self, JobWatch(job_id, idle_timeout_s, total_timeout_s, self._patience_s))

    def _client(self) -> HubClient:
        return HubClient(self._access, self._ca_certs)


def _followed(delegator: Delegator, watch: JobWatch) -> Generator[JobUpdate, None, None]:
    while True:
        with _stream(delegator._client(), watch) as found:
            lost: BackboneUnreachable | None = None
            while True:
                event = _next(found, watch)
                if isinstance(event, BackboneUnreachable):
                    lost = event
                    break
                if isinstance(event, BaseException):
                    raise event
                if event is None:
                    break
                update = watch.take(event)
                if update is not None:
                    yield update
                    if update.is_end:
                        return
        time.sleep(min(watch.pause_s(lost), watch.left_s()))


@contextmanager
def _stream(client: HubClient, watch: JobWatch) -> Iterator[queue.Queue[Found]]:
    """Open the stream on a thread of its own, so that its reader can wait for less than the hub is silent."""
    found: queue.Queue[Found] = queue.Queue(_WAITING)
    closed = threading.Event()

    def put(one: Found) -> None:
        while not closed.is_set():
            with suppress(queue.Full):
                found.put(one, timeout=_TICK_S)
                return

    def read() -> None:
        try:
            for event in client.events(watch.request()):
                put(event)
            put(None)
        except Exception as error:  # noqa: BLE001  raised to the reader
            put(error)

    reader = threading.Thread(target=read, name="job-watch", daemon=True)
    reader.start()
    try:
        yield found
    finally:
        closed.set()
        client.close()
        reader.join(_END_S)


def _next(found: queue.Queue[Found], watch: JobWatch) -> Found:
    """Wait for the next event. Raises WatchTimeout."""
    while True:
        try:
            return found.get(timeout=max(0.0, min(watch.left_s(), _LONGEST_WAIT_S)))
        except queue.Empty:
            continue
