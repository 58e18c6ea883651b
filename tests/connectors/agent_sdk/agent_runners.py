"""The sync and the async agent behind the same methods, for tests that hold for both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trunkline_agent import Agent, AsyncAgent
from trunkline_agent.credentials import Credentials


class SyncPlayer:
    """A sync agent. Each method that it does not have is that of the agent."""

    def __init__(self, credentials: Credentials, **options: Any) -> None:
        self.credentials = credentials
        self.agent = Agent(credentials.name, credentials, **options)
        self.name = credentials.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)

    def reply_to(self, message: Any, *args: Any, **options: Any) -> Any:
        return message.reply(*args, **options)

    def blob_of(self, message: Any) -> bytes:
        return message.blob()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextmanager
    def handling(self, message: Any) -> Iterator[Any]:
        with message:
            yield message

    def iterate(self, **options: Any) -> Iterator[Any]:
        yield from self.agent.messages(**options)


class AsyncPlayer:
    """An async agent, whose event loop runs during each call."""

    def __init__(self, credentials: Credentials, **options: Any) -> None:
        self.credentials = credentials
        self.loop = asyncio.Runner()
        self.agent = AsyncAgent(credentials.name, credentials, **options)
        self.name = credentials.name

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.agent, name)
        return lambda *args, **options: self.loop.run(method(*args, **options))

    def close(self) -> None:
        self.loop.run(self.agent.close())
        self.loop.close()

    def reply_to(self, message: Any, *args: Any, **options: Any) -> Any:
        return self.loop.run(message.reply(*args, **options))

    def blob_of(self, message: Any) -> bytes:
        return self.loop.run(message.blob())

    def sleep(self, seconds: float) -> None:
        self.loop.run(asyncio.sleep(seconds))

    @contextmanager
    def handling(self, message: Any) -> Iterator[Any]:
        # The runs of a runner share one context, as the steps of a task do.
        self.loop.run(message.__aenter__())
        try:
            yield message
        except BaseException as error:
            self.loop.run(message.__aexit__(type(error), error, error.__traceback__))
            raise
        self.loop.run(message.__aexit__(None, None, None))

    def iterate(self, **options: Any) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(found)

        async def ended() -> None:
            await found.aclose()

        found = self.agent.messages(**options)
        try:
            while True:
                try:
                    yield self.loop.run(following())
                except StopAsyncIteration:
                    return
        finally:
            self.loop.run(ended())


AGENTS = {"sync": SyncPlayer, "async": AsyncPlayer}
