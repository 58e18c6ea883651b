"""The agents' tools that are operations of the hub: sending, marking, broadcasts, topics and changes of leases.

A tool plans and settles what its operation does (`connectors.operations.messages`). It has arguments of its own
(`tool_arguments.py`), its own spelling of the answer, and its own name in the records of refusals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from connectors.doors.mcp_tools.agents.planned_tools import PlannedTool
from connectors.hub.engine.operation import Asked
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError
from connectors.operations.messages import lease_operations, message_operations
from connectors.operations.messages.deliveries import LeaseEnds
from connectors.operations.rules.hub_policy import evaluate_message
from connectors.operations.rules.read_marks import ReadMarks
from connectors.operations.topics import broadcast_operations, topic_operations
from connectors.operations.topics.topics import Published, status_of, topics_page
from schemas.effects.recipients import has_mailbox
from schemas.streams.mailboxes.message import DEFAULT_REALM, Message, MessageRow
from schemas.streams.topic.topic_registry import SUBSCRIBED
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.verdicts import TOO_LARGE, UNKNOWN_RECIPIENT


def operation_tools(hub: Hub) -> dict[str, PlannedTool]:
    """Return the tools by their names."""
    return {
        "send_to_agent": SendTool(hub),
        "mark_read": MarkTool(hub),
        "broadcast_message": BroadcastTool(hub),
        "list_topics": ListTopicsTool(hub),
        "subscribe": SubscribeTool(hub),
        "unsubscribe": UnsubscribeTool(hub),
        "publish_message": PublishTool(hub),
        "ack_messages": AckTool(hub),
        "nack_message": NackTool(hub),
        "extend_lease": ExtendTool(hub),
    }


class SendTool(PlannedTool, message_operations.SendMessage):
    """`send_to_agent`."""

    route = "send_to_agent"

    def check(self, asked: Asked) -> None:
        """Raise ApiError: 404 for an unknown recipient, which is recorded; 413 for a text that is too long."""
        recipient = asked.body.recipient
        if not self.hub.names.of(has_mailbox, recipient):
            decision = evaluate_message(self.hub.live_view, asked.caller, recipient, asked.body.type)
            if not decision.allowed:
                self.hub.refusals.record(UNKNOWN_RECIPIENT, decision.reason, asked.caller.principal, self.route)
                raise ApiError(404, UNKNOWN_RECIPIENT, decision.reason)
        _check_length(self.hub, asked)

    def check_room(self, message: Message) -> None:
        """Do nothing: a tool sends to a listener, however many messages wait for it."""

    def document(self, asked: Asked) -> dict[str, Any]:
        """Return the message's id, and the time of its posting in milliseconds since 1970 UTC."""
        message_id = str(asked.made)
        row = self.hub.live_view.get(MessageRow, f"{DEFAULT_REALM}/{asked.body.recipient}/{message_id}")
        return {"messageId": message_id, "timestamp": None if row is None else row.posted_at // 1000}


class MarkTool(PlannedTool, message_operations.MarkMessagesRead):
    """`mark_read`."""

    def document(self, asked: Asked, marks: ReadMarks) -> dict[str, Any]:
        """Return how many messages were marked, and the ids of those that were not.

        `unknown` lists those that are not in the mailbox. `notMarked` lists those of messages that are leased,
        or final already, for example expired; a repetition does not change that. Ids that were marked before
        are in neither list.
        """
        return {"marked": len(marks.marked), "unknown": marks.unknown, "notMarked": marks.not_marked}


class PublishTool(PlannedTool, topic_operations.PublishMessage):
    """`publish_message`."""

    route = "publish_message"

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the publication's record. Raises ApiError (413) for a text over the limit."""
        _check_length(self.hub, asked)
        return super().plan(asked)

    def document(self, asked: Asked, found: Published) -> dict[str, Any]:
        """Return the message's id, and the numbers of mailboxes that get it or are full."""
        return _sent(asked.known.message_id, found)


class BroadcastTool(PlannedTool, broadcast_operations.BroadcastMessage):
    """`broadcast_message`."""

    route = "broadcast_message"

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return a record for each recipient. Raises ApiError (413) for a text over the limit."""
        _check_length(self.hub, asked)
        return super().plan(asked)

    def document(self, asked: Asked, found: Published) -> dict[str, Any]:
        """Return the id of the broadcast, and the numbers of mailboxes that got it or are full."""
        return _sent(str(asked.made), found)


def _check_length(hub: Hub, asked: Asked) -> None:
    """Raise ApiError (413) if the text of a message is longer than the setting `limits.payload_bytes`."""
    limit, size = hub.settings.limits.payload_bytes, len(asked.body.payload.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise ApiError(413, TOO_LARGE, f"a message has at most {limit} bytes, this one {size}")


def _sent(message_id: str, found: Published) -> dict[str, Any]:
    return {"messageId": message_id, "recipientCount": found.recipients, "full": found.full}


class _SubscriptionTool(PlannedTool):
    """`subscribe` or `unsubscribe`."""

    def document(self, change: dict[str, str], status: str) -> dict[str, Any]:
        """Return whether the agent is subscribed now."""
        return {"topic": change["topic"], "subscribed": status == SUBSCRIBED}


class SubscribeTool(_SubscriptionTool, topic_operations.SubscribeMailbox):
    """`subscribe`."""

    route = "subscribe"


class UnsubscribeTool(_SubscriptionTool, topic_operations.UnsubscribeMailbox):
    """`unsubscribe`."""


class ListTopicsTool(PlannedTool, topic_operations.ListTopics):
    """`list_topics`."""

    def shown(self, asked: Asked) -> dict[str, Any]:
        """Return topics by name, whether the agent is subscribed to each, and the number of all topics."""
        rows, total = topics_page(self.hub, asked.body.limit, asked.body.after)
        topics = [
            {
                "topic": row.topic,
                "subscribers": row.subscribers,
                "subscribed": status_of(self.hub, row.topic, asked.caller.principal) == SUBSCRIBED,
                "lastPublishedAt": None if row.last_published_at is None else row.last_published_at // 1000,
            }
            for row in rows
        ]
        return {"topics": topics, "total": total}


class _LeaseTool(PlannedTool):
    """A tool that changes leases."""

    def document(self, asked: Asked, ends: LeaseEnds) -> dict[str, Any]:
        """Return which messages were changed, and why the others were not."""
        refused = [{"id": one, "reason": reason, "message": why} for one, (reason, why) in ends.refused.items()]
        return {"done": ends.done, "refused": refused}


class AckTool(_LeaseTool, lease_operations.AcknowledgeMessages):
    """`ack_messages`."""


class NackTool(_LeaseTool, lease_operations.GiveBackMessages):
    """`nack_message`."""


class ExtendTool(_LeaseTool, lease_operations.ExtendLease):
    """`extend_lease`."""
