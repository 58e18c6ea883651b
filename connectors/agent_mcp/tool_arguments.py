"""The names, arguments and descriptions of the agent MCP server's tools (AM-04)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from connectors.agent_mcp.mcp_tool import ToolArguments, described_tools, tools_by_name
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
    """List the agents that take part, with what they do and what they can."""

    capability: Annotated[Name | None, Field(description="Only agents that can do this.")] = None
    status: Annotated[
        AgentStatus | None,
        Field(description="Only agents in this status; without it all but the stopped ones."),
    ] = None


class SendToAgent(ToolArguments):
    """Write to one agent. Once this has answered, the message is not lost."""

    target_agent_id: Annotated[Name, Field(description="Whom to write to: an agent, or `operator`.")]
    message: Annotated[str, Field(min_length=1, description="What to say.")]
    priority: Annotated[Priority, Field(description="High ones are read first.")] = "normal"
    ttl_seconds: Annotated[
        float | None,
        Field(ge=0, le=TTL_MOST_S, description="The message expires so many seconds after this call."),
    ] = None
    idempotency_key: _Key = None


class BroadcastMessage(ToolArguments):
    """Write to all other agents that take part now, and to the operator."""

    message: Annotated[str, Field(min_length=1, description="What to say to everybody but yourself.")]
    idempotency_key: _Key = None


class GetMyMessages(ToolArguments):
    """Read your mailbox: priority high, normal, low, the oldest first; and how much is in it.

    Reading marks nothing: call mark_read when you have dealt with a message.
    """

    unread_only: Annotated[bool, Field(description="Leave out what was read.")] = False
    limit: Annotated[int, Field(ge=1, le=MESSAGES_LIMIT, description="How many at most.")] = DEFAULT_MESSAGES
    since: Annotated[
        int | None, Field(ge=0, description="Only messages from this time on: milliseconds since 1970 UTC.")
    ] = None


class MarkRead(ToolArguments):
    """Say which of your messages you have dealt with."""

    message_ids: Annotated[
        list[Name], Field(max_length=MARKED_AT_ONCE, description="Ids of your own messages; none marks none.")
    ]
    idempotency_key: _Key = None


class UpdateMyStatus(ToolArguments):
    """Tell others what you are doing and what you can do."""

    status: Annotated[OwnStatus | None, Field(description="What you are doing.")] = None
    capabilities: Annotated[Capabilities | None, Field(description="All that you can do.")] = None
    idempotency_key: _Key = None


ARGUMENTS: Final = tools_by_name(
    DiscoverAgents, SendToAgent, BroadcastMessage, GetMyMessages, MarkRead, UpdateMyStatus
)
# All other tools change something, so each of their calls needs a signature of its own.
ONLY_READS: Final = frozenset({"discover_agents", "get_my_messages"})
TOOLS: Final = described_tools(ARGUMENTS, only_reads=ONLY_READS, idempotent=("mark_read", "update_my_status"))
