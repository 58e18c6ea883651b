"""The functions behind the management MCP server's tools (AM-09), such as `spawn_agent`, and their arguments.

Each function asks the gateway as the operator. **Delivers** each spawn and each message once for each
idempotency key. Without a key from the caller, the key is made of this server's own id and the id of the call.
So a call that is delivered twice, or that the gateway's client sends again, starts one agent. Two calls are two
spawns; of two spawns with one `agentId` the second is refused. **Loses when** never silently: when the gateway
is away, the error names the key to try again with.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import Field

from connectors.doors.mcp_tools.agents.mcp_tool import ToolArguments, described_tools, tools_by_name
from connectors.doors.mcp_tools.agents.tool_arguments import TimedMessage
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from schemas.settings.settings import Settings
from schemas.streams.mailboxes.mailbox_bodies import LIMIT_MOST
from schemas.streams.mailboxes.message import DEFAULT_REALM, MESSAGE_PENDING
from schemas.streams.mailboxes.message_text import shown_text
from schemas.streams.principal.principals import OPERATOR
from schemas.wire.wire_body import TASK_TEXT_LIMIT, Capabilities, Name, Printable
from trunkline_agent.errors import BackboneUnreachable

_Key = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,200}$")] | None


class SpawnAgent(ToolArguments):
    """Start an agent on the machine of the gateway, with a key of its own, and wait until it runs.

    It reads its mailbox and can be written to by its id.
    """

    agent_id: Annotated[Name | None, Field(description="Its name; without one it gets one.")] = None
    task: Annotated[Printable, Field(min_length=1, max_length=TASK_TEXT_LIMIT, description="What it is to do.")]
    capabilities: Capabilities = Field([], description="What others may find it by.")
    idempotency_key: Annotated[
        _Key, Field(description="The same key again is the same spawn, and starts no second agent.")
    ] = None


class ListAgents(ToolArguments):
    """List the agents that take part now: task, status, capabilities, start time."""


class StopAgent(ToolArguments):
    """Stop an agent: its process ends, its key is deleted, its mailbox is closed."""

    agent_id: Annotated[Name, Field(description="Which agent.")]


class SendMessage(TimedMessage):
    """Write to the mailbox of an agent, a session or a principal, in the operator's name."""

    target_agent_id: Annotated[Name, Field(description="The name of the mailbox to write to.")]
    message: Annotated[str, Field(min_length=1, description="The text of the message.")]
    idempotency_key: Annotated[
        _Key, Field(description="The same key again is the same message, and is delivered once.")
    ] = None


class GetMessages(ToolArguments):
    """Read the operator's mailbox, the oldest message first.

    Reading marks nothing: call mark_messages_read when a message is dealt with.
    """

    unread_only: Annotated[
        bool, Field(description="The oldest unread messages instead of the newest of all.")
    ] = False
    limit: Annotated[int, Field(ge=1, le=LIMIT_MOST, description="How many at most.")] = 100


class MarkMessagesRead(ToolArguments):
    """Mark messages of the operator's mailbox as read."""

    message_ids: Annotated[
        list[Name], Field(max_length=LIMIT_MOST, description="Ids of the operator's messages; none marks none.")
    ]


class ManagementTools:
    """The functions of the tools: one method for each tool, with the tool's name.

    `asked` are the tool's arguments. `call` is the id of the MCP request, from which the method makes an
    idempotency key if `asked` has none. Each method returns the tool's result as JSON. Each raises
    BackboneUnreachable if the gateway cannot be reached or does not answer, and another TrunklineError if it
    refuses the request. The methods block, so none may be called on the thread of an event loop.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._own = uuid.uuid4()

    def spawn_agent(self, asked: SpawnAgent, call: str) -> dict[str, Any]:
        """Start an agent, wait until it runs, and return its row as the hub shows it, such as name and status.

        If there is a dashboard, `dashboardUrl` is its address.

        `call` is the id of the MCP request, for an idempotency key if `asked` has none. Two calls with the same
        key start one agent.

        Raises:
            Refused: The agent was not started; the error has the gateway's reason.
            BackboneUnreachable: The gateway did not answer. The error names the key with which to try again.
        """
        body = {"agent_name": asked.agent_id, "task": asked.task, "capabilities": asked.capabilities}
        path = path_of("participants", "spawn")
        shown = _shown(self._post_once(path, body, "spawn", asked, call, "the agent was started"))
        if self._settings.dashboard.port:
            shown["dashboardUrl"] = self._settings.dashboard_url
        return shown

    def list_agents(self, asked: ListAgents, call: str) -> dict[str, Any]:
        """Return the participants that have not stopped, sorted by name.

        They include agents that joined by themselves and were not started by `spawn_agent`. `left` is the
        number of further ones, which do not fit into the answer. `call` is not used.

        Raises:
            BackboneUnreachable: The gateway did not answer.
        """
        with GatewayClient(self._settings) as gateway:
            found = gateway.get(path_of("participants"))
        return {"agents": [_shown(row) for row in found["participants"]], "left": found["left"]}

    def stop_agent(self, asked: StopAgent, call: str) -> dict[str, Any]:
        """Stop an agent and return its state. An agent that has stopped already is left as it is.

        `call` is not used.

        Raises:
            NotFound: No agent has this name.
            BackboneUnreachable: The gateway did not answer. The call can be repeated.
        """
        with GatewayClient(self._settings) as gateway:
            return _shown(gateway.post(path_of("participants", asked.agent_id, "stop")))

    def send_message(self, asked: SendMessage, call: str) -> dict[str, Any]:
        """Send a text as the operator to the mailbox `asked.target_agent_id`, and return the message's id.

        `call` is the id of the MCP request, for an idempotency key if `asked` has none. Two calls with the same
        key send one message.

        Raises:
            NotFound: There is no mailbox of this name.
            BackboneUnreachable: The gateway did not answer. The error names the key with which to try again.
        """
        body = {
            "recipient": asked.target_agent_id,
            "type": "message",
            "payload": {"text": asked.message},
            **asked.model_dump(include={"priority", "expires_in_s", "deliver_after_s"}),
        }
        sent = self._post_once(path_of("messages"), body, "send", asked, call, "the message was sent")
        return {"messageId": sent["message_id"]}

    def get_messages(self, asked: GetMessages, call: str) -> dict[str, Any]:
        """Return messages of the operator's mailbox, oldest first, without marking them as read.

        They are the newest `asked.limit` messages or, with `unread_only`, the oldest unread ones. `total` is
        the number of all such messages, and `left` that of those that did not fit into the answer. `call` is
        not used.

        Raises:
            BackboneUnreachable: The gateway did not answer.
        """
        wanted = {"limit": asked.limit, "pending": "true" if asked.unread_only else None}
        with GatewayClient(self._settings) as gateway:
            found = gateway.get(path_of("mailboxes", DEFAULT_REALM, OPERATOR), wanted)
        shown = [_message_shown(row) for row in found["messages"]]
        return {"messages": shown, "total": found["total"], "left": found["left"]}

    def mark_messages_read(self, asked: MarkMessagesRead, call: str) -> dict[str, Any]:
        """Mark messages of the operator's mailbox as read, and return three lists of their ids.

        `read`: read now, by this call or an earlier one. `notMarked`: leased, or ended in another way.
        `unknown`: not in the mailbox. `call` is not used.

        Raises:
            BackboneUnreachable: The gateway did not answer. The call can be repeated.
        """
        with GatewayClient(self._settings) as gateway:
            marks = gateway.post(path_of("messages", "read"), {"message_ids": asked.message_ids})
        return {"read": marks["read"], "notMarked": marks["not_marked"], "unknown": marks["unknown"]}

    def _post_once(
        self, path: str, body: dict[str, Any], verb: str, asked: SpawnAgent | SendMessage, call: str, done: str
    ) -> Any:
        """Post with an idempotency key, and name the key in the error of a gateway that does not answer."""
        key = asked.idempotency_key or str(uuid.uuid5(self._own, call))
        try:
            # A client for each call, so that a token that was made meanwhile counts.
            with GatewayClient(self._settings) as gateway:
                return gateway.post(path, body, request_id=f"{verb}/{key}")
        except BackboneUnreachable as error:
            again = f"try again with idempotencyKey {key}: if {done}, it is the same"
            raise BackboneUnreachable(f"{error}; {again}") from None


ARGUMENTS: Final = tools_by_name(SpawnAgent, ListAgents, StopAgent, SendMessage, GetMessages, MarkMessagesRead)
TOOLS: Final = described_tools(
    ARGUMENTS,
    only_reads=("list_agents", "get_messages"),
    idempotent=ARGUMENTS.keys() - {"spawn_agent", "send_message"},
    destroys=("stop_agent",),
)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a participant with the field names of the agents' own tools."""
    found = {
        "agentId": row["id"],
        "task": row["task"],
        "status": row["status"],
        "capabilities": row["capabilities"],
        "startedAt": _milliseconds(row["started_at"]),
    }
    if row["stopped_at"] is not None:
        found |= {"stoppedAt": _milliseconds(row["stopped_at"]), "stoppedWhy": row["stopped_why"]}
    return found


def _message_shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the fields of AM-05, its kind and its status."""
    body = row["body"]
    return {
        "id": row["message_id"],
        "from": row["sender"],
        "to": row["recipient"],
        "kind": row["kind"],
        "content": None if body is None else shown_text(body, row["content_type"])[0],
        "timestamp": _milliseconds(row["posted_at"]),
        "status": row["status"],
        "read": row["status"] not in MESSAGE_PENDING,
        "priority": row["priority"],
    }


def _milliseconds(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)
