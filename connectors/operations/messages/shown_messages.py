"""Messages as JSON, in the form in which the HTTP routes hand them to the owner of a mailbox.

Before an answer is made, its bytes are taken out of the budget of all answers (LM-12).
"""

from __future__ import annotations

from typing import Any

from connectors.hub.engine.operation import reserve_bytes
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.services.mailboxes import token_mailbox
from schemas.streams.mailboxes.mailbox_entries import MailboxEntries
from schemas.streams.mailboxes.message import MessageBodyRow, MessageRow
from schemas.streams.mailboxes.message_text import shown_json
from schemas.streams.task.task_registry import TaskRow
from trunkline_agent.wire.ids import MAILBOX, stream_key
from trunkline_agent.wire.message_fields import message_fields_of
from trunkline_agent.wire.moments import iso_moment


async def reserve_answer(
    hub: Hub, principal: str, mailbox: Mailbox | None, limit: int, bytes_most: int
) -> None:
    """Wait until there is room for the answer with messages, which the present request makes.

    Args:
        hub: The hub.
        principal: The principal that gets the answer.
        mailbox: Realm and recipient, if all messages are pending in one mailbox.
        limit: The largest number of messages in the answer.
        bytes_most: The largest number of bytes of their bodies, unless there is only one message.

    Raises:
        ApiError: 503 if other answers need the room for longer than `gateway.settle_timeout_s`.
    """
    await reserve_bytes(hub, principal, answer_bytes_of(hub, mailbox, limit, bytes_most))


def answer_bytes_of(hub: Hub, mailbox: Mailbox | None, limit: int, bytes_most: int) -> int:
    """Return the largest number of bytes that the bodies of an answer have; see `reserve_answer`."""
    payload_bytes = hub.settings.limits.payload_bytes
    body_bytes = min(max(bytes_most, payload_bytes), limit * payload_bytes)
    if mailbox is None:
        return body_bytes
    name = "/".join(mailbox)
    size = MailboxEntries(name, hub.live_view.entries(stream_key(MAILBOX, name)), 0).size()
    return min(body_bytes, size.body_bytes)


def message_as_json(hub: Hub, row: MessageRow) -> dict[str, Any]:
    """Return a message with its body as JSON; see `MessageAnswer` for the fields.

    The optional ones are left out of a message without them.
    """
    body = hub.live_view.get(MessageBodyRow, f"{row.realm}/{row.recipient}/{row.message_id}")
    shown = {
        "id": row.message_id,
        "timestamp": iso_moment(row.posted_at),
        "sender": address_of_sender(hub, row),
        "recipient": row.recipient,
        "type": row.kind,
        "payload": None if body is None else shown_json(body.body, body.content_type),
    }
    shown |= message_fields_of(row)
    if row.topic is not None:
        shown["topic"] = row.topic
    if (blob := blob_of(row, body)) is not None:
        shown["blob"] = blob
    if row.replay_of is not None:
        shown["replay_of"] = row.replay_of
    if row.lease_until is not None:
        shown |= {"attempt": row.attempts, "deadline": iso_moment(row.lease_until)}
    return shown


def blob_of(row: MessageRow, body: MessageBodyRow | None) -> dict[str, Any] | None:
    """Return the reference to a message's blob as `BlobAnswer` describes it; None without a blob."""
    if row.blob is None or body is None:
        return None
    return {"digest": row.blob, "bytes": body.blob_bytes, "content_type": body.blob_type}


def address_of_sender(hub: Hub, row: MessageRow) -> str:
    """Return the mailbox that an answer to a message must go to."""
    if not hub.settings.gateway.mailbox_per_token or row.from_task is None:
        return row.sender
    task = hub.live_view.get(TaskRow, row.from_task)
    if task is None or task.token_id is None:
        return row.sender
    return token_mailbox(row.sender, task.token_id)
