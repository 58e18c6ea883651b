"""Messages as JSON, in the form in which the HTTP routes hand them to the owner of a mailbox."""

from __future__ import annotations

from typing import Any

import orjson

from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import token_mailbox
from schemas.streams.mailboxes.message import MessageBodyRow, MessageRow
from schemas.streams.task.task_registry import TaskRow
from trunkline_agent.wire.moments import iso_moment


def message_as_json(hub: Hub, row: MessageRow) -> dict[str, Any]:
    """Return a message with its body as JSON; see `MessageAnswer` for the fields.

    `in_reply_to`, `thread`, `topic`, `blob`, `replay_of`, `attempt` and `deadline` are left out of a message
    without them.
    """
    body = hub.live_view.get(MessageBodyRow, f"{row.realm}/{row.recipient}/{row.message_id}")
    shown = {
        "id": row.message_id,
        "timestamp": iso_moment(row.posted_at),
        "sender": address_of_sender(hub, row),
        "recipient": row.recipient,
        "type": row.kind,
        "payload": None if body is None else _payload(body),
    }
    if row.in_reply_to is not None:
        shown["in_reply_to"] = row.in_reply_to
    if row.thread is not None:
        shown["thread"] = row.thread
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


def _payload(row: MessageBodyRow) -> Any:
    """Return the body as JSON. A body that is not JSON becomes the `text` of an object."""
    try:
        return orjson.loads(row.body)
    except orjson.JSONDecodeError:
        return {"text": row.body}
