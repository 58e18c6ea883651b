"""Plans that take messages out of the caller's mailbox, and acknowledge, give back and extend them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from trunkline_agent.errors import LeaseLost, UsageError
from trunkline_agent.hub.held_messages import Extension, Held
from trunkline_agent.hub.hub_requests import get_json, new_key, path_of, post_json
from trunkline_agent.hub.hub_values import not_a_gateway
from trunkline_agent.hub.plans import Plan, Retries

MESSAGES: Final = path_of("messages")
# Proxies end connections that are silent for a minute.
_POLL_S: Final = 30.0
_LEASE_S_MOST: Final = 86_400
_LIMIT_MOST: Final = 1000
_REASON_MOST: Final = 500


class Taken(NamedTuple):
    """Messages as the hub shows them, and the id of their lease. Without a lease they are taken for good."""

    messages: list[dict[str, Any]]
    lease_id: str | None


class Taking(NamedTuple):
    """How messages are taken: how many, under which lease, for how long, and how long to wait for the first."""

    limit: int
    lease_s: int | None
    wait_s: float | None
    longest_s: float | None


def checked(wanted: Taking) -> Taking:
    """Return how to take messages. Raises UsageError for numbers that no request for messages can have."""
    limit, lease_s, wait_s, longest_s = wanted
    if not isinstance(limit, int) or not 1 <= limit <= _LIMIT_MOST:
        raise UsageError(f"limit: {limit!r} is not a whole number from 1 to {_LIMIT_MOST}")
    if lease_s is not None and (not isinstance(lease_s, int) or not 1 <= lease_s <= _LEASE_S_MOST):
        raise UsageError(f"lease_s: {lease_s!r} is not a whole number from 1 to {_LEASE_S_MOST}")
    for name, time_s in (("wait_s", wait_s), ("longest_s", longest_s)):
        if time_s is not None and not time_s >= 0:
            raise UsageError(f"{name}: {time_s!r} is not a time in seconds")
    return wanted


def take(limit: int, lease_s: int | None, wait_s: float | None, retries: Retries) -> Plan[Taken]:
    """Take messages out of the caller's mailbox. Wait for the first one.

    Args:
        limit: The largest number of messages.
        lease_s: The duration of their lease. None takes them for good.
        wait_s: How many seconds to wait; then the result is empty. None waits without an end.
        retries: The patience with each single request.
    """
    deadline = None if wait_s is None else time.monotonic() + wait_s
    while True:
        left_s = _POLL_S if deadline is None else min(_POLL_S, max(0.0, deadline - time.monotonic()))
        query = {"limit": limit, "lease": lease_s, "wait": round(left_s, 3) if left_s else None}
        # A request that is sent again with its id gets the same messages.
        headers = {"X-Request-ID": new_key()}
        found = yield from get_json(MESSAGES, query, retries=retries, headers=headers, wait_s=left_s)
        taken = _taken(found)
        if taken.messages or (deadline is not None and time.monotonic() >= deadline):
            return taken


def _taken(found: Any) -> Taken:
    try:
        return Taken(found["messages"], found.get("lease_id"))
    except (KeyError, TypeError, AttributeError):
        raise not_a_gateway() from None


def acknowledge(held: Held, retries: Retries) -> Plan[None]:
    """Acknowledge a leased message. Raises LeaseLost if it was handed out again or has ended."""
    if held.is_overdue:
        raise overdue_error(held)
    body = {"lease_id": held.lease_id, "message_ids": [held.message_id]}
    found = yield from post_json(f"{MESSAGES}/ack", body, retries=retries)
    if why := refused_in(found).get(held.message_id):
        held.is_lost = True
        raise LeaseLost(f"message {held.message_id} could not be acknowledged: {why}")


def overdue_error(held: Held) -> LeaseLost:
    """Return the error, for the caller to raise, of a message whose handling has taken too long."""
    return LeaseLost(
        f"message {held.message_id} was given back: {held.why_overdue}",
        advice="make the work repeatable, and let longest_s be longer than it takes; None has no end",
    )


def give_back(lease_id: str, message_ids: Sequence[str], reason: str, retries: Retries) -> Plan[None]:
    """Give leased messages back, to be handed out at once. A message whose lease is lost stays as it is."""
    printable = "".join(one if one.isprintable() else " " for one in reason)[:_REASON_MOST]
    body = {"lease_id": lease_id, "message_ids": list(message_ids), "reason": printable}
    yield from post_json(f"{MESSAGES}/nack", body, retries=retries)


def extend(extension: Extension, retries: Retries) -> Plan[list[str]]:
    """Extend the lease of messages. Return the ids of those of which the caller no longer has the lease."""
    body = {
        "lease_id": extension.lease_id,
        "message_ids": extension.message_ids,
        "lease": extension.lease_s,
    }
    found = yield from post_json(f"{MESSAGES}/extend", body, retries=retries)
    return list(refused_in(found))


def refused_in(found: Any) -> dict[str, str]:
    """Return for each message that an answer about a lease refuses the explanation."""
    try:
        return {one["message_id"]: f"{one['message']} ({one['reason']})" for one in found["refused"]}
    except (KeyError, TypeError):
        raise not_a_gateway() from None
