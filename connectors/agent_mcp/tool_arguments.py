"""The names, arguments and descriptions of the agent MCP server's tools (AM-04)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from connectors.agent_mcp.mcp_tool import ToolArguments, described_tools
from schemas.streams.mailboxes.message import PRIORITIES
from schemas.wire.wire_body import Capabilities, Name

MESSAGES_LIMIT: Final = 1000
DEFAULT_MESSAGES: Final = 100
MARKED_AT_ONCE: Final = 1000
# A year.
TTL_MOST_S: Final = 31_536_000

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


class DiscoverAgents(ToolArguments):
    """Arguments of `discover_agents`."""

    capability: Annotated[Name | None, Field(description="Only agents that can do this.")] = None
    status: Annotated[
        AgentStatus | None,
        Field(description="Only agents in this status; without it all but the stopped ones."),
    ] = None


class SendToAgent(ToolArguments):
    """Arguments of `send_to_agent`."""

    target_agent_id: Annotated[Name, Field(description="Whom to write to: an agent, or `operator`.")]
    message: Annotated[str, Field(min_length=1, description="What to say.")]
    priority: Annotated[Priority, Field(description="High ones are read first.")] = "normal"
    ttl_seconds: Annotated[
        float | None,
        Field(ge=0, le=TTL_MOST_S, description="The message expires so many seconds after this call."),
    ] = None
    idempotency_key: _Key = None


class BroadcastMessage(ToolArguments):
    """Arguments of `broadcast_message`."""

    message: Annotated[str, Field(min_length=1, description="What to say to everybody but yourself.")]
    idempotency_key: _Key = None


class GetMyMessages(ToolArguments):
    """Arguments of `get_my_messages`."""

    unread_only: Annotated[bool, Field(description="Leave out what was read.")] = False
    limit: Annotated[int, Field(ge=1, le=MESSAGES_LIMIT, description="How many at most.")] = DEFAULT_MESSAGES
    since: Annotated[
        int | None, Field(ge=0, description="Only messages from this time on: milliseconds since 1970 UTC.")
    ] = None


class MarkRead(ToolArguments):
    """Arguments of `mark_read`."""

    message_ids: Annotated[
        list[Name], Field(max_length=MARKED_AT_ONCE, description="Ids of your own messages; none marks none.")
    ]
    idempotency_key: _Key = None


class UpdateMyStatus(ToolArguments):
    """Arguments of `update_my_status`."""

    status: Annotated[OwnStatus | None, Field(description="What you are doing.")] = None
    capabilities: Annotated[Capabilities | None, Field(description="All that you can do.")] = None
    idempotency_key: _Key = None


ARGUMENTS: Final[dict[str, type[ToolArguments]]] = {
    "discover_agents": DiscoverAgents,
    "send_to_agent": SendToAgent,
    "broadcast_message": BroadcastMessage,
    "get_my_messages": GetMyMessages,
    "mark_read": MarkRead,
    "update_my_status": UpdateMyStatus,
}
# All other tools change something, so each of their calls needs a signature of its own.
ONLY_READS: Final = frozenset({"discover_agents", "get_my_messages"})
_DESCRIPTIONS: Final = {
    "discover_agents": "List the agents that take part, with what they do and what they can.",
    "send_to_agent": "Write to one agent. Once this has answered, the message is not lost.",
    "broadcast_message": "Write to all other agents that take part now, and to the operator.",
    "get_my_messages": (
        f"Read your mailbox: priority {', '.join(PRIORITIES)}, the oldest first; and how much is in it. "
        "Reading marks nothing: call mark_read when you have dealt with a message."
    ),
    "mark_read": "Say which of your messages you have dealt with.",
    "update_my_status": "Tell others what you are doing and what you can do.",
}
TOOLS: Final = described_tools(
    ARGUMENTS, _DESCRIPTIONS, only_reads=ONLY_READS, idempotent=("mark_read", "update_my_status")
)
