"""The operator's operations for principals, their tokens and mailboxes, and the bodies of these operations."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import Path
from pydantic import AwareDatetime, Field, create_model

from connectors.hub.engine.family import Family, LongAnswer, Steps, page_by_name
from connectors.hub.engine.operation import Answer, Asked
from connectors.hub.live.live_store import LiveRows
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.serving.answers import ApiError, encoded_within, row_as_json
from connectors.hub.serving.identities import TOKEN_WINDOW_S, derived_token
from connectors.hub.serving.models import (
    NAMED,
    AnswerBody,
    ListLimit,
    NamedThing,
    NoFields,
    PageAnswer,
    PageFilter,
    QueryFilter,
    RequestBody,
    row_answer,
)
from connectors.hub.serving.policy import Action
from connectors.operations.messages.shown_messages import answer_bytes_of
from connectors.operations.rules.agent_models import ClearedAnswer
from connectors.operations.rules.owners import check_name_is_free, owner_of_mailbox
from schemas.state_store.ended_lists import Span
from schemas.streams.mailboxes.mailbox_bodies import MailboxClearing
from schemas.streams.mailboxes.message import CLEARED, MessageBodyRow, MessageRow
from schemas.streams.principal.principals import (
    ACTIVE,
    PrincipalAddition,
    PrincipalRevocation,
    PrincipalRow,
    new_token,
    token_hash,
)
from trunkline_agent.wire.verdicts import ACCEPTED, DUPLICATE, SEQ_CONFLICT


class PrincipalRequest(RequestBody):
    """A principal to add. It gets a token."""

    principal: NamedThing
    """Name of the principal."""
    role: Literal["operator", "delegator", "worker", "viewer"]
    """Role of the principal, which gives it its rights."""


class PrincipalAnswer(AnswerBody):
    """A principal, without its token."""

    principal: str
    """Name of the principal."""
    role: str
    """Role of the principal."""
    status: str
    """`active` or `revoked`."""
    added_by: str
    """Principal that added it."""
    added_at: AwareDatetime
    """Time at which it was added."""
    revoked_at: AwareDatetime | None
    """Time at which its token was revoked. Null: it is valid."""


class NewPrincipalAnswer(AnswerBody):
    """A new principal. A retry with the same idempotency key gets the same token; nothing else shows it."""

    principal: str
    """Name of the principal."""
    role: str
    """Role of the principal."""
    token: str
    """Token of the principal."""


class PrincipalsAnswer(PageAnswer):
    """Principals."""

    principals: list[PrincipalAnswer]
    """Principals, sorted by name."""


class MailboxFilter(QueryFilter):
    """The messages to show: the newest, or with `pending` the oldest pending ones."""

    limit: ListLimit = 100
    """Largest number of messages in the answer."""
    pending: bool = False
    """True: show the oldest pending messages, instead of the newest of any state."""
    status: Literal["delayed", "unread", "leased", "claimed", "read", "expired", "cleared", "dead"] | None = (
        None
    )
    """State of the messages. Without it: any."""
    after: NamedThing | None = None
    """Id of the last message of the previous page of pending messages. Without it: the first page."""


MailboxMessageAnswer: Final = create_model(
    "MailboxMessageAnswer",
    __base__=row_answer("MailboxMessageAnswer", MessageRow),
    __doc__="A message and its state.",
    lease_until=(
        int | None,
        Field(description="End of the lease, in microseconds since 1970 UTC. Null: it is not leased."),
    ),
    body=(str | None, Field(description="Body of the message. Null: it is no longer stored.")),
    content_type=(str | None, Field(description="Media type of the body. Null: as `body`.")),
    blob_bytes=(int | None, Field(description="Length of the blob in bytes. Null: there is none.")),
    blob_type=(str | None, Field(description="Media type of the blob. Null: there is none.")),
)


class MessagesAnswer(AnswerBody):
    """The messages of a mailbox, and how many there are. Reading does not take them."""

    messages: list[MailboxMessageAnswer]  # type: ignore[valid-type]
    """Messages, oldest first."""
    total: int
    """Number of all messages of the mailbox, or with `pending` of all pending ones."""
    left: int
    """Number of messages that were asked for and are not in the answer, because it would be too long."""


MAILBOX: Final = "/api/hub/mailboxes/{realm}/{name}"
PRINCIPALS: Final = Family("/api/hub/principals")
MAILBOXES: Final = Family(MAILBOX, owner=owner_of_mailbox)
NamePath = Annotated[str, Path(**NAMED, description="Name of the principal or mailbox.")]
RealmPath = Annotated[str, Path(**NAMED, description="Namespace of the mailbox.")]


@PRINCIPALS.post("", Action.PRINCIPAL_ADD, NewPrincipalAnswer, STATUS=201)
def add_principal(hub: Hub, asked: Asked, body: PrincipalRequest) -> Steps:
    """Add a principal with a role. The answer contains its new token, which is not shown again.

    Only a retry with the same idempotency key within a day gets the same token. The answer is 409 when a
    principal of this name exists, and 403 for the name of a listener.
    """
    name = body.principal
    check_name_is_free(hub, name, "principal", asked.principal, f"POST {PRINCIPALS.path}")
    known = hub.live_view.get(PrincipalRow, name)
    sha256 = None if known is None else known.token_sha256
    token = new_token() if asked.key is None else derived_token(hub.keyring, asked.made, name, sha256)
    settled = yield PrincipalAddition(principal=name, role=body.role, token_sha256=token_hash(token)).record(
        **asked.origin
    )
    if settled.verdict == DUPLICATE:
        _check_repeatable(hub, hub.live_view.get(PrincipalRow, name))
    return {"principal": name, "role": body.role, "token": token}


@PRINCIPALS.get("", Action.PRINCIPAL_LIST, PrincipalsAnswer, COMMAND="principals list")
def list_principals(hub: Hub, asked: Asked, wanted: PageFilter) -> LongAnswer:
    """List all principals with their roles, sorted by name, also revoked ones. Tokens are not shown.

    An answer has `limits.answer_bytes` at most.
    """
    rows = hub.live_view.live(PrincipalRow)
    return page_by_name(hub, "principals", rows, lambda row: row.principal, wanted)


@PRINCIPALS.post("/{name}/revoke", Action.PRINCIPAL_REVOKE, PrincipalAnswer, COMMAND="principals revoke")
def revoke_principal(hub: Hub, asked: Asked, name: NamePath, body: NoFields | None = None) -> Steps:
    """Revoke a principal's token for good, so that its requests are refused.

    Revoking it again changes nothing. The answer is 404 for an unknown principal.
    """
    yield PrincipalRevocation(principal=name).record(**asked.origin)
    row = hub.live_view.get(PrincipalRow, name)
    return None if row is None else row_as_json(row)


@MAILBOXES.get("", Action.MAILBOX_READ, MessagesAnswer)
def show_mailbox(hub: Hub, asked: Asked, realm: RealmPath, name: NamePath, wanted: MailboxFilter) -> LongAnswer:
    """Show messages of a mailbox without taking any: the newest, or with `pending` the oldest that wait.

    `status` selects messages by their status, such as `dead`. `after` is the id of the last message on the
    previous page of pending messages. An answer has `limits.answer_bytes` at most, unless it has only one
    message; `left` is the number of messages that were asked for beyond that.
    """
    size = answer_bytes_of(hub, None, wanted.limit, hub.settings.limits.answer_bytes)
    return LongAnswer(size, partial(_pending if wanted.pending else _messages, hub, (realm, name), wanted))


@MAILBOXES.post("/clear", Action.MAILBOX_CLEAR, ClearedAnswer)
async def clear_mailbox(
    hub: Hub, asked: Asked, realm: RealmPath, name: NamePath, body: NoFields | None = None
) -> Answer:
    """Remove all waiting messages of a mailbox, and answer how many.

    A repeated request with the same idempotency key removes none and answers 0.
    """
    waiting = hub.mailboxes.waiting((realm, name))
    record = MailboxClearing(realm=realm, to=name, request_id=asked.request_id).record(**asked.origin)
    settled = await hub.appender.settle_accepted(record)
    cleared = 0
    if settled.verdict == ACCEPTED:
        at_us = settled.logged_at_us
        cleared = await asyncio.to_thread(cleared_count, hub.live_view, (realm, name), waiting, at_us)
    return Answer({"cleared": cleared}, settled.verdict)


def cleared_count(live_view: LiveRows, mailbox: Mailbox, waiting: Iterable[str], at_us: int) -> int:
    """Return the number of messages that a clearing has removed from a mailbox.

    Args:
        live_view: The live view, which has settled the clearing.
        mailbox: Realm and recipient.
        waiting: The ids of the messages that waited before the clearing.
        at_us: The time at which Kafka stored the clearing, in microseconds since 1970 UTC.
    """
    rows = {one: live_view.get(MessageRow, "/".join((*mailbox, one))) for one in waiting}
    # Others were posted after `waiting` was read, and before the clearing.
    for row in live_view.newest_ended(MessageRow, CLEARED, Span(since=at_us)):
        if (row.realm, row.recipient) == mailbox:
            rows[row.message_id] = row
    # The store drops the first messages of a clearing that removes more than the store keeps.
    return sum(row is None or (row.status == CLEARED and row.ended_at == at_us) for row in rows.values())


def _check_repeatable(hub: Hub, row: PrincipalRow | None) -> None:
    """Raise ApiError (409) when the token of a repeated request is revoked, or too old to repeat."""
    if row is None or row.status != ACTIVE:
        raise ApiError(409, SEQ_CONFLICT, "this principal was added by the same request, and is revoked")
    if hub.log_clock.now_s() - row.added_at / 1e6 > TOKEN_WINDOW_S:
        raise ApiError(409, SEQ_CONFLICT, "this principal was added by the same request, too long ago")


def _messages(hub: Hub, mailbox: Mailbox, wanted: MailboxFilter) -> dict[str, Any]:
    found = (
        hub.live_view.get(MessageRow, "/".join((*mailbox, one))) for one in hub.mailboxes.messages(mailbox)
    )
    rows = [row for row in found if row is not None and wanted.status in (None, row.status)]
    newest = heapq.nlargest(wanted.limit, rows, key=_age_of)
    most = hub.settings.limits.answer_bytes
    return {**newest_with_bodies(hub.live_view, newest, most), "total": len(rows)}


def newest_with_bodies(live_view: LiveRows, rows: Sequence[MessageRow], bytes_most: int) -> dict[str, Any]:
    """Return messages with their bodies as JSON, oldest first, and how many older ones do not fit (`left`).

    `rows` are the messages, newest first. They have together at most `bytes_most` bytes as JSON.
    """
    shown = encoded_within((message_with_body(live_view, row) for row in rows), bytes_most)
    return {"messages": shown[::-1], "left": len(rows) - len(shown)}


def _pending(hub: Hub, mailbox: Mailbox, wanted: MailboxFilter) -> dict[str, Any]:
    view, box = hub.live_view, "/".join(mailbox)
    # The last message of the previous page may have been taken meanwhile, but its row still exists.
    last = None if wanted.after is None else view.get(MessageRow, f"{box}/{wanted.after}")
    after = (0, "") if last is None else _age_of(last)
    ids, total = hub.mailboxes.pending_page(mailbox, wanted.status, after, wanted.limit)
    found = (view.get(MessageRow, f"{box}/{message_id}") for message_id in ids)
    rows = [row for row in found if row is not None]
    most = hub.settings.limits.answer_bytes
    shown = encoded_within((message_with_body(view, row) for row in rows), most)
    return {"messages": shown, "total": total, "left": len(rows) - len(shown)}


def _age_of(row: MessageRow) -> tuple[int, str]:
    return row.posted_at, row.message_id


def message_with_body(live_view: LiveRows, row: MessageRow) -> dict[str, Any]:
    """Return the columns of a message's row as JSON, with its `body` and `content_type`."""
    body = live_view.get(MessageBodyRow, f"{row.realm}/{row.recipient}/{row.message_id}")
    return {
        "body": None if body is None else body.body,
        "content_type": None if body is None else body.content_type,
        "blob_bytes": None if body is None else body.blob_bytes,
        "blob_type": None if body is None else body.blob_type,
        **row_as_json(row),
    }
