"""The webhooks of one gateway: addresses and mailboxes for the deliverer, and metrics (WH-02, WH-05)."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.identities import Origin
from connectors.hub.serving.metrics import counters, gauge, gauges
from connectors.hub.webhooks.deliverer import DOWN_AFTER, Deliverer, Delivery, MailboxError
from connectors.hub.webhooks.webhook_client import Target
from connectors.operations.messages.deliveries import Taking, take_messages
from connectors.operations.messages.shown_messages import message_as_json
from schemas.fold.settled import AppliedChange
from schemas.keys.sealing import UnsealError
from schemas.streams.mailboxes.mailbox_bodies import MessageAck, MessageExtension, MessageNack
from schemas.streams.mailboxes.message import DEFAULT_REALM, MessageRow
from schemas.streams.webhook.webhooks import ACTIVE, PAUSED, WebhookPaused, WebhookRow, webhook_secrets
from schemas.wire.record import OutgoingRecord
from schemas.wire.wire_body import NOTE_LIMIT
from trunkline_agent.errors import TrunklineError
from trunkline_agent.wire.ids import WEBHOOK, stream_key
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.strict_json import canonical

log = structlog.stdlib.get_logger(__name__)

DOOR: Final = "webhook"
MESSAGE_EVENT: Final = "trunkline.message"
TEST_EVENT: Final = "trunkline.webhook.test"
_JSON: Final = "application/json"
# A lease must outlive the call and the record of its end.
_LEASE_MARGIN_S: Final = 15


def by_webhook(name: str) -> Origin:
    """Return the origin of the records that the calls of a webhook cause: its door, and itself as principal.

    `name` is the webhook's own name, which is that of its mailbox, too.
    """
    return {"door": DOOR, "principal": name}


def cloud_event(event_type: str, event_id: str, name: str, time_text: str, data: Any) -> bytes:
    """Return an event in the structured JSON form of CloudEvents 1.0.

    `name` is the webhook, `time_text` the event's time in ISO 8601, and `data` its content as JSON.
    """
    event = {
        "specversion": "1.0",
        "id": event_id,
        "source": f"/api/hub/mailboxes/{DEFAULT_REALM}/{name}",
        "type": event_type,
        "subject": name,
        "time": time_text,
        "datacontenttype": _JSON,
        "data": data,
    }
    return canonical(event)


def target_of(hub: Hub, row: WebhookRow) -> Target | None:
    """Return the address of a webhook with its secrets; None if it has none, or they cannot be opened."""
    entries = hub.live_view.entries(stream_key(WEBHOOK, row.webhook))
    try:
        secrets = webhook_secrets(row.webhook, entries, hub.keyring, hub.log_clock.now_us())
    except UnsealError as error:
        log.error("webhook_secret_sealed", webhook=row.webhook, error=str(error))
        return None
    return Target(row.webhook, row.revision, row.url, tuple(secrets)) if secrets else None


@contextmanager
def _as_mailbox_error() -> Iterator[None]:
    try:
        yield
    except (ApiError, TrunklineError, TimeoutError) as error:
        raise MailboxError(f"{type(error).__name__}: {error}") from error


class WebhookMailboxes:
    """The mailboxes of webhooks, in the form that the deliverer needs. See its protocol `Mailboxes`.

    A lease lasts `lease_margin_s` seconds longer than a call may.
    """

    def __init__(self, hub: Hub, lease_margin_s: int = _LEASE_MARGIN_S) -> None:
        self._hub = hub
        self._lease_s = math.ceil(hub.settings.webhooks.timeout_s) + lease_margin_s

    def target(self, webhook: str) -> Target | None:
        """Return the address of an active webhook; None for any other one."""
        row = self._hub.live_view.get(WebhookRow, webhook)
        return None if row is None or row.status != ACTIVE else target_of(self._hub, row)

    async def wait(self, webhook: str, timeout_s: float) -> bool:
        """Wait until the mailbox may have a message that nobody holds; False after `timeout_s` seconds."""
        mailbox = _mailbox(webhook)
        # A watcher, because a taker would keep the message from readers while the address is not called.
        with self._hub.mailbox_waits.waiting((mailbox,), is_taker=False) as wait:
            wait.clear()
            if self._hub.mailboxes.ready(mailbox, self._hub.log_clock.now_us()):
                return True
            return await wait.wait(timeout_s)

    async def take(self, webhook: str) -> Delivery | None:
        """Lease a message, and return it as an event. None if there is none.

        Until `Delivery.ended`, its bytes are taken out of the memory of all answers (LM-13).
        """
        taking = Taking(
            mailboxes=(_mailbox(webhook),),
            origin=by_webhook(webhook),
            made=uuid.uuid4(),
            is_repeatable=False,
            limit=1,
            bytes_most=self._hub.settings.limits.payload_bytes,
            lease_s=self._lease_s,
            attempts_most=self._hub.settings.webhooks.max_attempts,
            asks_most=1,
        )
        rooms, delivery = self._hub.answer_memory.begin_request(), None
        try:
            with _as_mailbox_error():
                taken = await take_messages(self._hub, taking)
            if taken.request_id is not None:
                row = taken.rows[0]
                event = self._event(row)
                rooms.resize(len(event))
                delivery = Delivery(webhook, row.message_id, taken.request_id, row.attempts, event, rooms.close)
        finally:
            if delivery is None:
                rooms.close()
        return delivery

    def _event(self, row: MessageRow) -> bytes:
        shown = message_as_json(self._hub, row)
        return cloud_event(MESSAGE_EVENT, row.message_id, row.recipient, iso_moment(row.posted_at), shown)

    async def acknowledge(self, delivery: Delivery) -> None:
        """Record that a message was delivered. A record that comes too late changes nothing."""
        await self._append(MessageAck(**_leased(delivery)).record(**by_webhook(delivery.webhook)))

    async def _append(self, record: OutgoingRecord) -> None:
        with _as_mailbox_error():
            await self._hub.appender.settle(record)

    async def postpone(self, delivery: Delivery, pause_s: float) -> None:
        """Extend the lease, so that the log has the time of the next attempt."""
        ce_id = str(uuid.uuid5(uuid.UUID(delivery.lease_id), "retry"))
        body = MessageExtension(**_leased(delivery), lease_ms=max(1, int(pause_s * 1000)))
        await self._append(body.record(ce_id=ce_id, **by_webhook(delivery.webhook)))

    async def give_back(self, delivery: Delivery, why: str, *, is_no_attempt: bool) -> None:
        """End the lease. After the last attempt the message is then dead."""
        body = MessageNack(**_leased(delivery), reason=why[:NOTE_LIMIT], is_no_attempt=is_no_attempt or None)
        await self._append(body.record(**by_webhook(delivery.webhook)))

    async def pause(self, target: Target, why: str) -> None:
        """Pause a webhook, unless it has changed since."""
        body = WebhookPaused(
            name=target.webhook, request_id=f"gone-{target.revision}", revision=target.revision, reason=why
        )
        await self._append(body.record(**by_webhook(target.webhook)))


def _mailbox(webhook: str) -> Mailbox:
    return DEFAULT_REALM, webhook


def _leased(delivery: Delivery) -> dict[str, Any]:
    return {"to": delivery.webhook, "message_id": delivery.message_id, "request_id": delivery.lease_id}


class WebhookCalls:
    """Runs the deliverer of one gateway, and follows the rows of webhooks.

    Create it before `Hub.open`, because it registers a callback of the live view. Await `run` in the gateway's
    event loop.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._mailboxes = WebhookMailboxes(hub)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliverer: Deliverer | None = None
        hub.live_view.on_change(self._on_change, [WebhookRow])
        hub.metrics.add(WebhookMetrics(hub))

    async def run(self) -> None:
        """Deliver messages until the hub stops."""
        hub, self._loop = self._hub, asyncio.get_running_loop()
        self._deliverer = Deliverer(
            hub.settings.webhooks, hub.webhook_client, hub.webhook_health, self._mailboxes
        )
        for row in hub.live_view.live(WebhookRow):
            self._deliverer.look(row.webhook)
        await hub.stopping.wait()
        await self._deliverer.stop()
        await hub.webhook_client.close()

    def _on_change(self, change: AppliedChange) -> None:
        if isinstance(change.row, WebhookRow) and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._look, change.row.webhook)

    def _look(self, webhook: str) -> None:
        row = self._hub.live_view.get(WebhookRow, webhook)
        if row is None or not row.is_live:
            self._hub.webhook_health.forget(webhook)
        if self._deliverer is not None:
            self._deliverer.look(webhook)


class WebhookMetrics(Collector):
    """A metrics collector: the health of the webhooks at this gateway. Thread-safe."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterable[Metric]:
        """Yield the numbers of webhooks, their calls, and the failures in a row of each failing one."""
        rows = list(self._hub.live_view.live(WebhookRow))
        health = {row.webhook: self._hub.webhook_health.of(row.webhook) for row in rows}
        paused = sum(row.status == PAUSED for row in rows)
        states = ((["active"], len(rows) - paused), (["paused"], paused))
        yield gauges("webhooks", "Webhooks, by status.", ["status"], states)
        down = sum(one.failures_in_a_row >= DOWN_AFTER for one in health.values())
        yield gauge("webhooks_down", f"Webhooks whose last {DOWN_AFTER} calls or more have failed.", down)
        yield counters(
            "webhook_calls",
            "Calls of the present webhooks, by how they ended.",
            ["result"],
            (
                (["ok"], sum(one.succeeded for one in health.values())),
                (["failed"], sum(one.failed for one in health.values())),
            ),
        )
        yield gauges(
            "webhook_failures_in_a_row",
            "Failed calls of a webhook since its last success, of the failing ones.",
            ["webhook"],
            (([name], one.failures_in_a_row) for name, one in health.items() if one.failures_in_a_row),
        )
