"""Delivers the messages of mailboxes to webhooks: leases one, calls the address, acknowledges it (WH-02).

**Delivers** each message at least once, until the address has answered with success or the message is dead. A
gateway that ends between call and acknowledgement leaves the lease, and the message is called again after it.
**Loses** nothing: a message stays leased in the log until its acknowledgement is there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, Protocol

import structlog

from connectors.hub.webhooks.webhook_client import GONE, CallResult, Target, WebhookClient, WebhookHealth
from connectors.plumbing.network.rates import Backoff
from schemas.settings.settings import WebhookSettings

log = structlog.stdlib.get_logger(__name__)

# After so many failures in a row the address counts as down: one call at a time, with pauses between them, so
# that its messages wait in the mailbox and do not use up their attempts.
DOWN_AFTER: Final = 3
_DOWN_PAUSE_MOST_S: Final = 60.0
_WAIT_S: Final = 300.0
_TRIES: Final = 6
_STOP_S: Final = 5.0
_AGAIN_S: Final = 5.0


class Delivery(NamedTuple):
    """A leased message that is to be delivered.

    Attributes:
        webhook: The name of the webhook, and of the mailbox.
        message_id: The id of the message.
        lease_id: The id of the lease.
        attempt: How often the message was leased, this time included.
        event: The CloudEvent as JSON.
        ended: Called once, when the event is not needed any more.
    """

    webhook: str
    message_id: str
    lease_id: str
    attempt: int
    event: bytes
    ended: Callable[[], None]


class MailboxError(Exception):
    """A mailbox cannot be read, or a record not be appended. The text says why."""


class Mailboxes(Protocol):
    """The mailboxes of webhooks, through which the deliverer gets messages and ends leases.

    Except for `target`, the methods raise MailboxError if they cannot do their work now.
    """

    def target(self, webhook: str) -> Target | None:
        """Return the address of a webhook, or None if the webhook is paused or removed."""

    async def wait(self, webhook: str, timeout_s: float) -> bool:
        """Wait until the mailbox may have a message that nobody holds; False after `timeout_s` seconds."""

    async def take(self, webhook: str) -> Delivery | None:
        """Lease a message. None if another reader has taken all of them."""

    async def acknowledge(self, delivery: Delivery) -> None:
        """Record that a message was delivered."""

    async def postpone(self, delivery: Delivery, pause_s: float) -> None:
        """Keep the lease for so many seconds. Then the message is handed out again."""

    async def give_back(self, delivery: Delivery, why: str, *, is_no_attempt: bool) -> None:
        """End the lease. After the last attempt the message is then dead, for the reason `why`."""

    async def pause(self, target: Target, why: str) -> None:
        """Pause a webhook, unless it has changed since."""


class _Pace:
    """The pace of calls of one address, by its failures in a row."""

    def __init__(self, first_s: float) -> None:
        self._pauses = Backoff(first_s, _DOWN_PAUSE_MOST_S)
        self._failures = 0
        self.pause_s = 0.0

    @property
    def is_down(self) -> bool:
        """True after three failures in a row."""
        return self._failures >= DOWN_AFTER

    def note(self, result: CallResult) -> None:
        """Note a call that has ended."""
        if result.is_ok:
            self._failures, self.pause_s = 0, 0.0
            self._pauses.reset()
            return
        self._failures += 1
        self.pause_s = _jittered(self._pauses.next_s()) if self.is_down else 0.0


def _jittered(pause_s: float) -> float:
    """Return between half and all of a pause, so that failed messages are not all repeated at one moment."""
    return pause_s * (0.5 + 0.5 * random.random())  # noqa: S311  no secret depends on it


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, and clear it. Returns False if it was not set within `timeout_s` seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


class Deliverer:
    """Calls webhooks with the messages of their mailboxes, in tasks of one event loop.

    Each webhook has a task, so a slow address delays no other one. It has up to `webhooks.calls_at_once` calls
    at once. Beyond the first of each webhook, all share `webhooks.calls_shared` calls.

    Args:
        settings: The section `webhooks` of the settings.
        client: Makes the calls.
        health: Counts the calls.
        mailboxes: Has the messages.
    """

    def __init__(
        self,
        settings: WebhookSettings,
        client: WebhookClient,
        health: WebhookHealth,
        mailboxes: Mailboxes,
    ) -> None:
        self._settings = settings
        self._client = client
        self._health = health
        self._mailboxes = mailboxes
        self._shared = asyncio.Semaphore(settings.calls_shared)
        self._serving: dict[str, asyncio.Task[None]] = {}
        # Set when a webhook has changed, so that its pause ends.
        self._changed: dict[str, asyncio.Event] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def look(self, webhook: str) -> None:
        """Begin to serve a webhook if it is active and not served yet. Call it when the webhook has changed."""
        if webhook in self._serving:
            self._changed[webhook].set()
        elif not self._is_stopping and self._mailboxes.target(webhook) is not None:
            self._changed[webhook] = asyncio.Event()
            task = self._serving[webhook] = asyncio.create_task(self._serve(webhook))
            task.add_done_callback(lambda ended: self._ended(webhook, ended))

    def _ended(self, webhook: str, task: asyncio.Task[None]) -> None:
        del self._serving[webhook], self._changed[webhook]
        if not task.cancelled() and task.exception() is not None:
            log.error("webhook_not_served", webhook=webhook, error=type(task.exception()).__name__)
            asyncio.get_running_loop().call_later(_AGAIN_S, self.look, webhook)
            return
        self.look(webhook)

    async def stop(self, wait_s: float = _STOP_S) -> None:
        """Take no further message, and wait up to `wait_s` seconds for the calls under way."""
        self._is_stopping = True
        for task in list(self._serving.values()):
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=wait_s)
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _serve(self, webhook: str) -> None:
        """Deliver messages until the webhook is paused or removed."""
        running: set[asyncio.Task[None]] = set()
        pace, revision = _Pace(self._settings.retry_first_s), None
        trouble, nothing, changed = Backoff(0.5, 30.0), Backoff(0.05, 2.0), self._changed[webhook]
        while (target := self._mailboxes.target(webhook)) is not None:
            if target.revision != revision:
                pace, revision = _Pace(self._settings.retry_first_s), target.revision
            most = 1 if pace.is_down else self._settings.calls_at_once
            if len(running) >= most or (running and self._shared.locked()):
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                continue
            if pace.pause_s and not running and await _is_set(changed, pace.pause_s):
                continue
            try:
                is_ready = await self._mailboxes.wait(webhook, _WAIT_S)
                # A slot is taken before the message, because the lease begins with the message.
                if not is_ready or (running and self._shared.locked()):
                    continue
                slot = self._shared if running else None
                delivery = await self._taken(webhook, target, slot)
                trouble.reset()
            except MailboxError as error:
                if trouble.is_to_log(str(error)):
                    log.warning("webhook_waits", webhook=webhook, why=str(error))
                await asyncio.sleep(trouble.next_s())
                continue
            if delivery is None:
                # Another gateway was faster, or the log's clock is behind ours. Each try is a record.
                await asyncio.sleep(nothing.next_s())
            else:
                nothing.reset()
                task = asyncio.create_task(self._deliver(target, delivery, pace, slot))
                for tasks in (running, self._calls):
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

    async def _taken(self, webhook: str, target: Target, slot: asyncio.Semaphore | None) -> Delivery | None:
        """Take a slot, if one is needed, and lease a message.

        Returns None without a slot if no message waits any more, or the webhook has changed meanwhile.
        """
        delivery = None
        if slot is not None:
            await slot.acquire()
        try:
            if self._mailboxes.target(webhook) == target:
                delivery = await self._mailboxes.take(webhook)
        finally:
            if slot is not None and delivery is None:
                slot.release()
        return delivery

    async def _deliver(
        self, target: Target, delivery: Delivery, pace: _Pace, slot: asyncio.Semaphore | None
    ) -> None:
        """Call the address once, end or keep the lease accordingly, and give the slot back."""
        try:
            result = await self._client.call(target, delivery.message_id, delivery.event)
            self._health.note(target.webhook, result)
            pace.note(result)
            if result.status == GONE:
                # Before the message comes back, or another gateway would call the address with it.
                await self._repeated(lambda: self._mailboxes.pause(target, "the address answered 410 Gone"))
            await self._repeated(lambda: self._end(target, delivery, result))
        finally:
            delivery.ended()
            if slot is not None:
                slot.release()

    def _end(self, target: Target, delivery: Delivery, result: CallResult) -> Coroutine[Any, Any, None]:
        if result.is_ok:
            return self._mailboxes.acknowledge(delivery)
        where = {"webhook": target.webhook, "message_id": delivery.message_id, "attempt": delivery.attempt}
        log.warning("webhook_failed", why=result.why, **where)
        if result.status == GONE:
            return self._mailboxes.give_back(delivery, result.why, is_no_attempt=True)
        if delivery.attempt >= self._settings.max_attempts:
            return self._mailboxes.give_back(delivery, f"webhook: {result.why}", is_no_attempt=False)
        return self._mailboxes.postpone(delivery, self.pause_before_retry(delivery.attempt, result))

    def pause_before_retry(self, attempt: int, result: CallResult) -> float:
        """Return for how many seconds a message waits after a failed attempt; the first has the number 1.

        The pause doubles with each attempt, from `webhooks.retry_first_s` to `webhooks.retry_most_s`, and is
        shortened by chance to at least half. A longer `Retry-After` counts, up to `webhooks.retry_most_s`.
        """
        first_s, most_s = self._settings.retry_first_s, self._settings.retry_most_s
        pause_s = _jittered(min(most_s, first_s * 2.0 ** min(attempt - 1, 60)))
        return max(pause_s, min(result.retry_after_s or 0.0, most_s))

    async def _repeated(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Carry out a step that appends a record; repeat it for some seconds while Kafka is unreachable.

        If it fails in the end, the lease runs out, and the message is delivered again.
        """
        pauses = Backoff(0.5, 8.0)
        for _ in range(_TRIES):
            try:
                await step()
            except MailboxError as error:
                log.warning("webhook_record_failed", why=str(error))
                await asyncio.sleep(pauses.next_s())
            else:
                return
