"""A broadcast of a large message to many recipients has few copies of it in memory at once (LM-13)."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

from connectors.hub.live.settled_feed import SettledRecord
from connectors.operations.rules.hub_policy import post_to_all
from schemas.streams.mailboxes.message import verified_message
from schemas.wire.record import JSON_CONTENT, OutgoingRecord, Position
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from trunkline_agent.wire.strict_json import canonical

_MIB = 1024 * 1024
RECIPIENTS = 200


class _Hub(FoldedHub):
    """A hub whose log stores nothing."""

    async def settle(self, outgoing: OutgoingRecord) -> SettledRecord:
        """Settle a record a moment later, without an effect."""
        await asyncio.sleep(0.001)
        fields: dict[str, Any] = dict.fromkeys(SettledRecord.__struct_fields__)
        said = {"position": Position(0, 0), "stream": outgoing.stream, "verdict": "accepted", "logged_at_us": 0}
        return SettledRecord(**{**fields, **said, "value": outgoing.value})


@pytest.mark.requirement("LM-13")
def test_a_broadcast_to_many_has_few_copies_of_its_message_in_memory() -> None:
    hub: Any = _Hub()
    payload = "x" * _MIB

    async def broadcast() -> int:
        text = canonical(payload).decode()
        messages = [
            verified_message(f"m{n}", "ann", f"bo-{n}", "note", text, JSON_CONTENT, broadcast_id="b1")
            for n in range(RECIPIENTS)
        ]
        tracemalloc.reset_peak()
        verdicts, _ = await post_to_all(hub, messages, {"door": "http", "principal": "ann"})
        return len(verdicts)

    tracemalloc.start()
    try:
        count = asyncio.run(broadcast())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == RECIPIENTS
    assert peak < 100 * _MIB, "200 copies have 200 MiB"
