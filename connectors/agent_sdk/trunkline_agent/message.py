"""Messages that an agent received: what they say, and how they are answered, acknowledged and given back."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Token
from types import TracebackType
from typing import Any, Protocol, Self

from trunkline_agent.hub.derived_keys import HANDLED, Handling
from trunkline_agent.hub.held_messages import Held
from trunkline_agent.hub.hub_values import BlobReference, Sent, not_a_gateway

REPLY_TYPE = "answer"


class ReceivedMessage:
    """A message that an agent received, as the hub shows it.

    Attributes:
        id: Its id.
        sender: The mailbox of the sender, to which an answer goes.
        recipient: The mailbox that got it.
        type: Its kind, a word that the sender chose.
        payload: Its content: any JSON as Python values.
        timestamp: When the log stored it, in ISO 8601.
        in_reply_to: The id of the message that it answers. None: none.
        thread: The id of the conversation. None: none.
        topic: The topic to which it was published. None: none.
        reference: The blob that it refers to. None: none.
        replay_of: The id of the dead message that it repeats. None: none.
        attempt: How often it was handed out, if it is leased. Above 1, its work may have begun before.
    """

    def __init__(self, found: Mapping[str, Any], held: Held | None = None) -> None:
        try:
            self.id: str = found["id"]
            self.sender: str = found["sender"]
            self.recipient: str = found["recipient"]
            self.type: str = found["type"]
            self.payload: Any = found["payload"]
            self.timestamp: str = found["timestamp"]
            get = found.get
        except (KeyError, TypeError, AttributeError):
            raise not_a_gateway() from None
        self.in_reply_to: str | None = get("in_reply_to")
        self.thread: str | None = get("thread")
        self.topic: str | None = get("topic")
        blob = get("blob")
        self.reference: BlobReference | None = None if blob is None else BlobReference.of(blob)
        self.replay_of: str | None = get("replay_of")
        self.attempt: int | None = get("attempt")
        self.held = held
        self.handling = Handling(self.id, self.attempt)
        self._token: Token[Handling | None] | None = None

    @property
    def lease_lost(self) -> bool:
        """Whether the hub has said that the message's lease is another consumer's now.

        A long handling should look at it and stop: its work may be done a second time.
        """
        return self.held is not None and self.held.is_lost

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.type!r} from {self.sender!r}>"

    def _begin(self) -> None:
        self._token = HANDLED.set(self.handling)

    def _end(self) -> None:
        if self._token is not None:
            token, self._token = self._token, None
            try:
                HANDLED.reset(token)
            except ValueError:
                # The block ends in another context than it began in, which then never sees the value.
                return


class MessageOwner(Protocol):
    """The agent that received a message: what the message asks of it."""

    def reply(
        self,
        message: Message,
        payload: Any = None,
        type: str = REPLY_TYPE,  # noqa: A002
        *,
        priority: str | None = None,
        expires_in_s: float | None = None,
        blob: BlobReference | str | None = None,
        key: str | None = None,
    ) -> Sent:
        """Send an answer to the sender of a message."""

    def blob(self, message: Message) -> bytes:
        """Fetch the content that a message refers to."""

    def ack(self, message: Message) -> None:
        """Acknowledge a message."""

    def nack(self, message: Message, reason: str = "") -> None:
        """Give a message back."""

    def end(self, message: Message, error: BaseException | None) -> None:
        """End the handling of a message."""


class Message(ReceivedMessage):
    """A message of an `Agent`. Handle it in a `with` block.

    The end of the block acknowledges the message. A block that raises gives it back, with the name of the
    exception's type, and the exception goes on. During the block the lease is extended, and the keys of what is
    sent are derived from the message's id, so that a repeated handling sends nothing twice.
    """

    def __init__(self, agent: MessageOwner, found: Mapping[str, Any], held: Held | None = None) -> None:
        super().__init__(found, held)
        self._agent = agent

    def reply(
        self,
        payload: Any = None,
        type: str = REPLY_TYPE,  # noqa: A002
        *,
        priority: str | None = None,
        expires_in_s: float | None = None,
        blob: BlobReference | str | None = None,
        key: str | None = None,
    ) -> Sent:
        """Send an answer to the sender, in the same conversation. See `Agent.reply`."""
        return self._agent.reply(
            self, payload, type, priority=priority, expires_in_s=expires_in_s, blob=blob, key=key
        )

    def blob(self) -> bytes:
        """Fetch the content that the message refers to. See `Agent.blob`."""
        return self._agent.blob(self)

    def ack(self) -> None:
        """Acknowledge the message, so that it is never handed out again. Raises LeaseLost."""
        self._agent.ack(self)

    def nack(self, reason: str = "") -> None:
        """Give the message back, to be handed out again at once. `reason` is shown with a dead message."""
        self._agent.nack(self, reason)

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._agent.end(self, error)


class AsyncMessageOwner(Protocol):
    """The agent that received a message: what the message asks of it."""

    async def reply(
        self,
        message: AsyncMessage,
        payload: Any = None,
        type: str = REPLY_TYPE,  # noqa: A002
        *,
        priority: str | None = None,
        expires_in_s: float | None = None,
        blob: BlobReference | str | None = None,
        key: str | None = None,
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
    """A message of an `AsyncAgent`. Handle it in an `async with` block, as `Message` in a `with` block."""

    def __init__(self, agent: AsyncMessageOwner, found: Mapping[str, Any], held: Held | None = None) -> None:
        super().__init__(found, held)
        self._agent = agent

    async def reply(
        self,
        payload: Any = None,
        type: str = REPLY_TYPE,  # noqa: A002
        *,
        priority: str | None = None,
        expires_in_s: float | None = None,
        blob: BlobReference | str | None = None,
        key: str | None = None,
    ) -> Sent:
        """Send an answer to the sender, in the same conversation. See `AsyncAgent.reply`."""
        return await self._agent.reply(
            self, payload, type, priority=priority, expires_in_s=expires_in_s, blob=blob, key=key
        )

    async def blob(self) -> bytes:
        """Fetch the content that the message refers to. See `AsyncAgent.blob`."""
        return await self._agent.blob(self)

    async def ack(self) -> None:
        """Acknowledge the message, so that it is never handed out again. Raises LeaseLost."""
        await self._agent.ack(self)

    async def nack(self, reason: str = "") -> None:
        """Give the message back, to be handed out again at once. `reason` is shown with a dead message."""
        await self._agent.nack(self, reason)

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        await self._agent.end(self, error)
