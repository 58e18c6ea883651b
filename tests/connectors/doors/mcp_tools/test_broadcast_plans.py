"""A broadcast to few is planned at once, and one to many is sent message by message: with the same result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from connectors.doors.mcp_tools.agents.operation_tools import BroadcastTool, ToolCall
from connectors.doors.mcp_tools.agents.tool_arguments import BroadcastMessage
from connectors.hub.engine.operation import Unusual
from connectors.operations.topics import broadcast_operations
from schemas.streams.mailboxes.message import MessageRow
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.schemas.hub_records import public_key

pytestmark = pytest.mark.requirement("ST-96")

FEW = broadcast_operations._AT_ONCE
KEY = public_key()


def hub_of(agents: int) -> FoldedHub:
    """A hub in memory in which so many agents take part."""
    hub = FoldedHub()
    for number in range(agents):
        hub.join(f"agent-{number}", KEY)
    return hub


def call_of(text: str, **more: Any) -> ToolCall:
    """A call by the first agent."""
    return ToolCall("agent-0", BroadcastMessage.model_validate({"message": text, **more}))


@pytest.mark.parametrize(
    ("agents", "text", "more"),
    [(FEW + 1, "x", {}), (FEW, "x" * 3000, {}), (2, "x", {"blob": "0" * 64})],
    ids=["many", "long", "blob"],
)
def test_a_broadcast_to_many_or_of_much_is_unusual_and_counts_nothing_yet(
    agents: int, text: str, more: dict[str, Any]
) -> None:
    hub: Any = hub_of(agents)
    hub.limit("agent-0", messages_per_minute=1)
    tool = BroadcastTool(hub)
    for _ in range(3):
        with pytest.raises(Unusual):
            tool.plan(call_of(text, **more))
    assert not hub.under_way.mailboxes
    assert hub.refused == []


@pytest.mark.parametrize("agents", [FEW, FEW + 1])
def test_few_and_many_recipients_have_the_same_result(agents: int) -> None:
    hub: Any = hub_of(agents)
    hub.limit("agent-1", pending_most=0)
    tool, asked = BroadcastTool(hub), call_of("x", idempotencyKey="k", priority="high").body
    found = [asyncio.run(tool.serve("agent-0", asked)) for _ in range(2)]
    assert found[0] == found[1]
    # To all others and the operator.
    assert (found[0]["recipientCount"], found[0]["full"]) == (agents - 1, 1)
    rows = [row for row in hub.live(MessageRow) if row.broadcast_id == found[0]["messageId"]]
    assert {row.recipient for row in rows} == {"operator", *(f"agent-{n}" for n in range(2, agents))}
    assert {(row.sender, row.priority) for row in rows} == {("agent-0", "high")}
    assert not hub.under_way.mailboxes


def test_a_broadcast_takes_one_place_of_its_sender() -> None:
    hub: Any = hub_of(FEW)
    tool, call = BroadcastTool(hub), call_of("x")
    assert len(tool.plan(call)) == FEW
    assert tool.IS_BOUNDED
    assert len(hub.under_way.mailboxes) == FEW
    tool.ended(call)
    assert not hub.under_way.mailboxes
