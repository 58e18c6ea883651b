"""The agents' tools as two functions around records of the log, `plan` and `answer` (decision 0055, AM-04).

`DirectCalls` carries out a usual call of these tools at once, and `PlannedTool.serve` all others.

**Delivers** a message once for each idempotency key. **Acknowledges when** the records of a call are in the log
and settled. **Loses when** never silently: a call that ended in an error may or may not have had its effect.
Repeated with the same idempotency key, it has its effect once.

An operation with `TOOL` is a tool (`DeclaredTool`). Path, query and body are its arguments, and the answer is
its result, with names in camel case. The other tools for sending, marking, broadcasts, topics and changes of
leases plan and settle what their operations do, too. Each has arguments of its own (`tool_arguments.py`), its
own spelling of the answer, and its own name in the records of refusals.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Any, Final

from pydantic import create_model
from pydantic.alias_generators import to_camel

from connectors.doors.mcp_tools.agents import tool_arguments
from connectors.doors.mcp_tools.agents.mcp_tool import ToolArguments, described_tools
from connectors.doors.mcp_tools.agents.signed_requests import DOOR
from connectors.hub.engine.family import carried_out
from connectors.hub.engine.operation import Answer, Asked, Operation, Planned, Unusual
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.serving.answers import ApiError, refuse_rejected
from connectors.hub.serving.identities import Origin
from connectors.hub.serving.policy import RIGHTS, Caller, Reach
from connectors.operations.every_operation import OPERATIONS
from connectors.operations.messages import lease_operations, message_operations
from connectors.operations.messages.deliveries import LeaseEnds
from connectors.operations.rules.hub_policy import evaluate_message
from connectors.operations.rules.read_marks import ReadMarks
from connectors.operations.topics import broadcast_operations, topic_operations
from connectors.operations.topics.topics import Published, status_of, topics_page
from schemas.effects.recipients import has_mailbox
from schemas.streams.agents.agent_registry import AgentUpdated
from schemas.streams.mailboxes.message import DEFAULT_REALM, Message, MessageRow
from schemas.streams.principal.principals import AGENT
from schemas.streams.topic.topic_registry import SUBSCRIBED
from schemas.wire.record import OutgoingRecord
from trunkline_agent.wire.verdicts import TOO_LARGE, UNKNOWN_RECIPIENT


class ToolCall(Asked):
    """A call of a tool by an agent. Its validated arguments are body and query, and values of the path."""

    __slots__ = ()

    def __init__(self, agent: str, asked: ToolArguments) -> None:
        key = getattr(asked, "idempotency_key", None)
        super().__init__(agent_caller(agent), asked, asked, key, _unheard, vars(asked))

    @property
    def requester(self) -> str:
        """The namespace of the call's idempotency key."""
        return f"{DOOR}/{self.caller.principal}"

    @property
    def origin(self) -> Origin:
        """The arguments `door` and `principal` of the functions that build records."""
        return {"door": DOOR, "principal": self.caller.principal}


class PlannedTool(Planned):
    """A tool as two functions."""

    def is_usual(self, asked: Asked) -> bool:
        """Return whether a call, of which nothing is recorded yet, can be carried out without a wait.

        By default, it is one without a blob.
        """
        return getattr(asked.body, "blob", None) is None

    async def serve(self, agent: str, asked: Any) -> dict[str, Any]:
        """Return the result of an agent's call, usual or not.

        Raises ApiError with the reason of a refusal, and BackboneUnreachable if Kafka is unreachable or the
        records are not settled in time.
        """
        call = ToolCall(agent, asked)
        try:
            answer = await carried_out(self, call)
        except Unusual:
            answer = await self.later(call)
        return dict(answer.document)


class StatusTool(PlannedTool):
    """`update_my_status`: change the agent's status and capabilities. A value that is None stays as it is."""

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the record of the change."""
        agent, body = asked.caller.principal, asked.body
        update = AgentUpdated(
            agent_name=agent, request_id=str(asked.made), status=body.status, capabilities=body.capabilities
        )
        return (update.record(**asked.origin),)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Tell that it is done."""
        refuse_rejected(settled[0])
        return Answer({"success": True})


@lru_cache(maxsize=1024)
def agent_caller(agent: str) -> Caller:
    """Return an agent as the sender of a request."""
    return Caller(agent, AGENT)


def _unheard() -> bool:
    return False


_GET: Final = "GET"


class DeclaredTool(PlannedTool, Operation):
    """A tool that follows from an operation, which is its other base class."""

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Plan the operation, with its own body or query."""
        for name, model in (("body", self.BODY), ("query", self.QUERY)):
            given = getattr(asked, name)
            if model is not None and not isinstance(given, model):
                fields = {field: getattr(given, field) for field in model.model_fields}
                setattr(asked, name, model.model_validate(fields))
        return super().plan(asked)  # type: ignore[safe-super]  # of the operation

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer | Awaitable[Answer]:
        """Return the answer of the operation, as the tool spells it."""
        found = super().answer(asked, settled)  # type: ignore[safe-super]  # of the operation
        return self._spelled(found) if isinstance(found, Answer) else self._awaited(found)

    async def later(self, asked: Asked) -> Answer:
        """Return the answer of the operation after a wait, as the tool spells it."""
        return self._spelled(await super().later(asked))

    async def _awaited(self, found: Awaitable[Answer]) -> Answer:
        return self._spelled(await found)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return self.ANSWER.model_json_schema()

    def _spelled(self, found: Answer) -> Answer:
        spelled = _in_camel_case(found.document, self._schema, self._schema.get("$defs", {}))
        return Answer(spelled, found.verdict)


def declared_arguments(operations: Iterable[type[Operation]]) -> dict[str, type[ToolArguments]]:
    """Return the models of the arguments of the operations that are tools, by the tools' names.

    Raises ValueError for an operation that not every agent may carry out.
    """
    found = {}
    for one in operations:
        if one.TOOL is None:
            continue
        if RIGHTS[AGENT].get(one.ACTION) is not Reach.ALL:
            raise ValueError(f"{one.TOOL}: an agent has no right to {one.ACTION} as such")
        fields: dict[str, Any] = {name: (kind, ...) for name, kind in one.PARAMETERS.items()}
        for model in filter(None, (one.QUERY, one.BODY)):
            fields |= {name: (info.annotation, copy(info)) for name, info in model.model_fields.items()}
        if one.KEY is not None:
            fields["idempotency_key"] = (tool_arguments.Key, None)
        text = (one.__doc__ or "").split("\n\n")[0].replace("the caller's", "your").replace("the caller", "you")
        found[one.TOOL] = create_model(to_camel(one.TOOL), __base__=ToolArguments, __doc__=text, **fields)
    return found


def declared_tools(hub: Hub, operations: Iterable[type[Operation]]) -> dict[str, PlannedTool]:
    """Return the tools that follow from operations, by their names."""
    return {
        one.TOOL: type(one.__name__, (DeclaredTool, one), {"route": one.TOOL})(hub)
        for one in operations
        if one.TOOL is not None
    }


def _in_camel_case(document: Any, schema: dict[str, Any], models: dict[str, Any]) -> Any:
    """Return a document with the names of its fields in camel case. The keys of a mapping stay."""
    for one in schema.get("anyOf", ()):
        schema = one if one.get("type") != "null" else schema
    if "$ref" in schema:
        schema = models[schema["$ref"].rpartition("/")[2]]
    if isinstance(document, list):
        return [_in_camel_case(one, schema.get("items", {}), models) for one in document]
    fields = schema.get("properties")
    if not isinstance(document, dict) or fields is None:
        return document
    return {to_camel(name): _in_camel_case(one, fields.get(name, {}), models) for name, one in document.items()}


_DECLARED: Final = declared_arguments(OPERATIONS)
_READING: Final = frozenset(one.TOOL for one in OPERATIONS if one.TOOL is not None and one.METHOD == _GET)
ARGUMENTS: Final = {**tool_arguments.ARGUMENTS, **_DECLARED}
# All other tools change something, so each of their calls needs a signature of its own.
ONLY_READS: Final = tool_arguments.ONLY_READS | _READING
TOOLS: Final = [
    *tool_arguments.TOOLS,
    *described_tools(_DECLARED, only_reads=_READING, idempotent=()),
]


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
