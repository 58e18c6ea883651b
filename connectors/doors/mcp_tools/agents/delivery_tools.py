"""The functions behind the MCP tools that wait, lease and ask (DL-09).

**Delivers** as the routes of the hub do, see `connectors.operations.messages.deliveries`. **Acknowledges when**
a change is in the log and settled. **Loses** nothing: a call that ended in an error can be repeated with the
same idempotency key, and gets the same messages or the same reply.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from connectors.doors.mcp_tools.agents.agent_tools import (
    AgentTools,
    answer_bytes,
    message_as_json,
    within_event,
)
from connectors.doors.mcp_tools.agents.operation_tools import PlannedTool, SendTool, ToolCall
from connectors.doors.mcp_tools.agents.signed_requests import DOOR, IS_GONE
from connectors.doors.mcp_tools.agents.tool_arguments import WaitForMessages
from connectors.hub.engine.operation import SMALL_BYTES, Answer, Asked, Unusual
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.hub import Hub
from connectors.hub.services.mailbox_waits import Mailbox
from connectors.hub.serving.answers import refuse_rejected, unavailable
from connectors.hub.serving.identities import Origin, request_uuid
from connectors.operations.messages.deliveries import (
    Taken,
    Taking,
    take_messages,
    taken_by,
    taking_record,
    wait_reply,
)
from connectors.operations.messages.shown_messages import answer_bytes_of
from schemas.streams.mailboxes.message import DEFAULT_REALM
from schemas.wire.record import OutgoingRecord


class DeliveryTools:
    """The functions of these tools: one method for each tool, with the tool's name; see `AgentTools`."""

    def __init__(self, hub: Hub, tools: AgentTools) -> None:
        self._hub = hub
        self._tools = tools
        self._send = SendTool(hub)
        self.planned: dict[str, PlannedTool] = {"lease_messages": TakeTool(hub)}

    async def wait_for_messages(self, agent: str, asked: WaitForMessages) -> dict[str, Any]:
        """Return the unread messages of the agent's mailbox, as `get_my_messages` does, once there is one.

        Messages that a reader has leased do not count. The result has no messages if there was none within
        `asked.timeout_seconds`. Raises ApiError (503) if the gateway stops.
        """
        deadline = time.monotonic() + asked.timeout_seconds
        with self._hub.mailbox_waits.waiting(_own(agent), is_taker=False) as wait:
            while True:
                wait.clear()
                found = await self._tools.free_messages(agent, asked.limit, asked.since)
                left = deadline - time.monotonic()
                if found["messages"] or left <= 0:
                    return found
                self._hub.answer_memory.release()
                if not await wait.wait(left):
                    return found
                if self._hub.stopping.is_set():
                    raise unavailable("the gateway stops; ask another one")

    async def ask_agent(self, agent: str, asked: Any) -> dict[str, Any]:
        """Send a message as `send_to_agent` does, and wait for the reply, which is taken out of the mailbox.

        The result is that of `send_to_agent` with `reply`, which is null if none came in time. Raises as
        `send_to_agent` does, and ApiError (503) if the gateway stops.
        """
        with self._hub.mailbox_waits.waiting(_own(agent), is_taker=False) as wait:
            sent = await self._send.serve(agent, asked)
            row = await wait_reply(
                self._hub,
                wait,
                sent["messageId"],
                asked.recipient,
                asked.timeout_seconds,
                _by(agent),
                IS_GONE.get(),
            )
        reply = None if row is None else within_event([message_as_json(self._hub, row)])[0]
        return {**sent, "reply": reply}


class TakeTool(PlannedTool):
    """`lease_messages`: lease messages of the agent's mailbox, and return them with the id of the lease.

    Each message has `attempt`, how often it was handed out by now, and `deadline`, the end of the lease in
    milliseconds since 1970 UTC. Without a message within `timeout_seconds`, `leaseId` is null. The same
    idempotency key gets the same messages, while they are leased. `left` is the number of messages that still
    wait, for example because they do not fit into one answer.

    A call that may wait, may be repeated or has a long answer is unusual.
    """

    def is_usual(self, asked: Asked) -> bool:
        """Return whether few messages are there, and the call neither waits for others nor has a key."""
        if asked.body.timeout_seconds or asked.key is not None:
            return False
        taking = _taking(self.hub, asked)
        mailbox = taking.mailboxes[0]
        return (
            self.hub.mailboxes.ready(mailbox, self.hub.log_clock.now_us()) > 0
            and 2 * answer_bytes_of(self.hub, mailbox, taking.limit, taking.bytes_most) <= SMALL_BYTES
        )

    async def serve(self, agent: str, asked: Any) -> dict[str, Any]:
        """Lease messages, after a wait for the first one if the call wants it.

        Raises ApiError: 409 for an idempotency key that was used for another lease, 503 if the gateway stops.
        """
        taking = _taking(self.hub, ToolCall(agent, asked))
        return _taken_as_json(self.hub, taking, await take_messages(self.hub, taking))

    def plan(self, asked: Asked) -> Sequence[OutgoingRecord]:
        """Return the record of the lease, if a message waits."""
        taking = _taking(self.hub, asked)
        mailbox = taking.mailboxes[0]
        if not self.hub.mailboxes.ready(mailbox, self.hub.log_clock.now_us()):
            raise Unusual
        asked.known = taking, mailbox, taking.request_id(0)
        return (taking_record(self.hub, *asked.known),)

    def answer(self, asked: Asked, settled: Sequence[SettledRecord]) -> Answer:
        """Return the messages that the log gave to this call."""
        refuse_rejected(settled[0])
        taken, is_lost = taken_by(self.hub, *asked.known)
        if is_lost:
            raise Unusual  # other readers were faster
        return Answer(_taken_as_json(self.hub, asked.known[0], taken))


def _taking(hub: Hub, asked: Asked) -> Taking:
    key = None if asked.key is None else f"lease/{asked.key}"
    return Taking(
        mailboxes=_own(asked.caller.principal),
        origin=asked.origin,
        made=request_uuid(f"{DOOR}/{asked.caller.principal}", key),
        is_repeatable=key is not None,
        limit=asked.body.limit,
        bytes_most=answer_bytes(hub),
        lease_s=asked.body.lease,
        wait_s=asked.body.timeout_seconds,
    )


def _taken_as_json(hub: Hub, taking: Taking, taken: Taken) -> dict[str, Any]:
    shown = [
        {**message_as_json(hub, row), "attempt": row.attempts, "deadline": (row.lease_until or 0) // 1000}
        for row in taken.rows
    ]
    left = hub.mailboxes.ready(taking.mailboxes[0], hub.log_clock.now_us())
    return {"messages": within_event(shown), "leaseId": taken.request_id, "left": left}


def _own(agent: str) -> tuple[Mailbox, ...]:
    return ((DEFAULT_REALM, agent),)


def _by(agent: str) -> Origin:
    return {"door": DOOR, "principal": agent}
