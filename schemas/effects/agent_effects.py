"""The records that follow from the payloads of an agent on MQTT (JE-26).

Its messages are posted. The messages that it confirms are claimed.
"""

from __future__ import annotations

from typing import Any, Final

from schemas.effects.following import Cause, Follows, GetRow
from schemas.effects.mailbox_effects import MQTT_DOOR, is_from_mqtt, undeliverable
from schemas.effects.recipients import has_mailbox, limits_of
from schemas.effects.subscription_effects import END_OF_MAILBOX
from schemas.streams.agents.mqtt_agents import AGENT_CONFIRMED, AGENT_SAID, body_text
from schemas.streams.mailboxes.mailbox_bodies import LIMIT_MOST, MailboxClaim
from schemas.streams.mailboxes.message import DEFAULT_REALM, MessageRow, milliseconds_of, verified_message
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS
from trunkline_agent.wire.verdicts import ACCEPTED, UNKNOWN_RECIPIENT

# The fields that an agent's message has in the mailbox, too.
_AS_SAID: Final = (*(one.name for one in MESSAGE_FIELDS), "priority")


def _delivery(cause: Cause) -> list[OutgoingRecord]:
    """Return the posting of the agent's message, or a message to the agent if the recipient is unknown."""
    if cause.verdict != ACCEPTED:
        return []
    agent, said = cause.name, cause.body
    refusal = undeliverable(agent, said["message_id"], said["to"], UNKNOWN_RECIPIENT, cause.id)
    if not _is_deliverable(agent, said, refusal.ce_id, cause.get):
        return [refusal]
    others: dict[str, Any] = {name: said[name] for name in _AS_SAID if name in said}
    others |= {
        "expires_in_ms": milliseconds_of(said.get("expires_in_s")),
        "deliver_after_ms": milliseconds_of(said.get("deliver_after_s")),
        **limits_of(cause.get, said["to"]).of_mailbox,
    }
    message = verified_message(
        said["message_id"], agent, said["to"], said["kind"], *body_text(said["body"]), **others
    )
    return [message.record(door=MQTT_DOOR, principal=agent)]


def _is_deliverable(agent: str, said: dict[str, Any], refusal_id: str, get: GetRow) -> bool:
    """Return whether the recipient is known; an earlier decision that the mailboxes show stays valid."""
    if get(MessageRow, f"{DEFAULT_REALM}/{agent}/{refusal_id}") is not None:
        return False
    if get(MessageRow, f"{DEFAULT_REALM}/{said['to']}/{said['message_id']}") is not None:
        return True
    return has_mailbox(get, said["to"])


def _claim(cause: Cause) -> list[OutgoingRecord]:
    """Return the claim of the messages that an agent has confirmed, under the id of the confirmation."""
    if cause.verdict != ACCEPTED:
        return []
    # By its position: the same ids may be of new messages after a week, and the same bytes confirm them.
    request = f"{cause.record.partition}-{cause.record.offset}"
    claim = MailboxClaim(
        to=cause.name, request_id=request, message_ids=list(cause.body["confirms"]), limit=LIMIT_MOST
    )
    return [claim.record(ce_id=cause.id, door=MQTT_DOOR, principal=cause.name)]


AGENT_FOLLOWS: Final = (
    END_OF_MAILBOX,
    Follows(frozenset({AGENT_SAID}), _delivery, is_from_mqtt),
    Follows(frozenset({AGENT_CONFIRMED}), _claim, is_from_mqtt),
)
