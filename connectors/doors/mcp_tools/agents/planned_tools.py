"""Tools as two functions around records of the log: `plan` and `answer` (decision 0055).

`DirectCalls` carries out a usual call of these tools at once, and `PlannedTool.serve` all others. Tools that
are operations of the hub are in `operation_tools.py`.

**Delivers** a message once for each idempotency key. **Acknowledges when** the records of a call are in the log
and settled. **Loses when** never silently: a call that ended in an error may or may not have had its effect.
Repeated with the same idempotency key, it has its effect once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from connectors.doors.mcp_tools.agents.mcp_tool import ToolArguments
from connectors.doors.mcp_tools.agents.signed_requests import DOOR
from connectors.hub.engine.operation import Answer, Asked, Planned, Unusual
from connectors.hub.engine.operation_routes import carried_out
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.serving.answers import refuse_rejected
from connectors.hub.serving.identities import Origin
from connectors.hub.serving.policy import Caller
from schemas.streams.agents.participants import AgentUpdated
from schemas.streams.principal.principals import AGENT
from schemas.wire.record import OutgoingRecord


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
