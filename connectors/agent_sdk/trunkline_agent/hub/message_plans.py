"""Plans that send messages: to a mailbox, to a topic, as a question with its reply, and as an answer."""

from __future__ import annotations

import time
from typing import Any, Final, Unpack

from trunkline_agent.errors import NoReply, Refused, UsageError
from trunkline_agent.hub.answer_errors import rejection_of
from trunkline_agent.hub.derived_keys import Handling, SendKey
from trunkline_agent.hub.hub_requests import IDEMPOTENCY_KEY, JSON_CONTENT, encoded, path_of
from trunkline_agent.hub.hub_values import BlobReference, Published, Sent, not_a_gateway
from trunkline_agent.hub.mailbox_plans import MESSAGES, Taken
from trunkline_agent.hub.operation_values import SentFields
from trunkline_agent.hub.plans import Answer, Plan, Request, Retries, exchange
from trunkline_agent.wire.verdicts import DUPLICATE, SEQ_CONFLICT

# Each wait for a reply is one request; proxies end connections that are silent for a minute.
_REPLY_POLL_S: Final = 30.0
_VERDICT: Final = "trunkline-verdict"


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
