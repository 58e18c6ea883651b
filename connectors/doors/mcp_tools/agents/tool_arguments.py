"""The names, arguments and descriptions of the agent MCP server's tools (AM-04).

An argument that is a field of an operation of the hub has the field's name in Python, and the type, bounds and
default of the operation's model. `_SPELLED` has how tools spell it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, get_type_hints

from pydantic import BaseModel, Field, create_model, model_validator

from connectors.doors.mcp_tools.agents.mcp_tool import ToolArguments, described_tools, tools_by_name
from connectors.hub.serving.models import BlobDigest
from connectors.operations.rules.agent_models import BroadcastRequest
from connectors.operations.rules.message_models import (
    AckRequest,
    ExtendRequest,
    MessageEnvelope,
    NackRequest,
    NamesFilter,
    PublishRequest,
    ReadRequest,
    SentMessage,
    SubscriptionRequest,
)
from schemas.streams.blob.blobs import BlobContentType
from schemas.streams.mailboxes.message import check_times
from schemas.streams.mailboxes.pending_message import LEASE_MS_MOST
from schemas.wire.wire_body import Capabilities, Name
from trunkline_agent.wire.message_fields import DESCRIPTION, MESSAGE_FIELDS

MESSAGES_LIMIT: Final = 1000
DEFAULT_MESSAGES: Final = 100
# The messages of a lease that do not fit into one answer are given back, at the cost of a record each.
LEASED_AT_ONCE: Final = 100
# Below the 300 s for which clients usually wait for an answer.
WAIT_MOST_S: Final = 240
LEASE_MOST_S: Final = LEASE_MS_MOST // 1000
# A whole answer has a third more, because of base64.
BLOB_PART_MOST: Final = 1024 * 1024
DEFAULT_BLOB_PART: Final = 256 * 1024

_KIND: Final = "message"
_TEXT: Final = "text/plain"
AgentStatus = Literal["initializing", "idle", "working", "blocked", "stopped"]
OwnStatus = Literal["idle", "working", "blocked"]
Key = Annotated[
    str | None,
    Field(
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="The same key again is the same call, and has the same effect once.",
    ),
]
"""The idempotency key of a call."""
_Text = Annotated[str, Field(min_length=1)]
_Lease = Annotated[int, Field(ge=1, le=LEASE_MOST_S, description="How many seconds you have for them.")]
_WaitS = Annotated[
    float,
    Field(ge=0, le=WAIT_MOST_S, allow_inf_nan=False, description="How many seconds to wait at most."),
]


class _Spelled(NamedTuple):
    """How tools spell a field of an operation.

    Attributes:
        text: Its description. None: that of `kind`.
        name: Its name. None: that of the field.
        kind: Its type with bounds. None: type and default of the field.
        default: The default if it has a type of its own. Without one, the argument is needed.
    """

    text: str | None = None
    name: str | None = None
    kind: Any = None
    default: Any = ...


_SPELLED: Final = {
    "after": _Spelled("Only topics after this name, for the next page."),
    "blob": _Spelled("The digest of a large content that goes along, as upload_blob returned it."),
    "deliver_after_s": _Spelled(
        "It comes into the mailbox so many seconds after this call.", "deliverAfterSeconds"
    ),
    "expires_in_s": _Spelled("The message expires so many seconds after this call.", "expiresInSeconds"),
    "idempotency_key": _Spelled(kind=Key, default=None),
    "lease": _Spelled(None, "leaseSeconds", _Lease, 60),
    "lease_id": _Spelled("The `leaseId` that came with the messages."),
    "limit": _Spelled("How many at most."),
    "message_id": _Spelled("The id of a message of this lease.", None, Name),
    "message_ids": _Spelled("Ids of messages of this lease."),
    "payload": _Spelled("What to say.", "message", _Text),
    "priority": _Spelled("High ones are read first."),
    "reason": _Spelled("Why, in a few words."),
    "recipient": _Spelled("Whom to write to: an agent, or `operator`.", "targetAgentId", Name),
    "topic": _Spelled("The topic.", None, Name),
    **{one.name: _Spelled(one.text) for one in MESSAGE_FIELDS},
}
_OLDER: Final = {"delaySeconds": "deliverAfterSeconds", "ttlSeconds": "expiresInSeconds"}


def _takes(
    operation: type[BaseModel], *names: str, **texts: str
) -> Callable[[type[ToolArguments]], type[ToolArguments]]:
    """Return a decorator that adds the arguments with these names to a tool, after those that it has.

    `operation` is the model of the operation's body or query. `texts` has descriptions that differ from those
    of `_SPELLED`, by the names.
    """
    kinds = get_type_hints(operation, include_extras=True)

    def field(name: str) -> tuple[Any, Any]:
        text, alias, kind, default = _SPELLED[name]
        if kind is None:
            kind, default = kinds[name], operation.model_fields[name].default
        more: dict[str, Any] = {"description": text} if (text := texts.get(name, text)) else {}
        return kind, Field(default, alias=alias, **more)

    def add(tool: type[ToolArguments]) -> type[ToolArguments]:
        fields: dict[str, Any] = {name: field(name) for name in names}
        about: dict[str, Any] = {"__base__": tool, "__doc__": tool.__doc__, "__module__": tool.__module__}
        found: type[ToolArguments] = create_model(tool.__name__, **about, **fields)
        return found

    return add


class DiscoverAgents(ToolArguments):
    """List the agents that take part, with what they do and what they can."""

    capability: Annotated[Name | None, Field(description="Only agents that can do this.")] = None
    status: Annotated[
        AgentStatus | None,
        Field(description="Only agents in this status; without it all but the stopped ones."),
    ] = None
    after: Annotated[Name | None, Field(description="Only agents after this id, for the next page.")] = None


@_takes(SentMessage, "priority", "expires_in_s", "deliver_after_s")
class TimedMessage(ToolArguments):
    """Write a message, with its priority and its times."""

    in_the_log = SentMessage.in_the_log

    @model_validator(mode="before")
    @classmethod
    def _spelled_anew(cls, given: Any) -> Any:
        """Return the arguments with the names that those have now which were given under older ones."""
        older = _OLDER.keys() & given if isinstance(given, dict) else ()
        names = {name: _OLDER[name] for name in older if _OLDER[name] not in given}
        return {names.get(name, name): value for name, value in given.items()} if names else given

    @model_validator(mode="after")
    def _times_fit(self: Any) -> Any:
        check_times(self.deliver_after_s, self.expires_in_s)
        return self


@_takes(SentMessage, "blob", *(one.name for one in DESCRIPTION))
class _SentMessage(TimedMessage):
    type: ClassVar = _KIND

    def content(self: Any) -> tuple[str, str, str]:
        """Return kind, text and media type, as the log has them."""
        return _KIND, self.payload, _TEXT


@_takes(MessageEnvelope, "recipient", "payload", "in_reply_to", "thread", "idempotency_key")
class SendToAgent(_SentMessage):
    """Write to one agent. Once this has answered, the message is not lost."""

    wait_reply: ClassVar = 0


class AskAgent(SendToAgent):
    """Write to one agent and wait for its reply, a message whose inReplyTo is yours.

    Without a reply in time the answer has none. The reply then comes into your mailbox. The same call with the
    same idempotencyKey waits again.
    """

    timeout_seconds: _WaitS = 30


@_takes(BroadcastRequest, "payload", "idempotency_key", payload="What to say to everybody but yourself.")
class BroadcastMessage(_SentMessage):
    """Write to all other agents that take part now, and to the operator."""


@_takes(
    SubscriptionRequest,
    "topic",
    "idempotency_key",
    topic="The topic, as list_topics names it, or a new name.",
)
class Subscribe(ToolArguments):
    """Get what is published to a topic from now on, in your mailbox. The first subscription makes the topic.

    Read these messages like others; each has the name of its topic. To subscribe again changes nothing.
    """

    subscriber: ClassVar = None


@_takes(SubscriptionRequest, "topic", "idempotency_key")
class Unsubscribe(ToolArguments):
    """Get nothing more that is published to a topic. Your mailbox keeps what it has."""

    subscriber: ClassVar = None


@_takes(
    PublishRequest,
    "topic",
    "payload",
    "thread",
    "idempotency_key",
    topic="The topic. Somebody must have subscribed to it once.",
)
class PublishMessage(_SentMessage):
    """Write to all that are subscribed to a topic now, also to yourself if you are. See list_topics.

    Each of them gets it once. Once this has answered, the message is not lost, and comes into the mailboxes
    within a second or so. Nobody can subscribe later and get it.
    """

    in_reply_to: ClassVar = None


@_takes(NamesFilter, "limit", "after")
class ListTopics(ToolArguments):
    """List the topics by name: how many are subscribed, whether you are, and when the newest message came."""


class GetMyMessages(ToolArguments):
    """Read your mailbox: priority high, normal, low, the oldest first; and how much is in it.

    Reading marks nothing: call mark_read when you have dealt with a message.
    """

    unread_only: Annotated[bool, Field(description="Leave out what was read.")] = False
    limit: Annotated[int, Field(ge=1, le=MESSAGES_LIMIT, description="How many at most.")] = DEFAULT_MESSAGES
    since: Annotated[
        int | None, Field(ge=0, description="Only messages from this time on: milliseconds since 1970 UTC.")
    ] = None


class WaitForMessages(ToolArguments):
    """Wait until there is an unread message in your mailbox, and read it as by get_my_messages.

    The answer comes at once if there is one already, and is empty when the time is up. Messages that you or
    others have leased do not count. Reading marks nothing.
    """

    timeout_seconds: _WaitS = 30
    limit: Annotated[int, Field(ge=1, le=MESSAGES_LIMIT, description="How many at most.")] = DEFAULT_MESSAGES
    since: Annotated[
        int | None, Field(ge=0, description="Only messages from this time on: milliseconds since 1970 UTC.")
    ] = None


class LeaseMessages(ToolArguments):
    """Take unread messages to work on. Nobody else gets them until your lease ends.

    Call ack_messages when you have dealt with one, and nack_message when you cannot. Otherwise it is handed out
    again after the lease, a few times at most.
    """

    limit: Annotated[int, Field(ge=1, le=LEASED_AT_ONCE, description="How many at most.")] = 10
    lease: Annotated[_Lease, Field(alias="leaseSeconds")] = 60
    timeout_seconds: _WaitS = 0
    idempotency_key: Key = None


@_takes(AckRequest, "lease_id", "message_ids")
class AckMessages(ToolArguments):
    """Tell that you have dealt with leased messages. They are never handed out again."""


@_takes(NackRequest, "lease_id", "message_id", "reason")
class NackMessage(ToolArguments):
    """Give a leased message back, because you cannot deal with it now. It is handed out again at once."""

    @property
    def message_ids(self: Any) -> list[str]:
        """The one message, as the operation on leases has it."""
        return [self.message_id]


@_takes(ExtendRequest, "lease_id", "message_ids", "lease", "idempotency_key")
class ExtendLease(ToolArguments):
    """Take more time for leased messages: so many seconds from now."""


@_takes(ReadRequest, "message_ids", "idempotency_key", message_ids="Ids of your own messages; none marks none.")
class MarkRead(ToolArguments):
    """Say which of your messages you have dealt with."""


class UploadBlob(ToolArguments):
    """Store a content that is too large for a message, and then send its digest as `blob` of a message.

    Send it in parts of at most a few hundred KB, one after the other: the first without uploadId, the others
    with the uploadId of its answer, the last with isLast. Not more than a minute may pass between two parts.
    After the last part the answer has the digest. Send the message soon; a content without a message is
    removed.
    """

    content: Annotated[str, Field(description="The part, in base64.")]
    upload_id: Annotated[Name | None, Field(description="The upload that the part belongs to.")] = None
    offset: Annotated[int, Field(ge=0, description="How many bytes of the content come before the part.")] = 0
    is_last: Annotated[bool, Field(description="Whether the content ends with this part.")] = True
    content_type: Annotated[
        BlobContentType | None, Field(description="The media type, such as image/png; with the last part.")
    ] = None
    digest: Annotated[
        BlobDigest | None, Field(description="The SHA-256 that the content must have, in hex.")
    ] = None


class ReadBlob(ToolArguments):
    """Read a part of the large content (`blob`) of a message in your mailbox.

    Also the content of a message whose content is null, with contentBytes, because it did not fit.

    It can be read until some time after the end of the message. Read on at offset plus the length of the part
    until isLast. Then check the SHA-256 of the whole against digest.
    """

    message_id: Annotated[Name, Field(description="The id of the message.")]
    offset: Annotated[int, Field(ge=0, description="Where the part begins, in bytes.")] = 0
    limit: Annotated[int, Field(ge=1, le=BLOB_PART_MOST, description="How many bytes at most.")] = (
        DEFAULT_BLOB_PART
    )


class UpdateMyStatus(ToolArguments):
    """Tell others what you are doing and what you can do."""

    status: Annotated[OwnStatus | None, Field(description="What you are doing.")] = None
    capabilities: Annotated[Capabilities | None, Field(description="All that you can do.")] = None
    idempotency_key: Key = None


ARGUMENTS: Final = tools_by_name(
    DiscoverAgents,
    SendToAgent,
    AskAgent,
    BroadcastMessage,
    ListTopics,
    Subscribe,
    Unsubscribe,
    PublishMessage,
    GetMyMessages,
    WaitForMessages,
    MarkRead,
    LeaseMessages,
    AckMessages,
    NackMessage,
    ExtendLease,
    UploadBlob,
    ReadBlob,
    UpdateMyStatus,
)
ONLY_READS: Final = frozenset(
    {"discover_agents", "get_my_messages", "wait_for_messages", "list_topics", "read_blob"}
)
WAITS: Final = frozenset(name for name, model in ARGUMENTS.items() if "timeout_seconds" in model.model_fields)
"""The names of the tools that may wait for messages."""
TOOLS: Final = described_tools(
    ARGUMENTS,
    only_reads=ONLY_READS,
    idempotent=("mark_read", "ack_messages", "nack_message", "update_my_status", "subscribe", "unsubscribe"),
)
