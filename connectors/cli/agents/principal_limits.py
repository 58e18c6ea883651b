"""The actions `limits` and `limit` of `trunkline principals`: how much may be sent, and wait in mailboxes."""

from __future__ import annotations

from typing import Final

from connectors.cli.shared.actions import Actions, argument
from connectors.cli.shared.arguments import request_id
from connectors.cli.shared.call import Call, Columns
from connectors.cli.shared.text_table import age_of
from trunkline_agent.errors import UsageError

_ALL: Final = "all"
_FIELDS: Final = {
    "pending": "pending_most",
    "bytes": "bytes_most",
    "per_minute": "messages_per_minute",
    "bytes_per_minute": "bytes_per_minute",
    "jobs": "live_jobs_most",
    "topics": "subscriptions_most",
}
_COLUMNS: Final[Columns] = {
    "SCOPE": "scope",
    "NAME": "name",
    "PENDING": "pending_most",
    "BYTES": "bytes_most",
    "MESSAGES/MIN": "messages_per_minute",
    "BYTES/MIN": "bytes_per_minute",
    "JOBS": "live_jobs_most",
    "TOPICS": "subscriptions_most",
    "AGE": lambda row: age_of(row["limited_at"]),
    "SET BY": "limited_by",
}
ACTIONS: Final = Actions()


@ACTIONS.add()
def _limits(call: Call) -> int:
    """List the limits that were set."""
    return call.print_rows(call.get_all("limits", key="limits", name="scope/name"), "limits", _COLUMNS)


@ACTIONS.add(
    argument("scope", "all, role or name", choices=(_ALL, "role", "name")),
    argument("name", "the role or the principal; not for 'all'", nargs="?"),
    argument("--pending", "messages that may wait in a mailbox", type=int, metavar="N"),
    argument("--bytes", "bytes that the bodies of these messages may have", type=int, metavar="N"),
    argument("--per-minute", "messages that a principal may send in a minute", type=int, metavar="N"),
    argument("--bytes-per-minute", "bytes in messages that it may send in a minute", type=int, metavar="N"),
    argument("--jobs", "jobs without an end that a principal may have", type=int, metavar="N"),
    argument("--topics", "topics that a mailbox may be subscribed to", type=int, metavar="N"),
    request_id("the same change"),
    example="trunkline principals limit role worker --pending 10000 --per-minute 600",
)
def _limit(call: Call) -> int:
    """Set all limits of a scope; those that are not given are lifted."""
    name = _ALL if call.scope == _ALL and call.name is None else call.name
    if name is None:
        raise UsageError(f"NAME: say which {'role' if call.scope == 'role' else 'principal'}")
    wanted = {field: getattr(call, option) for option, field in _FIELDS.items()}
    row = call.post_named("limits", call.scope, name, possible_effect="the limits were set", **wanted)
    given = ", ".join(f"{field} {row[field]}" for field in _FIELDS.values() if row[field] is not None)
    return call.print_answer(row, f"limits of {call.scope} {name}: {given or 'none'}")
