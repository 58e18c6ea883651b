"""Tools as two functions around records of the log: `plan` and `answer` (decision 0055).

`DirectCalls` carries out a usual call of these tools at once, and `AgentTools` and `DeliveryTools` all others.
Sending, marking and changes of leases follow the rules of the same operations over HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from connectors.agent_mcp.mcp_tool import ToolArguments
from connectors.agent_mcp.signed_requests import DOOR
from connectors.agent_mcp.tool_arguments import SendToAgent
from connectors.gateway.engine.operation import Answer, Asked, Planned
from connectors.gateway.messages.deliveries import lease_ends
from connectors.gateway.messages.lease_operations import LeaseOperation
from connectors.gateway.rules.hub_policy import evaluate_message
from connectors.gateway.rules.message_limits import check_limits, keep_mailbox, limited_posting, note_full
from connectors.gateway.rules.read_marks import mark_records, marks_of, plan_marks
from connectors.gateway.services.hub import Hub
from connectors.gateway.web.answers import ApiError, refuse_rejected
from connectors.gateway.web.idempotency import Origin, request_uuid
from connectors.gateway.web.policy import Caller
from connectors.live.settled_feed import SettledRecord
from connectors.reactor.known_recipients import has_mailbox
from schemas.streams.agents.participants import AgentUpdated, participant_record
from schemas.streams.mailboxes.message import (
    DEFAULT_REALM,
    Message,
    MessageRow,
    verified_message,
)
from schemas.streams.principal.principals import AGENT
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.verdicts import TOO_LARGE, UNKNOWN_RECIPIENT

KIND: Final = "message"
TEXT: Final = "text/plain"
_SEND: Final = "send_to_agent"


class ToolCall(Asked):
    """A call of a tool by an agent, whose arguments are validated: they are the body."""

    __slots__ = ()

    def __init__(self, agent: str, asked: ToolArguments) -> None:
        key = getattr(asked, "idempotency_key", None)
        super().__init__(agent_caller(agent), asked, None, key, _unheard, {})

    @property
    def made(self) -> uuid.UUID:
        """The UUID of what the call makes. A repeated call with a key has the same one."""
        if self._made is None:
            self._made = request_uuid(f"{DOOR}/{self.caller.principal}", self.key)
        return self._made

    @property
    def origin(self) -> Origin:
        """The arguments `door` and `principal` of the functions that build records."""
        return {"door": DOOR, "principal": self.caller.principal}


class PlannedTool(Planned):
    """A tool as two functions."""

    def is_usual(self, asked: Asked) -> bool:
        """Return whether a call, of which nothing is recorded yet, can be carried out without a wait."""
        return True


class SendTool(PlannedTool):
    """`send_to_agent`. Of a message with a blob, `known` of the call must have the reference."""

    IS_BOUNDED = True

    def is_usual(self, asked: Asked) -> bool:
        """Return whether the message has no blob."""
        return asked.body.blob is None

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the message's record."""
        body, blob = asked.body, asked.known
        self.check(asked)
        message = new_message(
            asked.caller.principal,
            body.target_agent_id,
            body.message,
            str(asked.made),
            in_reply_to=body.in_reply_to,
            thread=body.thread,
            blob=blob,
            **body.in_the_log(),
        )
        if asked.key is None or self.hub.mailboxes.mailbox_of(message.message_id) is None:
            check_limits(self.hub, message, _SEND)
        keep_mailbox(self.hub, message)
        asked.known = message
        return (limited_posting(self.hub, message, **asked.origin),)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell the message's id and the time of its posting."""
        message: Message = asked.known
        note_full(self.hub, message, settled[0])
        refuse_rejected(settled[0])
        key = f"{DEFAULT_REALM}/{message.recipient}/{message.message_id}"
        row = self.hub.live_view.get(MessageRow, key)
        return Answer(
            {"messageId": message.message_id, "timestamp": None if row is None else row.posted_at // 1000}
        )

    def ended(self, asked: Asked) -> None:
        """Let others use the message's id."""
        self.hub.under_way.mailboxes.pop(asked.known.message_id, None)

    def check(self, asked: Asked) -> None:
        """Raise ApiError: 404 for an unknown recipient, which is recorded; 413 for a text that is too long."""
        body: SendToAgent = asked.body
        if not self.hub.names.of(has_mailbox, body.target_agent_id):
            decision = evaluate_message(self.hub.live_view, asked.caller, body.target_agent_id, KIND)
            if not decision.allowed:
                why = decision.reason
                self.hub.refusals.record(UNKNOWN_RECIPIENT, why, asked.caller.principal, _SEND)
                raise ApiError(404, UNKNOWN_RECIPIENT, why)
        check_length(self.hub, body.message)


class MarkTool(PlannedTool):
    """`mark_read`."""

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return a record for each unread message."""
        mailbox = (DEFAULT_REALM, asked.caller.principal)
        asked.known = plan_marks(self.hub, (mailbox,), asked.body.message_ids)
        return mark_records(asked.known, **asked.origin)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell how many messages were marked, and which were not."""
        marks = marks_of(asked.known, settled)
        return Answer({"marked": len(marks.marked), "unknown": marks.unknown, "notMarked": marks.not_marked})


class StatusTool(PlannedTool):
    """`update_my_status`."""

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the record of the change."""
        agent, body = asked.caller.principal, asked.body
        update = AgentUpdated(
            agent_name=agent, request_id=str(asked.made), status=body.status, capabilities=body.capabilities
        )
        return (participant_record(update, **asked.origin),)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell that it is done."""
        refuse_rejected(settled[0])
        return Answer({"success": True})


class LeaseTool(PlannedTool):
    """`ack_messages`, `nack_message` or `extend_lease`, by the operation that changes leases over HTTP."""

    def __init__(self, hub: Hub, operation: LeaseOperation) -> None:
        super().__init__(hub)
        self._operation = operation

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return a record for each message that is in the agent's mailbox."""
        return self._operation.plan(asked)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell which messages were changed, and why the others were not."""
        wanted, known = asked.known
        ends = lease_ends(wanted, known, settled)
        refused = [{"id": one, "reason": reason, "message": why} for one, (reason, why) in ends.refused.items()]
        return Answer({"done": ends.done, "refused": refused})


def new_message(sender: str, recipient: str, text: str, message_id: str, **optional: Any) -> Message:
    """Return a message with a text; `optional` are further fields."""
    return verified_message(message_id, sender, recipient, KIND, text, TEXT, **optional)


def check_length(hub: Hub, text: str) -> None:
    """Raise ApiError (413) if the text of a message is longer than the setting `limits.payload_bytes`."""
    limit, size = hub.settings.limits.payload_bytes, len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise ApiError(413, TOO_LARGE, f"a message has at most {limit} bytes, this one {size}")


@lru_cache(maxsize=1024)
def agent_caller(agent: str) -> Caller:
    """Return an agent as the sender of a request."""
    return Caller(agent, AGENT)


def _unheard() -> bool:
    return False
