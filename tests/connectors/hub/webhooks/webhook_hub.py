"""A hub in memory with webhooks: the real fold, lease timers and deliverer, and no Kafka."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.webhooks.deliverer import Deliverer
from connectors.hub.webhooks.webhook_client import WebhookClient, WebhookHealth
from connectors.operations.webhooks.webhook_calls import WebhookMailboxes
from schemas.effects.mailbox_effects import MESSAGE_TIMER
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import Keyring, webhook_secret_purpose
from schemas.settings.settings import Settings, WebhookSettings
from schemas.streams.mailboxes.message import MessageRow, verified_message
from schemas.streams.webhook.webhooks import WebhookRow, WebhookSet
from schemas.wire.record import OutgoingRecord
from tests.connectors.doors.mcp_tools.folded_hub import KEYRING, FoldedHub
from trunkline_agent.errors import BackboneUnreachable

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
FAST = {"retry_first_s": 0.05, "retry_most_s": 0.2, "timeout_s": 1.0}
_numbers = itertools.count(1)


class WebhookHub(FoldedHub):
    """A hub whose webhooks may call this machine."""

    def __init__(self, **webhooks: Any) -> None:
        super().__init__()
        allowed = {"allow_networks": "127.0.0.0/8", "allow_http": True}
        section = WebhookSettings(**{**allowed, **FAST, **webhooks})
        self.settings = Settings(webhooks=section)
        self.keyring: Keyring = KEYRING
        self.webhook_client = WebhookClient(section)
        self.webhook_health = WebhookHealth()
        self.deliverers: list[Deliverer] = []
        self.is_away = self.is_dying = False

    def _changed(self, change: AppliedChange) -> None:
        super()._changed(change)
        self.mailbox_waits.changed(change)
        if isinstance(change.row, WebhookRow):
            for one in self.deliverers:
                one.look(change.row.webhook)

    def add(self, outgoing: OutgoingRecord) -> SettledRecord:
        """Settle a record now, at the machine's time."""
        self.now_us = max(self.now_us + 1, time.time_ns() // 1000)
        return super().add(outgoing)

    async def settle(self, outgoing: OutgoingRecord) -> SettledRecord:
        """As of the appender, which may find Kafka away."""
        if self.is_dying and outgoing.type == "message.acked":
            await asyncio.sleep(3600)
        if self.is_away:
            raise BackboneUnreachable("Kafka is away")
        return self.add(outgoing)

    def set(self, name: str, url: str, secret: str = SECRET, **more: Any) -> None:
        """Set a webhook."""
        options = {"topic": None, "overlap_ms": 0, "request_id": f"set-{next(_numbers)}", **more}
        record = WebhookSet(
            sealed_secret=KEYRING.seal(secret.encode(), webhook_secret_purpose(name)),
            name=name,
            url=url,
            **options,
        ).record(door="http", principal="operator")
        assert self.add(record).verdict == "accepted"

    def post(self, recipient: str, count: int = 1, body: str = '{"text":"tea"}') -> list[str]:
        """Post messages to a mailbox, and return their ids."""
        ids = [f"m{next(_numbers)}" for _ in range(count)]
        for one in ids:
            message = verified_message(one, "bo", recipient, "ask", body, "application/json")
            assert self.add(message.record(door="http", principal="bo")).verdict == "accepted"
        return ids

    def message(self, recipient: str, message_id: str) -> MessageRow:
        """The row of a message."""
        row = self.get(MessageRow, f"default/{recipient}/{message_id}")
        assert row is not None
        return row

    @asynccontextmanager
    async def delivering(self, gateways: int = 1) -> AsyncIterator[None]:
        """Run the deliverers of so many gateways, and the timers of leases."""
        hub: Any = self
        found = [
            Deliverer(
                self.settings.webhooks,
                self.webhook_client,
                self.webhook_health,
                WebhookMailboxes(hub, lease_margin_s=0),
            )
            for _ in range(gateways)
        ]
        self.deliverers += found
        timers = asyncio.create_task(self._expire_leases())
        for one in found:
            for row in self.live(WebhookRow):
                one.look(row.webhook)
        try:
            yield
        finally:
            timers.cancel()
            for one in found:
                self.deliverers.remove(one)
                await one.stop(wait_s=0.5)
            await self.webhook_client.close()

    async def _expire_leases(self) -> None:
        while True:
            now_us = time.time_ns() // 1000
            for row in self.live(MessageRow):
                moment = MESSAGE_TIMER.moment_of(row, now_us)
                if moment is not None and moment <= now_us:
                    self.add(MESSAGE_TIMER.record_of(row, now_us, self.get))
            await asyncio.sleep(0.02)


async def until(holds: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)
