"""The async agent: its mailbox at the hub, and what it sends, asks, publishes and schedules."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, Unpack

from trunkline_agent.async_message import AsyncMessage
from trunkline_agent.async_operations import AsyncOperations
from trunkline_agent.credentials import Credentials
from trunkline_agent.errors import TrunklineError
from trunkline_agent.hub import agent_plans, message_plans
from trunkline_agent.hub.agent_plans import (
    LEASE_S,
    LOG,
    LONGEST_S,
    NOT_ACKNOWLEDGED,
    PARTING,
    PATIENCE_S,
    AgentCalls,
    reason_of,
)
from trunkline_agent.hub.async_client import AsyncHubClient
from trunkline_agent.hub.held_messages import ACKNOWLEDGED, GIVEN_BACK, Held, HeldMessages
from trunkline_agent.hub.hub_requests import HANDLED
from trunkline_agent.hub.hub_values import REPLY_TYPE, BlobReference, Published, Sent
from trunkline_agent.hub.lease_task import LeaseTask
from trunkline_agent.hub.message_plans import Taking
from trunkline_agent.hub.operation_values import Schedule, SentFields
from trunkline_agent.hub.plans import Plan


class AsyncAgent(AsyncOperations):
    """An agent of the hub, for the tasks of one event loop. Use it with `async with`, or call `close`.

        async with AsyncAgent("builder", Credentials.load("builder.json")) as agent:
            async for message in agent.messages():
                async with message:
                    await message.reply({"text": "hi"})

    The constructor makes no request. Each request is sent again, with the same idempotency key, while the hub
    does not answer; so none is carried out twice. A cancelled task ends its wait at once.

    Args:
        name: The agent's name. None: that of the credentials.
        credentials: The credentials, or the path of their file. None: those of the environment.
        patience_s: How long a request is sent again before it raises BackboneUnreachable or RateLimited.

    Raises:
        UsageError: The credentials are not valid, or those of another agent.
    """

    def __init__(
        self,
        name: str | None = None,
        credentials: Credentials | str | os.PathLike[str] | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._calls = AgentCalls(name, credentials, patience_s)
        self.name = self._calls.name
        self.hub = AsyncHubClient(self._calls.access, self._calls.ca_certs)
        self._held = HeldMessages()
        self._leases = LeaseTask(self.hub, self._held, self.name)

    def messages(
        self,
        *,
        limit: int = 1,
        lease_s: int | None = LEASE_S,
        wait_s: float | None = None,
        longest_s: float | None = LONGEST_S,
    ) -> AsyncIterator[AsyncMessage]:
        """Return an iterator of the messages of the mailbox, the most urgent first. It waits for the next one.

        An `async with` block of the message acknowledges it, or gives it back when the block raises. Without
        such a block it is acknowledged when the loop asks for the next one, and given back when the loop or the
        agent ends. The lease is extended until then. For several messages at a time use several tasks.

        Args:
            limit: How many messages one request takes. The loop gives back those that it does not reach.
            lease_s: The duration of a lease. If the agent is killed, the message is handed out again after it.
                None takes the messages for good: those that are not handled are lost.
            wait_s: How long to wait for the next message before the iteration ends. None waits without an end.
            longest_s: How long a handling may take. A message that takes longer is given back, to be handed out
                again; its `async with` block is cancelled, and ends with LeaseLost. None has no end.

        Raises:
            LeaseLost: A message could not be acknowledged: another consumer has it, or it took too long.
            BackboneUnreachable: The hub did not answer for `patience_s`.
            TrunklineError: Any other refusal by the hub.
        """
        return self._messages(message_plans.checked(Taking(limit, lease_s, wait_s, longest_s)))

    async def receive(
        self,
        *,
        lease_s: int | None = LEASE_S,
        wait_s: float | None = None,
        longest_s: float | None = LONGEST_S,
    ) -> AsyncMessage | None:
        """Take one message, for an `async with` block, or `ack` or `nack`. None: none came within `wait_s`."""
        wanted = message_plans.checked(Taking(1, lease_s, wait_s, longest_s))
        return next(iter(await self._take(wanted)), None)

    async def ack(self, message: AsyncMessage) -> None:
        """Acknowledge a message, unless that was done before. Raises LeaseLost, or UsageError after `nack`."""
        held = message.held
        if held is not None and self._held.settle(held, ACKNOWLEDGED):
            await self._settle(held, message_plans.acknowledge(held, self._calls.retries))

    async def nack(self, message: AsyncMessage, reason: str = "") -> None:
        """Give a message back, unless that was done before. `reason` is shown with a dead message.

        Raises UsageError after an `ack`.
        """
        held = message.held
        if held is not None and self._held.settle(held, GIVEN_BACK):
            plan = message_plans.give_back(held.lease_id, [held.message_id], reason, self._calls.retries)
            await self._settle(held, plan)

    async def end(self, message: AsyncMessage, error: BaseException | None) -> None:
        """End the handling of a message that was not settled in it.

        Acknowledge it, or give it back because of an error.
        """
        if message.held is None or message.held.settled is not None:
            return
        if error is None:
            await self.ack(message)
        else:
            await self._give_back([message.held], reason_of(error))

    async def send(
        self,
        recipient: str,
        type: str,  # noqa: A002
        payload: Any = None,
        *,
        key: str | None = None,
        **fields: Unpack[SentFields],
    ) -> Sent:
        """Send a message. Return when the hub has stored it.

        Args:
            recipient: The name of the mailbox.
            type: The kind of the message, a word of your choice.
            payload: The content: what JSON has.
            key: The same key is the same message, which is sent once. None makes one for this call, or within
                the block of a message one that a repeated handling makes again for the same content.
            fields: The optional fields of a message: see `SentFields`.

        Raises:
            NotFound: There is no such mailbox, or no such blob.
            MessageRejected: A policy forbids the message, or the key was used for another one.
            RateLimited: Too many messages, also after `patience_s`.
            UsageError: A field is not valid.
            BackboneUnreachable: The hub did not answer. The message may have been stored.
        """
        return await self.hub.run(self._calls.send(recipient, type, payload, key, **fields))

    async def ask(
        self,
        recipient: str,
        type: str,  # noqa: A002
        payload: Any = None,
        *,
        timeout_s: float = 30.0,
        key: str | None = None,
        **fields: Unpack[SentFields],
    ) -> AsyncMessage:
        """Send a message, wait for the reply to it, and return that. No other message is taken.

        See `send` for the arguments and errors. The reply needs no acknowledgement.

        Raises:
            NoReply: No reply came within `timeout_s` seconds. A later one comes into the mailbox.
        """
        plan = self._calls.ask(recipient, type, payload, timeout_s, key, **fields)
        return AsyncMessage(self, await self.hub.run(plan))

    async def reply(
        self,
        message: AsyncMessage,
        payload: Any = None,
        type: str = REPLY_TYPE,  # noqa: A002
        *,
        key: str | None = None,
        **fields: Unpack[SentFields],
    ) -> Sent:
        """Send an answer to the sender of a message, in the same conversation.

        Its key is derived from the message's id. So of the answers that several handlings give, the first one
        is sent. See `send` for the arguments and errors.
        """
        return await self.hub.run(self._calls.reply(message, payload, type, key, **fields))

    async def publish(
        self,
        topic: str,
        type: str,  # noqa: A002
        payload: Any = None,
        *,
        key: str | None = None,
        **fields: Unpack[SentFields],
    ) -> Published:
        """Publish a message to all subscribers of a topic. Return when the hub has stored it.

        See `send` for the arguments and errors. Raises NotFound for a topic that never had a subscriber.
        """
        return await self.hub.run(self._calls.publish(topic, type, payload, key, **fields))

    async def schedule(
        self,
        name: str,
        recipient: str,
        type: str,  # noqa: A002
        payload: Any = None,
        *,
        cron: str | None = None,
        every_s: int | None = None,
        missed: str | None = None,
        priority: str | None = None,
        expires_in_s: float | None = None,
        key: str | None = None,
    ) -> Schedule:
        """Let the hub send a message again and again, in the agent's name. Replace a schedule of this name.

        Args:
            name: The name of the schedule.
            recipient: The name of the mailbox.
            type: The kind of the messages.
            payload: Their content.
            cron: The times in UTC: minute, hour, day of month, month and day of week. Either this or `every_s`.
            every_s: The seconds between two messages.
            missed: Runs to send late, if no gateway ran at their time: `skip` (none), `latest` or `all`.
            priority: As in `send`.
            expires_in_s: As in `send`.
            key: The same key is the same request: see `send`.

        Raises:
            Refused: The schedule is another agent's.
            TrunklineError: As `send` raises it.
        """
        body = {
            "recipient": recipient,
            "type": type,
            "payload": payload,
            "cron": cron,
            "every_s": every_s,
            "missed": missed,
            "priority": priority,
            "expires_in_s": expires_in_s,
        }
        return Schedule.of(await self.hub.run(agent_plans.set_schedule(name, body, key, self._calls.retries)))

    async def status(self, state: str, text: str | None = None) -> Sent:
        """Report what the agent does, by a message of the type `status` to the hub, which the log keeps."""
        return await self.hub.run(self._calls.status(state, text))

    async def upload(
        self, content: bytes | str | os.PathLike[str], content_type: str | None = None
    ) -> BlobReference:
        """Store a large content, for `blob` of a message. Without a message it is kept for an hour.

        Args:
            content: The bytes, or the path of a file.
            content_type: Its media type. None: by the file's name.

        Raises:
            NotFound: There is no such file.
            UsageError: The file cannot be read, or the content is too large.
        """
        found, found_type = await asyncio.to_thread(agent_plans.content_of, content, content_type)
        return await self.hub.run(agent_plans.upload(found, found_type, self._calls.retries))

    async def blob(self, message: AsyncMessage) -> bytes:
        """Fetch the content that a message refers to. Raises NotFound if there is none, or it was removed."""
        plan = agent_plans.download(message.recipient, message.id, message.reference, self._calls.retries)
        return await self.hub.run(plan)

    async def close(self) -> None:
        """Give back the messages that are not acknowledged, and close the connections."""
        await self._leases.stop()
        await self._give_back(self._held.rest(), NOT_ACKNOWLEDGED)
        await self.hub.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _messages(self, wanted: Taking) -> AsyncIterator[AsyncMessage]:
        waiting: deque[AsyncMessage] = deque()
        try:
            while True:
                if not waiting:
                    waiting.extend(await self._take(wanted))
                    if not waiting:
                        return
                message = waiting[0]
                if message.held is not None:
                    self._held.begin(message.held, time.monotonic())
                before = HANDLED.get()
                HANDLED.set(message.handling)
                try:
                    yield message
                finally:
                    if HANDLED.get() is message.handling:
                        HANDLED.set(before)
                waiting.popleft()
                await self.end(message, None)
        finally:
            await self._give_back([one.held for one in waiting if one.held is not None], NOT_ACKNOWLEDGED)

    async def _take(self, wanted: Taking) -> list[AsyncMessage]:
        (limit, lease_s, wait_s, longest_s), asked_at = wanted, time.monotonic()
        taken = await self.hub.run(message_plans.take(limit, lease_s, wait_s, self._calls.retries))
        found = [AsyncMessage(self, one) for one in taken.messages]
        if lease_s is None or taken.lease_id is None:
            return found
        held = self._held.add((one.id for one in found), taken.lease_id, lease_s, time.monotonic(), longest_s)
        for message, its_lease in zip(found, held, strict=True):
            message.held = its_lease
        self._leases.wake(asked_at + min(lease_s / 3, lease_s if longest_s is None else longest_s))
        return found

    async def _settle(self, held: Held, plan: Plan[None]) -> None:
        """Run a plan that settles a message. If it fails, the message can be settled again."""
        try:
            await self.hub.run(plan)
        except BaseException:
            held.settled = None
            raise

    async def _give_back(self, held: list[Held], reason: str) -> None:
        """Give messages back. The leases of those that could not be given back end by themselves."""
        by_lease: dict[str, list[str]] = {}
        for one in held:
            if one.settled is None and not one.is_lost and self._held.settle(one, GIVEN_BACK):
                by_lease.setdefault(one.lease_id, []).append(one.message_id)
        for lease_id, message_ids in by_lease.items():
            try:
                await self.hub.run(message_plans.give_back(lease_id, message_ids, reason, PARTING))
            except TrunklineError as error:
                LOG.warning("messages %s were not given back: %s", message_ids, error)
