"""Messages that an agent received: how they are answered, acknowledged and given back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

from trunkline_agent.hub.held_messages import Held
from trunkline_agent.hub.hub_values import REPLY_TYPE, ReceivedMessage, Sent
from trunkline_agent.hub.message_plans import overdue_error  # async only
from trunkline_agent.hub.operation_values import SentFields

__all__ = ["AsyncMessage", "AsyncMessageOwner", "ReceivedMessage"]


class AsyncMessageOwner(Protocol):
    """The agent that received a message: what the message asks of it."""

    async def reply(
        self,
        message: AsyncMessage,
        payload: Any = None,
        type: str = REPLY_TYPE,  # noqa: A002
        *,
        key: str | None = None,
        **fields: Unpack[SentFields],
    ) -> Sent:
        """Send an answer to the sender of a message."""

    async def blob(self, message: AsyncMessage) -> bytes:
        """Fetch the content that a message refers to."""

    async def ack(self, message: AsyncMessage) -> None:
        """Acknowledge a message."""

    async def nack(self, message: AsyncMessage, reason: str = "") -> None:
        """Give a message back."""

    async def end(self, message: AsyncMessage, error: BaseException | None) -> None:
        """End the handling of a message."""


class AsyncMessage(ReceivedMessage):
    """A message of an `AsyncAgent`. Handle it in an `async with` block.

    The end of the block acknowledges the message. A block that raises gives it back, with the name of the
    exception's type, and the exception goes on. During the block the lease is extended, and the keys of what is
    sent are derived from the message's id, so that a repeated handling sends nothing twice.

    A block that takes longer than `longest_s` is cancelled as by `asyncio.timeout`, and ends with LeaseLost.
    """

    def __init__(self, agent: AsyncMessageOwner, found: Mapping[str, Any], held: Held | None = None) -> None:
        super().__init__(found, held)
        self._agent = agent
        self._limit: asyncio.Timeout | None = None  # async only

    async def reply(
        self,
        payload: Any = None,
        type: str = REPLY_TYPE,  # noqa: A002
        *,
        key: str | None = None,
        **fields: Unpack[SentFields],
    ) -> Sent:
        """Send an answer to the sender, in the same conversation. See `AsyncAgent.reply`."""
        return await self._agent.reply(self, payload, type, key=key, **fields)

    async def blob(self) -> bytes:
        """Fetch the content that the message refers to. See `AsyncAgent.blob`."""
        return await self._agent.blob(self)

    async def ack(self) -> None:
        """Acknowledge the message, so that it is never handed out again.

        A message that was acknowledged before, or that has no lease, stays as it is. After an error, try again.

        Raises:
            LeaseLost: It was handed out again or has ended, or its handling took too long.
            BackboneUnreachable: The hub did not answer. The message may have been acknowledged.
            UsageError: It was given back before.
        """
        await self._agent.ack(self)

    async def nack(self, reason: str = "") -> None:
        """Give the message back, to be handed out again at once. `reason` is shown with a dead message."""
        await self._agent.nack(self, reason)

    async def __aenter__(self) -> Self:
        self._begin()
        if self.held is not None and self.held.longest_s is not None:  # async only
            self._limit = limit = asyncio.timeout(None)
            await limit.__aenter__()
            loop = asyncio.get_running_loop()
            self.held.on_overdue = lambda: limit.reschedule(loop.time())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if self.held is not None and self._limit is not None:  # async only
            self.held.on_overdue = None
            try:
                await self._limit.__aexit__(kind, error, trace)
            except TimeoutError:
                raise overdue_error(self.held) from error
        await self._agent.end(self, error)
