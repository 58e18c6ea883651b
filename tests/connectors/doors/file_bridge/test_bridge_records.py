"""Records of lines, and lines of messages: expiry, priority and claims (LM-08, DL-21)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from connectors.doors.file_bridge.records import claims_of, claims_of_ids, line_of, posting_of
from trunkline_agent.queue.message_record import parse_line, to_line

LINE: dict[str, Any] = {
    "msg_id": "m1",
    "ts": "2026-11-01T10:00:00.000000Z",
    "from": "ann",
    "to": "bo",
    "topic": "ask",
    "body": "x",
    "in_reply_to": None,
    "ttl_s": None,
}
SENT: dict[str, Any] = {"message_id": "m1", "from": "ann", "to": "bo", "kind": "ask", "body": "x"}
LOGGED = "2026-11-01T10:00:00.500000Z"


@pytest.mark.requirement("FQ-15")
@pytest.mark.requirement("DL-21")
def test_a_line_gives_its_mailbox_priority_expiry_and_limits() -> None:
    line = {**LINE, "priority": "high", "ttl_s": 90}
    posted = orjson.loads(posting_of(line, "default", "bo", {"pending_most": 5, "bytes_most": None}).value)
    shown = {name: posted.get(name) for name in ("priority", "expires_at", "pending_most", "bytes_most")}
    assert shown == {
        "priority": "high",
        "expires_at": "2026-11-01T10:01:30.000000Z",
        "pending_most": 5,
        "bytes_most": None,
    }
    plain = orjson.loads(posting_of(LINE, "default", "bo").value)
    assert plain["priority"] == "normal" and not {"expires_at", "pending_most"} & plain.keys()


@pytest.mark.requirement("FQ-17")
@pytest.mark.requirement("DL-21")
@pytest.mark.parametrize(
    ("changed", "ttl_s"),
    [
        ({}, None),
        ({"expires_in_ms": 60_000}, 60.0),
        ({"expires_in_ms": 60_000, "sent_at": "2026-11-01T10:00:00Z"}, 60.5),
        ({"expires_at": "2026-11-01T10:00:10.500000Z"}, 10.0),
        ({"expires_at": "2026-11-01T09:00:00Z"}, 0.0),
    ],
)
def test_a_message_of_another_door_has_its_expiry_and_priority_in_the_file(
    changed: dict[str, Any], ttl_s: float | None
) -> None:
    line = line_of({**SENT, "priority": "low", **changed}, LOGGED)
    assert (line["ttl_s"], line["priority"]) == (ttl_s, "low")
    assert parse_line(to_line(line)[:-1]) == line
    assert "priority" not in line_of({**SENT, "priority": "normal", **changed}, LOGGED)


@pytest.mark.requirement("FQ-16")
def test_the_claims_of_a_poll_are_always_the_same_and_later_ones_are_others() -> None:
    poll = {"session": "default", "agent_id": "bo", "ts": LOGGED, "msg_ids": ["m1", "m2"]}
    first, again = ([one.ce_id for one in claims_of(poll)] for _ in range(2))
    assert first == again
    later = [one.ce_id for one in claims_of_ids("default", "bo", ["m1", "m2"], "posted later")]
    assert later != first and len(later) == 1
    assert list(claims_of_ids("default", "bo", [], "posted later")) == []
