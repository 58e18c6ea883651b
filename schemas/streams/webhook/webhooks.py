"""The stream `webhook/<name>`: the bodies of its records, its row, the form of its URL, and its fold (WH-01).

A webhook is an HTTP address that the gateway calls with each message of one mailbox. The mailbox has the
webhook's name. With a topic, the mailbox is the webhook's own, and the reactor subscribes it to the topic.

active <--> paused; both --> removed --> active

The state has these entries: `webhook`, the row with the sealed secrets, and `requests`, a memory of the
requests. `requests/...` have older ones. They remain after the removal, so the revisions of a name go on.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, NamedTuple

import msgspec
from msgspec.structs import replace
from pydantic import AfterValidator, Field

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.request_fold import RequestFold
from schemas.fold.settled import Outcome, changed, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind, Transitions
from schemas.fold.view_rows import Moment, Row
from schemas.keys.sealing import Keyring, sealed_by, webhook_secret_purpose
from schemas.wire.wire_body import OVERLAP_LIMIT_MS, Name, Note, WireBody, models_of
from trunkline_agent.wire.ids import WEBHOOK
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION

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


ENTRY_VERSION: Final = 1


class WebhookEntry(msgspec.Struct, array_like=True, gc=False):
    """The stream state of a webhook: its row, and the secrets that sign its calls, sealed.

    `request_id` is the request that set the newest secret. A removed webhook has no secret ("").
    """

    version: int
    row: WebhookRow
    sealed_secret: str
    request_id: str
    old_sealed_secret: str | None = None

    @property
    def status(self) -> str:
        """The status of the webhook."""
        return self.row.status


_WEBHOOK: Final = StructEntries("webhook", WebhookEntry)
_STATUS: Final = {
    WEBHOOK_SET: ACTIVE,
    WEBHOOK_PAUSED: PAUSED,
    WEBHOOK_RESUMED: ACTIVE,
    WEBHOOK_REMOVED: REMOVED,
}


def _set(given: FoldInput, known: WebhookEntry | None) -> WebhookEntry | Outcome:
    body, topic = given.body, given.body.get("topic")
    is_live = known is not None and known.row.is_live
    if known is not None and is_live and known.row.topic != topic:
        why = "remove the webhook first: it is the webhook of another topic, or of a mailbox"
        return rejected(ILLEGAL_TRANSITION, why, known.row.status)
    overlap_ms = body.get("overlap_ms", 0)
    old = known.sealed_secret if known is not None and is_live and overlap_ms else None
    row = WebhookRow(
        webhook=given.name,
        status=ACTIVE,
        url=body["url"],
        topic=topic,
        set_by=given.sender,
        set_at=given.now_us,
        revision=1 if known is None else known.row.revision + 1,
        changed_at=given.now_us,
        old_secret_ends_at=None if old is None else given.now_us + overlap_ms * 1000,
    )
    return WebhookEntry(ENTRY_VERSION, row, body["sealed_secret"], body["request_id"], old)


def _paused(given: FoldInput, known: WebhookEntry) -> WebhookEntry | Outcome:
    if given.body.get("revision", known.row.revision) != known.row.revision:
        return rejected(ILLEGAL_TRANSITION, "the webhook has changed since", known.row.status)
    return _with(given, known, why_paused=given.body.get("reason", ""))


def _resumed(given: FoldInput, known: WebhookEntry) -> WebhookEntry | Outcome:
    if known.row.status != PAUSED:
        return rejected(ILLEGAL_TRANSITION, "the webhook is not paused", known.row.status)
    return _with(given, known, why_paused=None)


def _removed(given: FoldInput, known: WebhookEntry) -> WebhookEntry | Outcome:
    found = _with(given, known, why_paused=None)
    found.row = replace(found.row, old_secret_ends_at=None)
    found.sealed_secret, found.old_sealed_secret = "", None
    return found


def _with(given: FoldInput, known: WebhookEntry, *, why_paused: str | None) -> WebhookEntry:
    """Return the state with the status to which the record leads."""
    row = replace(
        known.row,
        status=_STATUS[given.type],
        revision=known.row.revision + 1,
        changed_at=given.now_us,
        why_paused=why_paused,
    )
    return replace(known, row=row)


_FOLD: Final = RequestFold(
    _WEBHOOK,
    {WEBHOOK_SET: _set, WEBHOOK_PAUSED: _paused, WEBHOOK_RESUMED: _resumed, WEBHOOK_REMOVED: _removed},
    begins=(WEBHOOK_SET,),
    unknown="no webhook with this name",
    noun="webhook",
    transitions=WEBHOOK_TRANSITIONS,
    leads_to=_STATUS,
    changes=lambda _, webhook: (changed(webhook.row),),
)


def webhook_secrets(name: str, entries: Entries, keyring: Keyring, now_us: int) -> list[str]:
    """Return the secrets that sign the calls of a webhook, the newest first; none of a removed webhook.

    Args:
        name: the name of the webhook.
        entries: the entries of the stream `webhook/<name>`.
        keyring: the master keys that open the sealed secrets.
        now_us: the present in microseconds since 1970 UTC. The previous secret may have ended.

    Raises:
        UnsealError: no master key of `keyring` opens a sealed secret.
    """
    known = _WEBHOOK.read(entries)
    if known is None or not known.row.is_live:
        return []
    found, ends_at = [known.sealed_secret], known.row.old_secret_ends_at
    if known.old_sealed_secret is not None and ends_at is not None and ends_at > now_us:
        found.append(known.old_sealed_secret)
    return [keyring.open(sealed, webhook_secret_purpose(name)).decode("utf-8") for sealed in found]


def key_of_request(entries: Entries, request_id: str) -> str | None:
    """Return the id of the master key that sealed the newest secret, if the request `request_id` has set it.

    The gateway calls this function to make the same secret for a repeated request. `None` means that another
    request has set the newest secret, or that the webhook is removed. `entries` are those of `webhook/<name>`.
    """
    known = _WEBHOOK.read(entries)
    if known is None or known.request_id != request_id or not known.row.is_live:
        return None
    return sealed_by(known.sealed_secret)


WEBHOOK_KIND: Final = StreamKind(
    name=WEBHOOK,
    models=WEBHOOK_MODELS,
    settle=_FOLD.settle,
    row_of_each_stream=(WebhookRow,),
    rows=(WebhookRow,),
    named_by="name",
)
