"""The functions behind the MCP tools that wait, lease and ask (DL-09).

**Delivers** as the routes of the hub do, see `connectors.gateway.messages.deliveries`. **Acknowledges when** a
change is in the log and settled. **Loses** nothing: a call that ended in an error can be repeated with the same
idempotency key, and gets the same messages or the same reply.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from connectors.agent_mcp.agent_tools import AgentTools, answer_bytes, message_as_json, within_event
from connectors.agent_mcp.signed_requests import DOOR, IS_GONE
from connectors.agent_mcp.tool_arguments import (
    AckMessages,
    AskAgent,
    ExtendLease,
    LeaseMessages,
    NackMessage,
    WaitForMessages,
)
from connectors.gateway.messages.deliveries import LeaseEnds, Taking, change_leases, take_messages
from connectors.gateway.messages.replies import wait_reply
from connectors.gateway.services.hub import Hub
from connectors.gateway.services.mailboxes import Mailbox
from connectors.gateway.web.answers import unavailable
from connectors.gateway.web.idempotency import Origin, request_uuid
from schemas.streams.mailboxes.mailbox_requests import ack_record, extension_record, nack_record
from schemas.streams.mailboxes.message import DEFAULT_REALM


class DeliveryTools:
    """The functions of these tools: one method for each tool, with the tool's name; see `AgentTools`."""

    def __init__(self, hub: Hub, tools: AgentTools) -> None:
        self._hub = hub
        self._tools = tools

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

    async def lease_messages(self, agent: str, asked: LeaseMessages) -> dict[str, Any]:
        """Lease messages of the agent's mailbox, and return them with the id of the lease.

        Each message has `attempt`, how often it was handed out by now, and `deadline`, the end of the lease in
        milliseconds since 1970 UTC. Without a message within `asked.timeout_seconds`, `leaseId` is null. The
        same idempotency key gets the same messages, while they are leased. `left` is the number of messages
        that still wait, for example because they do not fit into one answer.

        Raises:
            ApiError: 409 for an idempotency key that was used for another lease, 503 if the gateway stops.
            BackboneUnreachable: Kafka is unreachable, or the lease was not settled in time.
        """
        key = None if asked.idempotency_key is None else f"lease/{asked.idempotency_key}"
        taking = Taking(
            mailboxes=_own(agent),
            origin=_by(agent),
            made=request_uuid(f"{DOOR}/{agent}", key),
            is_repeatable=key is not None,
            limit=asked.limit,
            bytes_most=answer_bytes(self._hub),
            lease_s=asked.lease_seconds,
            wait_s=asked.timeout_seconds,
        )
        taken = await take_messages(self._hub, taking)
        shown = [
            {
                **message_as_json(self._hub, row),
                "attempt": row.attempts,
                "deadline": (row.lease_until or 0) // 1000,
            }
            for row in taken.rows
        ]
        left = self._hub.mailboxes.ready(taking.mailboxes[0], self._hub.log_clock.now_us())
        return {"messages": within_event(shown), "leaseId": taken.request_id, "left": left}

    async def ack_messages(self, agent: str, asked: AckMessages) -> dict[str, Any]:
        """Acknowledge leased messages. `done` lists those that are final now, `refused` the others.

        Raises BackboneUnreachable if Kafka is unreachable, or an ack was not settled in time.
        """
        ends = await change_leases(
            self._hub,
            _own(agent),
            asked.message_ids,
            lambda mailbox, one: ack_record(*mailbox, one, asked.lease_id, **_by(agent)),
        )
        return _shown(ends)

    async def nack_message(self, agent: str, asked: NackMessage) -> dict[str, Any]:
        """Give a leased message back with a reason. It is in `done`, or in `refused` if the lease is over.

        Raises BackboneUnreachable if Kafka is unreachable, or the nack was not settled in time.
        """
        ends = await change_leases(
            self._hub,
            _own(agent),
            [asked.message_id],
            lambda mailbox, one: nack_record(*mailbox, one, asked.lease_id, asked.reason, **_by(agent)),
        )
        return _shown(ends)

    async def extend_lease(self, agent: str, asked: ExtendLease) -> dict[str, Any]:
        """Set a new end for the lease of messages. They are in `done`, or in `refused` if the lease is over.

        Raises BackboneUnreachable if Kafka is unreachable, or an extension was not settled in time.
        """
        made = request_uuid(f"{DOOR}/{agent}", asked.idempotency_key)
        ends = await change_leases(
            self._hub,
            _own(agent),
            asked.message_ids,
            lambda mailbox, one: extension_record(
                *mailbox,
                one,
                asked.lease_id,
                asked.lease_seconds * 1000,
                ce_id=str(uuid.uuid5(made, one)),
                **_by(agent),
            ),
        )
        return _shown(ends)

    async def ask_agent(self, agent: str, asked: AskAgent) -> dict[str, Any]:
        """Send a message as `send_to_agent` does, and wait for the reply, which is taken out of the mailbox.

        The result is that of `send_to_agent` with `reply`, which is null if none came in time. Raises as
        `send_to_agent` does, and ApiError (503) if the gateway stops.
        """
        with self._hub.mailbox_waits.waiting(_own(agent), is_taker=False) as wait:
            sent = await self._tools.send_to_agent(agent, asked)
            row = await wait_reply(
                self._hub,
                wait,
                sent["messageId"],
                asked.target_agent_id,
                asked.timeout_seconds,
                _by(agent),
                IS_GONE.get(),
            )
        reply = None if row is None else within_event([message_as_json(self._hub, row)])[0]
        return {**sent, "reply": reply}


def _own(agent: str) -> tuple[Mailbox, ...]:
    return ((DEFAULT_REALM, agent),)


def _by(agent: str) -> Origin:
    return {"door": DOOR, "principal": agent}


def _shown(ends: LeaseEnds) -> dict[str, Any]:
    refused = [{"id": one, "reason": reason, "message": why} for one, (reason, why) in ends.refused.items()]
    return {"done": ends.done, "refused": refused}
