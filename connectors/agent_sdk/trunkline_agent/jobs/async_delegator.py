"""A delegator for programs with an event loop: the methods of `Delegator`, awaitable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from trunkline_agent.credentials import Credentials, HubAccess
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.server_events import ServerEvent
from trunkline_agent.jobs.delegator import PATIENCE_S
from trunkline_agent.jobs.delegator_plans import JobUpdate, JobWatch, SubmittedJob, cancellation, submission

_WAITING: Final = 1000


class AsyncDelegator:
    """A delegator of jobs for one event loop. It has no open connection between its calls.

    See `Delegator` for the arguments and the errors.
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
        """Register a job and return its id and secret. See `Delegator.submit`."""
        async with self._client() as client:
            return await client.run(submission(description, session, notify, broker, key, self._patience_s))

    async def cancel(self, job_id: str, reason: str = "", *, key: str | None = None) -> str:
        """Cancel a job that has not ended, and return its state. See `Delegator.cancel`."""
        async with self._client() as client:
            return await client.run(cancellation(job_id, reason, key, self._patience_s))

    def watch(
        self, job_id: str, *, idle_timeout_s: float | None = None, total_timeout_s: float | None = None
    ) -> AsyncGenerator[JobUpdate, None]:
        """Yield the events of a job as the hub accepts them, to its end. See `Delegator.watch`.

        Close the iterator (`aclose`) to end the watch earlier.
        """
        return self._followed(JobWatch(job_id, idle_timeout_s, total_timeout_s, self._patience_s))

    async def _followed(self, watch: JobWatch) -> AsyncGenerator[JobUpdate, None]:
        while True:
            async with self._stream(watch) as found:
                lost: BackboneUnreachable | None = None
                while True:
                    event = await _next(found, watch)
                    if isinstance(event, BackboneUnreachable):
                        lost = event
                        break
                    if isinstance(event, Exception):
                        raise event
                    if event is None:
                        break
                    update = watch.take(event)
                    if update is not None:
                        yield update
                        if update.is_end:
                            return
            await asyncio.sleep(min(watch.pause_s(lost), watch.left_s()))

    @asynccontextmanager
    async def _stream(self, watch: JobWatch) -> AsyncIterator[asyncio.Queue[ServerEvent | Exception | None]]:
        """Open the stream in a task of its own, so that its reader can stop waiting without ending it."""
        found: asyncio.Queue[ServerEvent | Exception | None] = asyncio.Queue(_WAITING)

        async def read() -> None:
            try:
                async with self._client() as client:
                    async for event in client.events(watch.request()):
                        await found.put(event)
                await found.put(None)
            except Exception as error:  # noqa: BLE001  raised to the reader
                await found.put(error)

        reader = asyncio.create_task(read(), name="job-watch")
        try:
            yield found
        finally:
            reader.cancel()
            await asyncio.wait((reader,))

    def _client(self) -> AsyncHubClient:
        return AsyncHubClient(self._access, self._ca_certs)


async def _next(
    found: asyncio.Queue[ServerEvent | Exception | None], watch: JobWatch
) -> ServerEvent | Exception | None:
    """Wait for the next event. Raises WatchTimeout."""
    left_s = watch.left_s()
    try:
        async with asyncio.timeout(None if left_s == float("inf") else left_s):
            return await found.get()
    except TimeoutError:
        watch.left_s()
        return await _next(found, watch)
