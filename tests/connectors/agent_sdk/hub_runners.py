"""The sync and the async client of the hub behind the same few methods, for tests that hold for both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager
from itertools import islice
from typing import Any

from trunkline_agent.credentials import HubAccess
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.sync_client import HubClient


class SyncRunner:
    """The sync client."""

    def __init__(self, access: HubAccess, **options: Any) -> None:
        self.client = HubClient(access, **options)

    def run(self, plan: Any) -> Any:
        return self.client.run(plan)

    def parts(self, request: Any, **options: Any) -> Iterator[bytes]:
        with closing(self.client.parts(request, **options)) as found:
            yield from found

    def events(self, request: Any, most: int) -> list[Any]:
        with closing(self.client.events(request)) as found:
            return list(islice(found, most))

    def close(self) -> None:
        self.client.close()


class AsyncRunner:
    """The async client, whose loop runs during the calls alone."""

    def __init__(self, access: HubAccess, **options: Any) -> None:
        self.loop = asyncio.Runner()
        self.client = AsyncHubClient(access, **options)

    def run(self, plan: Any) -> Any:
        return self.loop.run(self.client.run(plan))

    def parts(self, request: Any, **options: Any) -> Iterator[bytes]:
        async def first() -> bytes:
            return await anext(stream)

        stream = self.client.parts(request, **options)
        while True:
            try:
                yield self.loop.run(first())
            except StopAsyncIteration:
                return

    def events(self, request: Any, most: int) -> list[Any]:
        async def taken() -> list[Any]:
            found = []
            async with aclosing(self.client.events(request)) as events:
                async for event in events:
                    found.append(event)
                    if len(found) == most:
                        break
            return found

        return self.loop.run(taken())

    def close(self) -> None:
        self.loop.run(self.client.close())
        self.loop.close()


RUNNERS = {"sync": SyncRunner, "async": AsyncRunner}


@contextmanager
def running(kind: str, access: HubAccess, **options: Any) -> Iterator[Any]:
    """A client of one kind, closed at the end."""
    runner = RUNNERS[kind](access, **options)
    try:
        yield runner
    finally:
        runner.close()
