"""The fold of the stream `webhook/<name>`: an address that is called with the messages of a mailbox (WH-01).

The state has these entries: `webhook`, the row with the sealed secrets, and `requests`, a memory of the
requests. `requests/...` have older ones. They remain after the removal, so the revisions of a name go on.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from schemas.fold.entries import Entries, StructEntries
from schemas.fold.request_fold import RequestFold
from schemas.fold.settled import Outcome, changed, rejected
from schemas.fold.stream_kind import FoldInput, StreamKind
from schemas.keys.sealing import Keyring, sealed_by, webhook_secret_purpose
from schemas.streams.webhook.webhook_registry import (
    ACTIVE,
    PAUSED,
    REMOVED,
    WEBHOOK_MODELS,
    WEBHOOK_PAUSED,
    WEBHOOK_REMOVED,
    WEBHOOK_RESUMED,
    WEBHOOK_SET,
    WEBHOOK_TRANSITIONS,
    WebhookRow,
)
from trunkline_agent.wire.ids import WEBHOOK
from trunkline_agent.wire.verdicts import ILLEGAL_TRANSITION

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
