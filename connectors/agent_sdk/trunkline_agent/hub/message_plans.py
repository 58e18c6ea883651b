"""Plans of messages: take them out of the mailbox, acknowledge, give back and extend them, and send others.

A message is sent to a mailbox, to a topic, as a question with its reply, or as an answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Unpack

from trunkline_agent.errors import LeaseLost, NoReply, Refused, UsageError
from trunkline_agent.hub.answer_errors import rejection_of
from trunkline_agent.hub.held_messages import Extension, Held
from trunkline_agent.hub.hub_requests import (
    IDEMPOTENCY_KEY,
    JSON_CONTENT,
    Handling,
    SendKey,
    encoded,
    get_json,
    new_key,
    path_of,
    post_json,
)
from trunkline_agent.hub.hub_values import BlobReference, Published, Sent, not_a_gateway
from trunkline_agent.hub.operation_values import SentFields
from trunkline_agent.hub.plans import Answer, Plan, Request, Retries, exchange
from trunkline_agent.wire.verdicts import DUPLICATE, SEQ_CONFLICT

MESSAGES: Final = path_of("messages")
# Proxies end connections that are silent for a minute.
_POLL_S: Final = 30.0
_LEASE_S_MOST: Final = 86_400
_LIMIT_MOST: Final = 1000
_REASON_MOST: Final = 500
# Each wait for a reply is one request; proxies end connections that are silent for a minute.
_REPLY_POLL_S: Final = 30.0
_VERDICT: Final = "trunkline-verdict"


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


def envelope(
    type: str,  # noqa: A002  the word of the API
    payload: Any,
    recipient: str | None = None,
    **fields: Unpack[SentFields],
) -> bytes:
    """Return the body of a request that sends a message.

    Raises UsageError for a payload that is no JSON, and TypeError for an unknown field.
    """
    if unknown := fields.keys() - SentFields.__annotations__.keys():
        raise TypeError(f"a message has no field {min(unknown)!r}")
    # In one order, because the idempotency key of a repeated handling depends on the body.
    said = {"recipient": recipient, "type": type, **dict(sorted(fields.items()))}
    body = {name: value for name, value in said.items() if value is not None}
    if isinstance(blob := fields.get("blob"), BlobReference):
        body["blob"] = blob.digest
    return encoded({**body, "payload": payload})


def send(body: bytes, key: SendKey, retries: Retries) -> Plan[Sent]:
    """Send a message. Raises MessageRejected, NotFound for an unknown recipient, RateLimited, UsageError."""
    answer = yield from _post(MESSAGES, body, key, retries)
    if answer is None:
        return Sent(None, False, DUPLICATE)
    found = answer.json()
    try:
        return Sent(found["message_id"], found["delivered"], _verdict(answer))
    except (KeyError, TypeError):
        raise not_a_gateway() from None


def reply(handling: Handling, body: bytes, key: str | None, retries: Retries) -> Plan[Sent]:
    """Send an answer to a message. The key comes from the message, whatever the present block handles."""
    found = handling.reply_key() if key is None else handling.own_key(key)
    return (yield from send(body, found, retries))


def ask(
    body: bytes, key: SendKey, timeout_s: float, retries: Retries, lease_s: int | None = None
) -> Plan[Taken]:
    """Send a message and return the reply to it as the hub shows it. No other message is taken.

    With `lease_s`, the reply is leased for so many seconds. None takes it for good.

    Raises:
        NoReply: No reply came within `timeout_s` seconds.
        TrunklineError: As `send` raises it.
    """
    if not timeout_s >= 0:
        raise UsageError(f"timeout_s: {timeout_s!r} is not a time in seconds")
    deadline = time.monotonic() + timeout_s
    while True:
        wait_s = round(min(_REPLY_POLL_S, max(0.0, deadline - time.monotonic())), 3)
        # The same key is the same question: the hub waits again, and gives the same reply again.
        answer = yield from _post(MESSAGES, body, key._replace(may_stand=False), retries, wait_s, lease_s)
        found = answer.json() if answer is not None else {}
        if not isinstance(found, dict):
            raise not_a_gateway()
        if found.get("reply") is not None:
            return Taken([found["reply"]], found.get("lease_id"))
        if time.monotonic() >= deadline:
            raise NoReply(
                f"no reply came within {timeout_s:g} s",
                message_id=found.get("message_id"),
                advice="ask again; a later reply comes into the mailbox, with the question's id in in_reply_to",
            )


def publish(topic: str, body: bytes, key: SendKey, retries: Retries) -> Plan[Published]:
    """Publish a message to all subscribers of a topic. Raises NotFound for a topic that never had any."""
    answer = yield from _post(path_of("topics", topic), body, key, retries)
    if answer is None:
        return Published(None, 0, DUPLICATE)
    found = answer.json()
    try:
        return Published(found["message_id"], found["recipients"], _verdict(answer))
    except (KeyError, TypeError):
        raise not_a_gateway() from None


def _post(
    path: str, body: bytes, key: SendKey, retries: Retries, wait_s: float = 0.0, lease_s: int | None = None
) -> Plan[Answer | None]:
    """Send a message. The result is None if an earlier handling has sent another one under the same key."""
    headers = {IDEMPOTENCY_KEY: key.text, "Content-Type": JSON_CONTENT}
    query = {"wait_reply": wait_s, "reply_lease": lease_s} if wait_s else None
    try:
        return (yield from exchange(Request("POST", path, query, headers, body, wait_s), retries))
    except Refused as error:
        if key.may_stand and error.reason == SEQ_CONFLICT:
            return None
        raise rejection_of(error) from None


def _verdict(answer: Answer) -> str:
    return answer.headers.get(_VERDICT, "")
