"""The stream of a job's events in a task of its own, so that its reader can stop waiting."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Final, Self

from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.http_exchange import ServerEvent
from trunkline_agent.jobs.delegator_plans import JobWatch

_WAITING: Final = 1000
pause = asyncio.sleep


class StreamTask:
    """The stream of a watch, open while its `async with` block runs. The client is closed with it."""

    def __init__(self, client: AsyncHubClient, watch: JobWatch) -> None:
        self._client, self._watch = client, watch
        self._found: asyncio.Queue[ServerEvent | Exception | None] = asyncio.Queue(_WAITING)

    async def next(self) -> ServerEvent | Exception | None:
        """Wait for the next event, the error that lost the stream, or None for its end. Raises WatchTimeout."""
        while True:
            left_s = self._watch.left_s()
            try:
                async with asyncio.timeout(None if left_s == inf else left_s):
                    return await self._found.get()
            except TimeoutError:
                continue

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read(), name="job-watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await asyncio.wait((self._reader,))

    async def _read(self) -> None:
        try:
            async with self._client:
                async for event in self._client.events(self._watch.request()):
                    await self._found.put(event)
            await self._found.put(None)
        except Exception as error:  # noqa: BLE001  raised to the reader
            await self._found.put(error)
