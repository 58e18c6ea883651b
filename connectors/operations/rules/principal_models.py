"""The request and answer bodies of principals and of mailboxes that are looked into."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import AwareDatetime, Field, create_model

from connectors.hub.serving.models import (
    AnswerBody,
    ListLimit,
    NamedThing,
    PageAnswer,
    QueryFilter,
    RequestBody,
    row_answer,
)
from schemas.streams.mailboxes.message import MessageRow


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
