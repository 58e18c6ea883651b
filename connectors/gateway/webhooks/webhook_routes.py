"""The HTTP routes that set, pause, remove, test, list and show webhooks (WH-01, WH-04, WH-05)."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request, Response

from connectors.gateway.rules.free_names import check_name_is_free
from connectors.gateway.rules.owners import owner_of_webhook
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import own_mailboxes
from connectors.gateway.web.admission import Routes
from connectors.gateway.web.answers import (
    ApiError,
    existing,
    json_answer,
    malformed,
    not_found,
    row_as_json,
    too_many,
)
from connectors.gateway.web.idempotency import Write, WriteRequest, caller_of
from connectors.gateway.web.models import NAME_PATTERN, NoFields
from connectors.gateway.web.policy import Action, needs_owner
from connectors.gateway.webhooks.webhook_calls import TEST_EVENT, cloud_event, target_of
from connectors.gateway.webhooks.webhook_models import (
    WebhookAnswer,
    WebhookFilter,
    WebhookGrantAnswer,
    WebhookPauseRequest,
    WebhookRequest,
    WebhooksAnswer,
    WebhookTestAnswer,
)
from connectors.live.settled_feed import SettledRecord
from connectors.reactor.known_recipients import has_mailbox, is_listener
from connectors.reactor.webhook_records import subscription_of
from connectors.webhooks.addresses import AddressRefusedError
from connectors.webhooks.signatures import new_webhook_secret
from schemas.keys.sealing import Keyring
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.principal.principals import HUB
from schemas.streams.webhook.webhook_fold import key_of_request
from schemas.streams.webhook.webhook_registry import (
    WebhookPaused,
    WebhookRemoved,
    WebhookResumed,
    WebhookRow,
    setting_record,
    webhook_record,
)
from schemas.wire.record import JSON_CONTENT
from trunkline_agent.wire.ids import NAME_LIMIT, WEBHOOK, stream_key
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.verdicts import SEQ_CONFLICT, UNKNOWN_RECIPIENT

WEBHOOKS: Final = "/api/hub/webhooks"
_WEBHOOK_PATH: Final = f"{WEBHOOKS}/{{name}}"
# A test lasts as long as the address likes, up to the time limit of a call.
_TESTS_AT_ONCE: Final = 8
_UNKNOWN: Final = "no webhook with this name"
_EXAMPLE: Final = {"url": "https://agents.example.org/inbox"}
WebhookPath = Annotated[
    str, Path(pattern=NAME_PATTERN, max_length=NAME_LIMIT, description="Name of the webhook.")
]


def add_webhook_routes(routes: Routes, hub: Hub) -> None:
    """Add to `routes` the HTTP routes that set, pause, remove, test, list and show webhooks.

    Called once, when the gateway starts. The paths begin with `/api/hub/webhooks`. The routes read from `hub`
    and append records through it.
    """
    _add_setting(routes, hub)
    _add_changes(routes, hub)
    _add_test(routes, hub)
    _add_reads(routes, hub)


def _add_setting(routes: Routes, hub: Hub) -> None:
    """Add the route that sets a webhook."""

    @routes.post(
        _WEBHOOK_PATH,
        Action.WEBHOOK_SET,
        WebhookGrantAnswer,
        owner_of_webhook(hub),
        openapi_extra={"requestBody": {"content": {JSON_CONTENT: {"example": _EXAMPLE}}}},
    )
    async def set_webhook(write: WriteRequest, name: WebhookPath, body: WebhookRequest) -> Response:
        """Make a webhook, or give it a new address and a new secret. The answer alone shows the secret.

        The address is then called with each message of the mailbox with the webhook's name, also with those
        that wait there. With `topic`, which only the operator may use, the name must be free: the webhook gets
        a mailbox of its own, which is subscribed to the topic when the answer comes.

        The answer is 404 for an unknown mailbox, and 403 for an address that may not be called. It is 409 for
        another topic than before, or when a later request has replaced the secret of this one.
        """
        _check_setting(hub, write, name, body)
        entries = hub.live_view.entries(stream_key(WEBHOOK, name))
        # A repeated request must have the same bytes, so it uses the master key of the first one.
        key_id = key_of_request(entries, write.request_id)
        keyring = hub.keyring if key_id is None else hub.keyring.under(key_id)
        secret = _secret_of(keyring, write.made, name)
        record = setting_record(
            name,
            body.url,
            secret,
            keyring,
            topic=body.topic,
            overlap_ms=body.overlap_s * 1000,
            request_id=write.request_id,
            **write.origin,
        )
        settled = await hub.appender.settle_accepted(record)
        if key_of_request(hub.live_view.entries(stream_key(WEBHOOK, name)), write.request_id) is None:
            raise ApiError(409, SEQ_CONFLICT, "a later request has replaced the secret of this request")
        if body.topic is not None:
            # A message that is published after this answer reaches the webhook.
            await hub.appender.settle_accepted(subscription_of(name, body.topic, record.ce_id))
        return json_answer({**_shown(hub, name), "secret": secret}, verdict=settled.verdict)


def _check_setting(hub: Hub, write: Write, name: str, body: WebhookRequest) -> None:
    """Raise ApiError if a webhook may not be set, and append a record of the refusal to the log."""
    route = f"POST {_WEBHOOK_PATH}"
    if name == HUB:
        raise malformed("name: this name is reserved")
    try:
        hub.webhook_client.rule.check_url(body.url)
    except AddressRefusedError as error:
        raise hub.refusals.forbidden(str(error), write.principal, route) from None
    row = hub.live_view.get(WebhookRow, name)
    is_live = row is not None and row.is_live
    if body.topic is not None and not (row is not None and row.has_own_mailbox):
        check_name_is_free(hub, name, "name", write.principal, route)
        if has_mailbox(hub.live_view.get, name):
            raise hub.refusals.forbidden("a mailbox has this name", write.principal, route)
    if body.topic is None and not is_live and not has_mailbox(hub.live_view.get, name):
        why = "no mailbox of this name is known"
        hub.refusals.record(UNKNOWN_RECIPIENT, why, write.principal, route)
        raise ApiError(404, UNKNOWN_RECIPIENT, why)
    if is_listener(hub.live_view.get, name):
        raise hub.refusals.forbidden("the XML pump reads the mailbox of this listener", write.principal, route)
    most = hub.settings.webhooks.webhooks_most
    if not is_live and len(hub.live_view.live(WebhookRow)) >= most:
        raise hub.refusals.forbidden(f"there may be {most} webhooks", write.principal, route)


def _secret_of(keyring: Keyring, made: uuid.UUID, name: str) -> str:
    """Return the secret that follows from a request, so that it need not be stored for a repeated one."""
    return new_webhook_secret(keyring.derive(f"new-webhook-secret/{name}/{made}"))


def _add_changes(routes: Routes, hub: Hub) -> None:
    """Add the routes that pause, resume and remove a webhook."""

    async def changed(body: WebhookPaused | WebhookResumed | WebhookRemoved, write: Write) -> SettledRecord:
        return await hub.appender.settle_accepted(webhook_record(body, **write.origin))

    @routes.post(f"{_WEBHOOK_PATH}/pause", Action.WEBHOOK_SET, WebhookAnswer, owner_of_webhook(hub))
    async def pause_webhook(
        write: WriteRequest, name: WebhookPath, body: WebhookPauseRequest | None = None
    ) -> Response:
        """Call the address no longer. The messages stay in the mailbox.

        A webhook is also paused when its address answers with status 410. The answer is 404 for an unknown
        webhook, and 409 for one that is not active.
        """
        reason = "" if body is None else body.reason
        wanted = WebhookPaused(name=name, request_id=write.request_id, reason=reason)
        settled = await changed(wanted, write)
        return json_answer(_shown(hub, name), verdict=settled.verdict)

    @routes.post(f"{_WEBHOOK_PATH}/resume", Action.WEBHOOK_SET, WebhookAnswer, owner_of_webhook(hub))
    async def resume_webhook(write: WriteRequest, name: WebhookPath, body: NoFields | None = None) -> Response:
        """Call the address of a paused webhook again, first with the messages that wait.

        The answer is 404 for an unknown webhook, and 409 for one that is not paused.
        """
        settled = await changed(WebhookResumed(name=name, request_id=write.request_id), write)
        return json_answer(_shown(hub, name), verdict=settled.verdict)

    @routes.post(f"{_WEBHOOK_PATH}/remove", Action.WEBHOOK_SET, WebhookAnswer, owner_of_webhook(hub))
    async def remove_webhook(write: WriteRequest, name: WebhookPath, body: NoFields | None = None) -> Response:
        """Remove a webhook, and forget its secret. The messages stay in the mailbox.

        A mailbox of its own ends, and with it the subscription. The answer is 404 for an unknown webhook, and
        409 for one that is removed already.
        """
        settled = await changed(WebhookRemoved(name=name, request_id=write.request_id), write)
        return json_answer(_shown(hub, name), verdict=settled.verdict)


def _add_test(routes: Routes, hub: Hub) -> None:
    """Add the route that calls a webhook with a test event."""
    places = asyncio.Semaphore(_TESTS_AT_ONCE)

    @routes.post(f"{_WEBHOOK_PATH}/test", Action.WEBHOOK_SET, WebhookTestAnswer, owner_of_webhook(hub))
    async def test_webhook(write: WriteRequest, name: WebhookPath, body: NoFields | None = None) -> Response:
        """Call the address with a test event now, also if the webhook is paused, and return how that went.

        The event has the type `trunkline.webhook.test`. Nothing is recorded or repeated. The answer is 404 for
        an unknown or removed webhook, and 429 while eight others are tested.
        """
        row = hub.live_view.get(WebhookRow, name)
        target = None if row is None or not row.is_live else target_of(hub, row)
        if target is None:
            raise not_found(_UNKNOWN)
        event_id, now_us = write.request_id, time.time_ns() // 1000
        event = cloud_event(TEST_EVENT, event_id, name, iso_moment(now_us), {"webhook": name})
        if places.locked():
            raise too_many("too many tests of webhooks at once; try again later")
        async with places:
            result = await hub.webhook_client.call(target, event_id, event)
        answer = {
            "delivered": result.is_ok,
            "status": result.status,
            "why": result.why or None,
            "milliseconds": round(result.seconds * 1000),
        }
        return json_answer(answer)


def _add_reads(routes: Routes, hub: Hub) -> None:
    """Add the routes that list and show webhooks."""

    @routes.get(WEBHOOKS, Action.WEBHOOK_LIST, WebhooksAnswer)
    async def list_webhooks(request: Request, wanted: Annotated[WebhookFilter, Query()]) -> Response:
        """List the webhooks of the caller's mailboxes, sorted by name. The operator sees those of all.

        Removed ones are left out. How the calls went is that of the gateway that answers.
        """
        caller = caller_of(request)
        is_all = not needs_owner(caller, Action.WEBHOOK_READ)
        own = own_mailboxes(caller, hub.settings.gateway.mailbox_per_token)
        live = hub.live_view.live(WebhookRow)
        names = sorted(row.webhook for row in live if is_all or (DEFAULT_REALM, row.webhook) in own)
        shown = [_shown(hub, name) for name in names[: wanted.limit]]
        return json_answer({"webhooks": shown, "total": len(names)})

    @routes.get(_WEBHOOK_PATH, Action.WEBHOOK_READ, WebhookAnswer, owner_of_webhook(hub))
    async def show_webhook(name: WebhookPath) -> Response:
        """Show a webhook, also a removed one, without its secret, and how its calls went at this gateway."""
        return json_answer(_shown(hub, name))


def _shown(hub: Hub, name: str) -> dict[str, Any]:
    row = existing(hub.live_view.get(WebhookRow, name), _UNKNOWN)
    health, mailbox = hub.webhook_health.of(name), (DEFAULT_REALM, name)
    last_success, last_failure = health.last_success_at, health.last_failure_at
    return {
        **row_as_json(row),
        "pending": hub.mailboxes.size(mailbox),
        "dead": hub.mailboxes.dead_count(mailbox),
        "succeeded": health.succeeded,
        "failed": health.failed,
        "failures_in_a_row": health.failures_in_a_row,
        "last_success_at": None if last_success is None else iso_moment(last_success),
        "last_failure_at": None if last_failure is None else iso_moment(last_failure),
        "last_failure": health.last_failure or None,
    }
