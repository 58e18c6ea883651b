"""The message (design: one model, every door): wire model, and the record that posts it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from schemas.ids import MAILBOX, stream_key
from schemas.record import MESSAGE_POSTED, OutgoingRecord
from schemas.strict_json import canonical
from schemas.wire_body import Name, WireBody

DEFAULT_REALM: Final = "default"

_Moment = Annotated[str, Field(max_length=40)]


class Message(WireBody):
    """Body of `message.posted`: one message for one recipient. Deduplicated by `message_id` alone."""

    message_id: Name
    realm: Name = DEFAULT_REALM
    sender: Annotated[Name, Field(alias="from")]
    from_verified: bool = False
    recipient: Annotated[Name, Field(alias="to")]
    kind: Annotated[str, Field(min_length=1, max_length=128)]
    priority: Literal["low", "normal", "high"] = "normal"
    body: str
    content_type: Annotated[str, Field(max_length=128)] = "application/json"
    in_reply_to: Name | None = None
    thread: Name | None = None
    sent_at: _Moment | None = None
    expires_at: _Moment | None = None
    broadcast_id: Name | None = None


def posting_record(message: Message, *, door: str, principal: str) -> OutgoingRecord:
    """The record that posts a message into its recipient's mailbox."""
    return OutgoingRecord(
        stream=stream_key(MAILBOX, f"{message.realm}/{message.recipient}"),
        ce_id=message.message_id,
        door=door,
        principal=principal,
        type=MESSAGE_POSTED,
        value=canonical(message.model_dump(mode="json", by_alias=True)),
    )
