"""The records about a webhook (WH-01): their bodies, its row, the form of its URL, and how to build them.

A webhook is an HTTP address that the gateway calls with each message of one mailbox. The mailbox has the
webhook's name. With a topic, the mailbox is the webhook's own, and the reactor subscribes it to the topic.

active <--> paused; both --> removed --> active
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, NamedTuple

from pydantic import AfterValidator, Field

from schemas.fold.life_cycles import Transitions
from schemas.fold.view_rows import Moment, Row
from schemas.wire.wire_body import OVERLAP_LIMIT_MS, Name, Note, WireBody, models_of

WEBHOOK_SET: Final = "webhook.set"
WEBHOOK_PAUSED: Final = "webhook.paused"
WEBHOOK_RESUMED: Final = "webhook.resumed"
WEBHOOK_REMOVED: Final = "webhook.removed"
REGISTRY_WEBHOOKS: Final = "registry_webhooks"

ACTIVE: Final = "active"
PAUSED: Final = "paused"
REMOVED: Final = "removed"
WEBHOOK_TRANSITIONS: Final[Transitions] = {
    ACTIVE: frozenset({ACTIVE, PAUSED, REMOVED}),
    PAUSED: frozenset({ACTIVE, REMOVED}),
    REMOVED: frozenset({ACTIVE}),
}
URL_CHARACTERS_MOST: Final = 2048
_PORT_MOST: Final = 65535
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# The one parser of these URLs: two parsers that disagree about the host would be a hole in the address check.
_URL: Final = re.compile(
    r"(https?)://"
    r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}))"
    r"(?::([0-9]{1,5}))?"
    r"((?:[/?][!$-;=?-\[\]_a-z~]*)?)",
    re.ASCII,
).fullmatch


class UrlParts(NamedTuple):
    """The parts of a webhook's URL.

    Attributes:
        scheme: `http` or `https`.
        host: a host name, or an IP address without brackets.
        port: the TCP port.
        target: path and query, which begin with a slash.
    """

    scheme: str
    host: str
    port: int
    target: str


def url_parts(url: str) -> UrlParts:
    """Return the parts of a URL, or raise ValueError with the reason if a webhook may not have it.

    The URL has a scheme, a host, a port (1 to 65535) or none, a path and a query. It has neither a user nor a
    fragment. Whether the gateway may call the host is not checked here.
    """
    found = _URL(url) if len(url) <= URL_CHARACTERS_MOST else None
    if found is None:
        raise ValueError(
            "not a URL that a webhook may have: http or https, a host, no user, no fragment, "
            f"visible ASCII, at most {URL_CHARACTERS_MOST} characters"
        )
    scheme, host, port, target = found.groups()
    number = _DEFAULT_PORTS[scheme] if port is None else int(port)
    if not 1 <= number <= _PORT_MOST:
        raise ValueError(f"expected a port between 1 and {_PORT_MOST}")
    return UrlParts(scheme, host.strip("[]"), number, target if target.startswith("/") else f"/{target}")


def _url(url: str) -> str:
    url_parts(url)
    return url


WebhookUrl = Annotated[str, AfterValidator(_url), Field(json_schema_extra={"maxLength": URL_CHARACTERS_MOST})]
"""The URL of a webhook, see `url_parts`."""


class WebhookRow(Row, frozen=True, gc=False):
    """A row of `registry_webhooks`: an address that is called with the messages of a mailbox."""

    VIEW: ClassVar = REGISTRY_WEBHOOKS
    KEY: ClassVar = ("webhook",)

    webhook: str
    """Name of the webhook and of its mailbox in the realm `default`."""
    status: str
    """`active`, `paused` or `removed`."""
    url: str
    """Address that is called."""
    topic: str | None
    """Topic to which the mailbox is subscribed, which is the webhook's own. Null: the mailbox of an agent."""
    set_by: str
    """Principal that set the webhook, as `<door>/<principal>`."""
    set_at: Moment
    """Time at which the webhook was set."""
    revision: int
    """How often a webhook of this name was set, paused, resumed or removed."""
    changed_at: Moment
    """Time of the newest change."""
    why_paused: str | None = None
    """Why the webhook is paused. Null: it is not paused."""
    old_secret_ends_at: Moment | None = None
    """Time until which calls are also signed with the previous secret. Null: there is none."""

    @property
    def is_live(self) -> bool:
        """True if the webhook is not removed."""
        return self.status != REMOVED

    @property
    def has_own_mailbox(self) -> bool:
        """True if the mailbox exists because of the webhook, to be subscribed to its topic."""
        return self.is_live and self.topic is not None


class _WebhookBody(WireBody):
    STREAM: ClassVar = "webhook/{name}"
    IDENTITY: ClassVar = ("{origin}", "{name}", "{request_id}")
    OMITS_NULLS: ClassVar = True

    name: Name
    request_id: Name


class WebhookSet(_WebhookBody):
    """Body of `webhook.set`: call `url` with each message of the mailbox `name`, or change the address.

    Attributes:
        sealed_secret: the secret that signs the calls, sealed for `webhook-secret/<name>`.
        topic: the topic to which the mailbox is subscribed. `None` means the mailbox of an agent or principal.
        overlap_ms: how long calls are also signed with the previous secret, in milliseconds.
    """

    TYPE: ClassVar = WEBHOOK_SET

    url: WebhookUrl
    sealed_secret: str
    topic: Name | None = None
    overlap_ms: Annotated[int, Field(ge=0, le=OVERLAP_LIMIT_MS)] = 0


class WebhookPaused(_WebhookBody):
    """Body of `webhook.paused`: the address is no longer called, and the messages stay in the mailbox.

    Attributes:
        revision: the revision that is paused. A later one stays active. `None` means whichever there is.
        reason: why the webhook is paused.
    """

    TYPE: ClassVar = WEBHOOK_PAUSED

    revision: Annotated[int, Field(ge=1)] | None = None
    reason: Note = ""


class WebhookResumed(_WebhookBody):
    """Body of `webhook.resumed`: the address of a paused webhook is called again."""

    TYPE: ClassVar = WEBHOOK_RESUMED


class WebhookRemoved(_WebhookBody):
    """Body of `webhook.removed`: the address is no longer called, and its secret is forgotten."""

    TYPE: ClassVar = WEBHOOK_REMOVED


WEBHOOK_MODELS: Final = models_of(WebhookSet, WebhookPaused, WebhookResumed, WebhookRemoved)
