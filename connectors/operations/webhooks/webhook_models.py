"""The request and answer bodies of webhooks (WH-01)."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AwareDatetime, Field, create_model

from connectors.hub.serving.models import (
    OVERLAP_LIMIT_S,
    WHOLE,
    AnswerBody,
    ListLimit,
    NamedThing,
    QueryFilter,
    RequestBody,
    row_answer,
)
from schemas.streams.webhook.webhook_registry import WebhookRow, WebhookUrl
from schemas.wire.wire_body import Note


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
