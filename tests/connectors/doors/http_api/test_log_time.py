"""Requests at a gateway whose clock is not the log's: leases and tokens end by the log's time (ST-85)."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from connectors.doors.mcp_tools.agents.tool_arguments import AckMessages, LeaseMessages, SendToAgent
from connectors.hub.live.settled_feed import SettledRecord
from connectors.hub.services.mailboxes import token_mailbox
from connectors.operations.rules.hub_policy import is_known_recipient, tokens_at_us
from schemas.settings.sections import GatewaySettings
from schemas.streams.task.task_registry import TokenRow
from schemas.wire.record import OutgoingRecord
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.connectors.doors.mcp_tools.test_blob_tools import public_key

pytestmark = pytest.mark.requirement("ST-85")

AHEAD_US = 600_000_000


class HubBehind(FoldedHub):
    """A hub whose log is ten minutes behind this machine's clock, and that knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_us = time.time_ns() // 1000 - AHEAD_US
        self.records = 0
        for agent in ("ann", "bo"):
            self.join(agent, public_key())

    def add(self, outgoing: OutgoingRecord) -> SettledRecord:
        """Settle a record, and compare the clocks."""
        self.records += 1
        self.log_clock.ask(outgoing.ce_id)
        settled = super().add(outgoing)
        self.log_clock.settled([settled])
        return settled


def test_a_message_that_is_leased_by_the_logs_time_is_not_asked_for_again_and_again() -> None:
    async def talk() -> None:
        hub = HubBehind()
        await hub.tools.send_to_agent("bo", SendToAgent(targetAgentId="ann", message="x"))
        leased = await hub.tools.lease_messages("ann", LeaseMessages(leaseSeconds=60))
        assert len(leased["messages"]) == 1
        before = hub.records
        empty = await hub.tools.lease_messages("ann", LeaseMessages(leaseSeconds=60))
        assert (empty["messages"], empty["left"], hub.records) == ([], 0, before)
        ids = [leased["messages"][0]["id"]]
        acked = await hub.tools.ack_messages("ann", AckMessages(leaseId=leased["leaseId"], messageIds=ids))
        assert acked["done"] == ids

    asyncio.run(talk())


def test_the_mailbox_of_a_token_ends_with_the_token_by_the_logs_time() -> None:
    hub: Any = HubBehind()
    hub.settings = hub.settings.model_copy(update={"gateway": GatewaySettings(mailbox_per_token=True)})
    now_ms = hub.now_us // 1000
    rows = {
        name: TokenRow(name * 12, "0" * 64, "bo", "t1", [], "active", now_ms, now_ms + left_ms, None, None)
        for name, left_ms in (("a", 60_000), ("b", -60_000))
    }
    hub.get = lambda row_type, key: {one.token_id: one for one in rows.values()}.get(key)
    known = [
        is_known_recipient(cast("Any", hub), token_mailbox("bo", one.token_id), tokens_at_us=tokens_at_us(hub))
        for one in rows.values()
    ]
    assert known == [True, False]
