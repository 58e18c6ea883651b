"""The async delegator: submits jobs to the hub, watches them to their end, and cancels them."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import BackboneUnreachable, RateLimited
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.http_exchange import ServerEvent
from trunkline_agent.jobs.delegator_plans import (
    PATIENCE_S,
    JobUpdate,
    JobWatch,
    SubmittedJob,
    cancellation,
    submission,
)
from trunkline_agent.jobs.stream_task import StreamTask, pause


class AsyncDelegator:
    """A delegator of jobs, for one event loop. It has no open connection between its calls.

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

    async def submit(
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
        async with self._client() as client:
            return await client.run(submission(description, session, notify, broker, key, self._patience_s))

    async def cancel(self, job_id: str, reason: str = "", *, key: str | None = None) -> str:
        """Cancel a job that has not ended, and return its state: `cancelled`.

        Raises NotFound for an unknown job, Refused for one that has ended, and BackboneUnreachable.
        """
        async with self._client() as client:
            return await client.run(cancellation(job_id, reason, key, self._patience_s))

    def watch(
        self, job_id: str, *, idle_timeout_s: float | None = None, total_timeout_s: float | None = None
    ) -> AsyncGenerator[JobUpdate, None]:
        """Yield the events of a job as the hub accepts them, to its end. The last update has `is_end`.

        The watch begins with the first `next`, and earlier events are not in it. Of a job that has ended it
        yields the end alone. It reconnects by itself. Without a time limit it may wait for ever.

        Close the iterator (`aclose`) to end the watch earlier.

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
        return self._followed(JobWatch(job_id, idle_timeout_s, total_timeout_s, self._patience_s))

    async def _followed(self, watch: JobWatch) -> AsyncGenerator[JobUpdate, None]:
        while True:
            async with StreamTask(self._client(), watch) as stream:
                while isinstance(found := await stream.next(), ServerEvent):
                    update = watch.take(found)
                    if update is not None:
                        yield update
                        if update.is_end:
                            return
            if found is not None and not isinstance(found, BackboneUnreachable | RateLimited):
                raise found
            await pause(min(watch.pause_s(found), watch.left_s()))

    def _client(self) -> AsyncHubClient:
        return AsyncHubClient(self._access, self._ca_certs)
