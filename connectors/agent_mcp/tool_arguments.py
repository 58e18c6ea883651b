"""The names, arguments and descriptions of the agent MCP server's tools (AM-04)."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from connectors.agent_mcp.mcp_tool import ToolArguments, described_tools, tools_by_name
from connectors.gateway.web.models import BlobDigest
from schemas.streams.blob.blob_registry import BlobContentType
from schemas.streams.mailboxes.message import DURATION_MS_MOST, check_times, milliseconds_of
from schemas.streams.mailboxes.pending_message import LEASE_MS_MOST
from schemas.wire.wire_body import Capabilities, Name, Note

MESSAGES_LIMIT: Final = 1000
DEFAULT_MESSAGES: Final = 100
DEFAULT_TOPICS: Final = 100
MARKED_AT_ONCE: Final = 1000
# The messages of a lease that do not fit into one answer are given back, at the cost of a record each.
LEASED_AT_ONCE: Final = 100
# 366 days, as at the other doors.
TTL_MOST_S: Final = DURATION_MS_MOST // 1000
# Below the 300 s for which clients usually wait for an answer.
WAIT_MOST_S: Final = 240
LEASE_MOST_S: Final = LEASE_MS_MOST // 1000
# A whole answer has a third more, because of base64.
BLOB_PART_MOST: Final = 1024 * 1024
DEFAULT_BLOB_PART: Final = 256 * 1024

_Key = Annotated[
    str | None,
    Field(
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="The same key again is the same call, and has the same effect once.",
    ),
]
AgentStatus = Literal["initializing", "idle", "working", "blocked", "stopped"]
OwnStatus = Literal["idle", "working", "blocked"]
Priority = Literal["low", "normal", "high"]


_Lease = Annotated[int, Field(ge=1, le=LEASE_MOST_S, description="How many seconds you have for them.")]
_LeaseId = Annotated[Name, Field(description="The `leaseId` that came with the messages.")]
_LeasedIds = Annotated[
    list[Name],
    Field(min_length=1, max_length=MARKED_AT_ONCE, description="Ids of messages of this lease."),
]


_WaitS = Annotated[
    float,
    Field(ge=0, le=WAIT_MOST_S, allow_inf_nan=False, description="How many seconds to wait at most."),
]


class DiscoverAgents(ToolArguments):
    """List the agents that take part, with what they do and what they can."""

    capability: Annotated[Name | None, Field(description="Only agents that can do this.")] = None
    status: Annotated[
        AgentStatus | None,
        Field(description="Only agents in this status; without it all but the stopped ones."),
    ] = None
    after: Annotated[Name | None, Field(description="Only agents after this id, for the next page.")] = None


_Blob = Annotated[
    BlobDigest | None,
    Field(description="The digest of a large content that goes along, as upload_blob returned it."),
]


class TimedMessage(ToolArguments):
    """Write a message, with its priority and its times."""

    priority: Annotated[Priority, Field(description="High ones are read first.")] = "normal"
    ttl_seconds: Annotated[
        float | None,
        Field(ge=0, le=TTL_MOST_S, description="The message expires so many seconds after this call."),
    ] = None
    delay_seconds: Annotated[
        float | None,
        Field(ge=0, le=TTL_MOST_S, description="It comes into the mailbox so many seconds after this call."),
    ] = None

    @model_validator(mode="after")
    def _times_fit(self) -> Self:
        if self.delay_seconds:
            check_times(self.delay_seconds, self.ttl_seconds)
        return self

    def in_the_log(self) -> dict[str, Any]:
        """Return these arguments as those of `schemas.streams.mailboxes.message.Message`."""
        return {
            "priority": self.priority,
            "expires_in_ms": milliseconds_of(self.ttl_seconds),
            "deliver_after_ms": milliseconds_of(self.delay_seconds or None),
        }


class _SentMessage(TimedMessage):
    blob: _Blob = None


class SendToAgent(_SentMessage):
    """Write to one agent. Once this has answered, the message is not lost."""

    target_agent_id: Annotated[Name, Field(description="Whom to write to: an agent, or `operator`.")]
    message: Annotated[str, Field(min_length=1, description="What to say.")]
    in_reply_to: Annotated[Name | None, Field(description="The id of the message that this one answers.")] = (
        None
    )
    thread: Annotated[Name | None, Field(description="The id of the conversation.")] = None
    idempotency_key: _Key = None


class AskAgent(SendToAgent):
    """Write to one agent and wait for its reply, a message whose inReplyTo is yours.

    Without a reply in time the answer has none. The reply then comes into your mailbox. The same call with the
    same idempotencyKey waits again.
    """

    timeout_seconds: _WaitS = 30


class BroadcastMessage(_SentMessage):
    """Write to all other agents that take part now, and to the operator."""

    message: Annotated[str, Field(min_length=1, description="What to say to everybody but yourself.")]
    idempotency_key: _Key = None


class Subscribe(ToolArguments):
    """Get what is published to a topic from now on, in your mailbox. The first subscription makes the topic.

    Read these messages like others; each has the name of its topic. To subscribe again changes nothing.
    """

    topic: Annotated[Name, Field(description="The topic, as list_topics names it, or a new name.")]
    idempotency_key: _Key = None


class Unsubscribe(ToolArguments):
    """Get nothing more that is published to a topic. Your mailbox keeps what it has."""

    topic: Annotated[Name, Field(description="The topic.")]
    idempotency_key: _Key = None


class PublishMessage(_SentMessage):
    """Write to all that are subscribed to a topic now, also to yourself if you are. See list_topics.

    Each of them gets it once. Once this has answered, the message is not lost, and comes into the mailboxes
    within a second or so. Nobody can subscribe later and get it.
    """

    topic: Annotated[Name, Field(description="The topic. Somebody must have subscribed to it once.")]
    message: Annotated[str, Field(min_length=1, description="What to say.")]
    thread: Annotated[Name | None, Field(description="The id of the conversation.")] = None
    idempotency_key: _Key = None


class ListTopics(ToolArguments):
    """List the topics by name: how many are subscribed, whether you are, and when the newest message came."""

    limit: Annotated[int, Field(ge=1, le=MESSAGES_LIMIT, description="How many at most.")] = DEFAULT_TOPICS
    after: Annotated[Name | None, Field(description="Only topics after this name, for the next page.")] = None


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
    lease_seconds: _Lease = 60
    timeout_seconds: _WaitS = 0
    idempotency_key: _Key = None


class AckMessages(ToolArguments):
    """Tell that you have dealt with leased messages. They are never handed out again."""

    lease_id: _LeaseId
    message_ids: _LeasedIds


class NackMessage(ToolArguments):
    """Give a leased message back, because you cannot deal with it now. It is handed out again at once."""

    lease_id: _LeaseId
    message_id: Annotated[Name, Field(description="The id of a message of this lease.")]
    reason: Annotated[Note, Field(description="Why, in a few words.")] = ""

    @property
    def message_ids(self) -> list[str]:
        """The one message, as the operation on leases has it."""
        return [self.message_id]


class ExtendLease(ToolArguments):
    """Take more time for leased messages: so many seconds from now."""

    lease_id: _LeaseId
    message_ids: _LeasedIds
    lease_seconds: _Lease = 60
    idempotency_key: _Key = None

    @property
    def lease(self) -> int:
        """The duration, as the operation on leases has it."""
        return self.lease_seconds


class MarkRead(ToolArguments):
    """Say which of your messages you have dealt with."""

    message_ids: Annotated[
        list[Name], Field(max_length=MARKED_AT_ONCE, description="Ids of your own messages; none marks none.")
    ]
    idempotency_key: _Key = None


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
    idempotency_key: _Key = None


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
# All other tools change something, so each of their calls needs a signature of its own.
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
