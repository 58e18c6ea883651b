"""The webhooks as the dashboard shows them (WH-05): where they lead, what waits, and how their calls went."""

from __future__ import annotations

from typing import Any, Final

from connectors.doors.dashboard.shown_rows import milliseconds, shortened
from connectors.hub.services.hub import Hub
from connectors.hub.webhooks.deliverer import DOWN_AFTER
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.streams.webhook.webhook_registry import ACTIVE, PAUSED, WebhookRow, url_parts

# The number of webhooks that are shown: first those with a fault.
SHOWN: Final = 200
FAILING: Final = "failing"
DOWN: Final = "down"
_PLACES: Final = {DOWN: 0, FAILING: 1, PAUSED: 2, ACTIVE: 3}


def webhooks_as_json(hub: Hub) -> dict[str, Any]:
    """Return up to 200 webhooks as JSON, those with a fault first, and the number of all that are not removed.

    Of a URL only the host is shown, because path and query may contain a secret. `state` is `paused`, `down`
    after three failed calls in a row, `failing` after one, or `active`. The calls are those of this gateway.
    """
    rows = [(_state(hub, row), row) for row in hub.live_view.live(WebhookRow)]
    rows.sort(key=lambda one: (_PLACES[one[0]], one[1].webhook))
    return {"webhooks": [_as_json(hub, state, row) for state, row in rows[:SHOWN]], "total": len(rows)}


def _state(hub: Hub, row: WebhookRow) -> str:
    failures = hub.webhook_health.of(row.webhook).failures_in_a_row
    if row.status == PAUSED:
        return PAUSED
    return DOWN if failures >= DOWN_AFTER else FAILING if failures else ACTIVE


def _as_json(hub: Hub, state: str, row: WebhookRow) -> dict[str, Any]:
    health, mailbox, where = (
        hub.webhook_health.of(row.webhook),
        (DEFAULT_REALM, row.webhook),
        url_parts(row.url),
    )
    return {
        "webhook": row.webhook,
        "state": state,
        "host": where.host,
        "topic": row.topic,
        "pending": hub.mailboxes.size(mailbox),
        "dead": hub.mailboxes.dead_count(mailbox),
        "succeeded": health.succeeded,
        "failed": health.failed,
        "failures_in_a_row": health.failures_in_a_row,
        "last_success_ms": milliseconds(health.last_success_at),
        "last_failure_ms": milliseconds(health.last_failure_at),
        "why": shortened(row.why_paused if row.status == PAUSED else health.last_failure or None),
    }
