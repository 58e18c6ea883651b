"""The operations of webhooks and their bodies (WH-01, WH-04, WH-05)."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Final

from fastapi import Path
from pydantic import AwareDatetime, Field, create_model

from connectors.hub.engine.family import ROW_BYTES, Family, LongAnswer, Steps
from connectors.hub.engine.operation import Answer, Asked
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailboxes import own_mailboxes
from connectors.hub.serving.answers import (
    ApiError,
    existing,
    malformed,
    not_found,
    row_as_json,
    too_many,
)
from connectors.hub.serving.models import (
    NAMED,
    OVERLAP_LIMIT_S,
    WHOLE,
    AnswerBody,
    ListLimit,
    NamedThing,
    NoFields,
    QueryFilter,
    RequestBody,
    row_answer,
)
from connectors.hub.serving.policy import Action, needs_owner
from connectors.hub.webhooks.addresses import AddressRefusedError
from connectors.hub.webhooks.webhook_client import new_webhook_secret
from connectors.operations.rules.owners import check_name_is_free, owner_of_webhook
from connectors.operations.webhooks.webhook_calls import TEST_EVENT, cloud_event, target_of
from schemas.effects.recipients import has_mailbox, is_listener
from schemas.effects.topic_effects import subscription_of
from schemas.keys.sealing import Keyring, webhook_secret_purpose
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.principal.principals import HUB
from schemas.streams.webhook.webhooks import (
    WebhookPaused,
    WebhookRemoved,
    WebhookResumed,
    WebhookRow,
    WebhookSet,
    WebhookUrl,
    key_of_request,
)
from schemas.wire.wire_body import Note
from trunkline_agent.wire.ids import WEBHOOK, stream_key
from trunkline_agent.wire.moments import iso_moment
from trunkline_agent.wire.verdicts import SEQ_CONFLICT, UNKNOWN_RECIPIENT


class WebhookRequest(RequestBody):
    """The address of a webhook. With `topic`, the webhook has a mailbox of its own."""

    url: WebhookUrl
    """Address to call: https, a host, and perhaps port, path and query."""
    topic: NamedThing | None = None
    """Topic whose messages are called. Null: those of the mailbox with the webhook's name."""
    overlap_s: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_S), WHOLE] = 0
    """Time for which calls are signed with the previous secret, too, in seconds."""


class WebhookPauseRequest(RequestBody):
    """Why a webhook is paused."""

    reason: Note = ""
    """Reason, for the owner and the operator."""


class WebhookFilter(QueryFilter):
    """The webhooks to list."""

    limit: ListLimit = 100
    """Largest number of webhooks in the answer."""


# How the calls of this gateway went: the columns of the health, and the messages that wait.
_HEALTH: Final[dict[str, Any]] = {
    "pending": (int, Field(description="Number of messages that wait, or are leased.")),
    "dead": (int, Field(description="Number of dead messages in the mailbox.")),
    "succeeded": (int, Field(description="Number of successful calls of this gateway.")),
    "failed": (int, Field(description="Number of failed calls of this gateway.")),
    "failures_in_a_row": (int, Field(description="Number of failed calls since the last success.")),
    "last_success_at": (AwareDatetime | None, Field(description="Time of the last success. Null: none.")),
    "last_failure_at": (AwareDatetime | None, Field(description="Time of the last failure. Null: none.")),
    "last_failure": (str | None, Field(description="Why the last failed call failed. Null: none has.")),
}
WebhookAnswer: Final = create_model(
    "WebhookAnswer",
    __base__=row_answer("WebhookRowAnswer", WebhookRow),
    __doc__="A webhook, and how its calls went at the gateway that answers.",
    **_HEALTH,
)
WebhookGrantAnswer: Final = create_model(
    "WebhookGrantAnswer",
    __base__=WebhookAnswer,
    __doc__="A webhook with its new secret, which no other answer shows.",
    secret=(str, Field(description="Secret that signs the calls, `whsec_` and base64.")),
)


class WebhooksAnswer(AnswerBody):
    """Webhooks that are not removed, and how many there are."""

    webhooks: list[WebhookAnswer]  # type: ignore[valid-type]
    """Webhooks, sorted by name."""
    total: int
    """Number of all webhooks that the caller may see."""


class WebhookTestAnswer(AnswerBody):
    """The result of a test call."""

    delivered: bool
    """True if the address answered with a status of 200 to 299."""
    status: int | None
    """HTTP status of the address. Null: it gave none."""
    why: str | None
    """Why the call failed. Null: it succeeded."""
    milliseconds: int
    """Duration of the call."""


_UNKNOWN: Final = "no webhook with this name"
_EXAMPLE: Final = {"url": "https://agents.example.org/inbox"}
WebhookPath = Annotated[str, Path(**NAMED, description="Name of the webhook.")]


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


WEBHOOKS: Final = Family("/api/hub/webhooks", _shown, owner=owner_of_webhook)


@WEBHOOKS.post("/{name}", Action.WEBHOOK_SET, WebhookGrantAnswer, EXAMPLE=_EXAMPLE)
def set_webhook(hub: Hub, asked: Asked, name: WebhookPath, body: WebhookRequest) -> Steps:
    """Make a webhook, or give it a new address and a new secret. The answer alone shows the secret.

    The address is then called with each message of the mailbox with the webhook's name, also with those
    that wait there. With `topic`, which only the operator may use, the name must be free: the webhook gets
    a mailbox of its own, which is subscribed to the topic when the answer comes.

    The answer is 404 for an unknown mailbox, and 403 for an address that may not be called. It is 409 for
    another topic than before, or when a later request has replaced the secret of this one.
    """
    _check_setting(hub, asked, name, body)
    stream = stream_key(WEBHOOK, name)
    # A repeated request must have the same bytes, so it uses the master key of the first one.
    key_id = key_of_request(hub.live_view.entries(stream), asked.request_id)
    keyring = hub.keyring if key_id is None else hub.keyring.under(key_id)
    secret = _secret_of(keyring, asked.made, name)
    record = WebhookSet(
        sealed_secret=keyring.seal(secret.encode(), webhook_secret_purpose(name)),
        name=name,
        url=body.url,
        topic=body.topic,
        overlap_ms=body.overlap_s * 1000,
        request_id=asked.request_id,
    ).record(**asked.origin)
    settled = yield record
    if key_of_request(hub.live_view.entries(stream), asked.request_id) is None:
        raise ApiError(409, SEQ_CONFLICT, "a later request has replaced the secret of this request")
    if body.topic is not None:
        # A message that is published after this answer reaches the webhook.
        yield subscription_of(name, body.topic, record.ce_id)
    return Answer({**_shown(hub, name), "secret": secret}, settled.verdict)


def _check_setting(hub: Hub, asked: Asked, name: str, body: WebhookRequest) -> None:
    """Raise ApiError if a webhook may not be set, and append a record of the refusal to the log."""
    route = f"POST {WEBHOOKS.path}/{{name}}"
    if name == HUB:
        raise malformed("name: this name is reserved")
    try:
        hub.webhook_client.rule.check_url(body.url)
    except AddressRefusedError as error:
        raise hub.refusals.forbidden(str(error), asked.principal, route) from None
    row = hub.live_view.get(WebhookRow, name)
    is_live = row is not None and row.is_live
    if body.topic is not None and not (row is not None and row.has_own_mailbox):
        check_name_is_free(hub, name, "name", asked.principal, route)
        if has_mailbox(hub.live_view.get, name):
            raise hub.refusals.forbidden("a mailbox has this name", asked.principal, route)
    if body.topic is None and not is_live and not has_mailbox(hub.live_view.get, name):
        why = "no mailbox of this name is known"
        hub.refusals.record(UNKNOWN_RECIPIENT, why, asked.principal, route)
        raise ApiError(404, UNKNOWN_RECIPIENT, why)
    if is_listener(hub.live_view.get, name):
        raise hub.refusals.forbidden("the XML pump reads the mailbox of this listener", asked.principal, route)
    most = hub.settings.webhooks.webhooks_most
    if not is_live and len(hub.live_view.live(WebhookRow)) >= most:
        raise hub.refusals.forbidden(f"there may be {most} webhooks", asked.principal, route)


def _secret_of(keyring: Keyring, made: uuid.UUID, name: str) -> str:
    """Return the secret that follows from a request, so that it need not be stored for a repeated one."""
    return new_webhook_secret(keyring.derive(f"new-webhook-secret/{name}/{made}"))


@WEBHOOKS.post("/{name}/pause", Action.WEBHOOK_SET, WebhookAnswer, COMMAND="webhooks pause")
def pause_webhook(
    hub: Hub, asked: Asked, name: WebhookPath, body: WebhookPauseRequest | None = None
) -> WebhookPaused:
    """Call the address no longer. The messages stay in the mailbox.

    A webhook is also paused when its address answers with status 410. The answer is 404 for an unknown
    webhook, and 409 for one that is not active.
    """
    reason = "" if body is None else body.reason
    return WebhookPaused(name=name, request_id=asked.request_id, reason=reason)


@WEBHOOKS.post("/{name}/resume", Action.WEBHOOK_SET, WebhookAnswer, COMMAND="webhooks resume")
def resume_webhook(hub: Hub, asked: Asked, name: WebhookPath, body: NoFields | None = None) -> WebhookResumed:
    """Call the address of a paused webhook again, first with the messages that wait.

    The answer is 404 for an unknown webhook, and 409 for one that is not paused.
    """
    return WebhookResumed(name=name, request_id=asked.request_id)


@WEBHOOKS.post("/{name}/remove", Action.WEBHOOK_SET, WebhookAnswer, COMMAND="webhooks remove")
def remove_webhook(hub: Hub, asked: Asked, name: WebhookPath, body: NoFields | None = None) -> WebhookRemoved:
    """Remove a webhook, and forget its secret. The messages stay in the mailbox.

    A mailbox of its own ends, and with it the subscription. The answer is 404 for an unknown webhook, and
    409 for one that is removed already.
    """
    return WebhookRemoved(name=name, request_id=asked.request_id)


@WEBHOOKS.post("/{name}/test", Action.WEBHOOK_SET, WebhookTestAnswer)
async def test_webhook(
    hub: Hub, asked: Asked, name: WebhookPath, body: NoFields | None = None
) -> dict[str, Any]:
    """Call the address with a test event now, also if the webhook is paused, and return how that went.

    The event has the type `trunkline.webhook.test`. Nothing is recorded or repeated. The answer is 404 for
    an unknown or removed webhook, and 429 while eight others are tested.
    """
    row = hub.live_view.get(WebhookRow, name)
    target = None if row is None or not row.is_live else target_of(hub, row)
    if target is None:
        raise not_found(_UNKNOWN)
    event_id, now_us = asked.request_id, time.time_ns() // 1000
    event = cloud_event(TEST_EVENT, event_id, name, iso_moment(now_us), {"webhook": name})
    if hub.webhook_tests.locked():
        raise too_many("too many tests of webhooks at once; try again later")
    async with hub.webhook_tests:
        result = await hub.webhook_client.call(target, event_id, event)
    return {
        "delivered": result.is_ok,
        "status": result.status,
        "why": result.why or None,
        "milliseconds": round(result.seconds * 1000),
    }


@WEBHOOKS.get("", Action.WEBHOOK_LIST, WebhooksAnswer, COMMAND="webhooks list")
def list_webhooks(hub: Hub, asked: Asked, wanted: WebhookFilter) -> LongAnswer:
    """List the webhooks of the caller's mailboxes, sorted by name. The operator sees those of all.

    Removed ones are left out. How the calls went is that of the gateway that answers.
    """
    is_all = not needs_owner(asked.caller, Action.WEBHOOK_READ)
    own = own_mailboxes(asked.caller, hub.settings.gateway.mailbox_per_token)
    live = hub.live_view.live(WebhookRow)
    names = sorted(row.webhook for row in live if is_all or (DEFAULT_REALM, row.webhook) in own)
    found = names[: wanted.limit]

    def document() -> dict[str, Any]:
        return {"webhooks": [_shown(hub, name) for name in found], "total": len(names)}

    return LongAnswer(len(found) * ROW_BYTES, document)


@WEBHOOKS.get("/{name}", Action.WEBHOOK_READ, WebhookAnswer, COMMAND="webhooks show")
def show_webhook(hub: Hub, asked: Asked, name: WebhookPath) -> dict[str, Any]:
    """Show a webhook, also a removed one, without its secret, and how its calls went at this gateway."""
    return _shown(hub, name)
