"""Wrong calls of the MCP tools that wait, lease and ask (DL-09): each has a reason, and nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.connectors.doors.mcp_tools.conftest import McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import ids
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body, now
from tests.connectors.doors.mcp_tools.test_agent_mcp_replays import is_replay

pytestmark = pytest.mark.requirement("DL-09")

NewCaller = Callable[[str], SignedCaller]
BAD_NAMES = ("", "a b", "a/b", "../x", "<b>", "\u202ebo", "a" * 300, "m\n", "ж", 7, None, ["m"], {})
BAD_TIMES = (-1, 240.5, 1e9, "5", True, None, [1], {})
BAD_LIMITS = (0, -1, 1.5, 2.0, "5", True, None)
LEASE = {"leaseId": "l1", "messageIds": ["m1"]}
NACK = {"leaseId": "l1", "messageId": "m1"}
ASK = {"targetAgentId": "operator", "message": "x"}
BAD_KEYS = ("", "two words", "ключ", "k" * 256, 7, ["k"])

WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("wait_for_messages", {"timeoutSeconds": one}) for one in BAD_TIMES),
    *(("wait_for_messages", {"limit": one}) for one in (*BAD_LIMITS, 1001)),
    *(("wait_for_messages", {"since": one}) for one in (-1, 1.5, "now", True)),
    ("wait_for_messages", {"agent": "operator"}),
    ("wait_for_messages", {"timeout_seconds": 1}),
    ("wait_for_messages", {"idempotencyKey": "k"}),
    *(("lease_messages", {"timeoutSeconds": one}) for one in BAD_TIMES),
    *(("lease_messages", {"limit": one}) for one in (*BAD_LIMITS, 101)),
    *(("lease_messages", {"leaseSeconds": one}) for one in (*BAD_LIMITS, 86_401)),
    *(("lease_messages", {"idempotencyKey": one}) for one in BAD_KEYS),
    ("lease_messages", {"mailbox": "operator"}),
    *(("ack_messages", {**LEASE, "leaseId": one}) for one in BAD_NAMES),
    *(("ack_messages", {**LEASE, "messageIds": [one]}) for one in BAD_NAMES),
    *(("ack_messages", {**LEASE, "messageIds": one}) for one in ([], ["m"] * 1001, "m1", None, {"m1": 1})),
    ("ack_messages", {}),
    ("ack_messages", {"leaseId": "l1"}),
    ("ack_messages", {"messageIds": ["m1"]}),
    ("ack_messages", {**LEASE, "leaseSeconds": 5}),
    *(("nack_message", {**NACK, "leaseId": one}) for one in BAD_NAMES),
    *(("nack_message", {**NACK, "messageId": one}) for one in BAD_NAMES),
    *(("nack_message", {**NACK, "reason": one}) for one in ("x" * 501, "bell \a", "nul \0", 7, None)),
    ("nack_message", {}),
    ("nack_message", LEASE),
    *(("extend_lease", {**LEASE, "leaseId": one}) for one in BAD_NAMES),
    *(("extend_lease", {**LEASE, "messageIds": [one]}) for one in BAD_NAMES),
    *(("extend_lease", {**LEASE, "leaseSeconds": one}) for one in (*BAD_LIMITS, 86_401)),
    *(("extend_lease", {**LEASE, "idempotencyKey": one}) for one in BAD_KEYS),
    ("extend_lease", {"leaseSeconds": 5}),
    *(("ask_agent", {**ASK, "targetAgentId": one}) for one in BAD_NAMES),
    *(("ask_agent", {**ASK, "timeoutSeconds": one}) for one in BAD_TIMES),
    *(("ask_agent", {**ASK, "idempotencyKey": one}) for one in BAD_KEYS),
    *(
        ("ask_agent", {**ASK, field: one})
        for field in ("inReplyTo", "thread")
        for one in BAD_NAMES
        if one is not None
    ),
    *(("send_to_agent", {**ASK, field: one}) for field in ("inReplyTo", "thread") for one in ("", "a/b", 7)),
    ("ask_agent", {**ASK, "message": ""}),
    ("ask_agent", {"message": "x"}),
    ("ask_agent", {**ASK, "ttlSeconds": -1}),
    ("ask_agent", {**ASK, "replyTo": "operator"}),
]
# Arguments that JSON parsers read differently, or not at all.
NOT_JSON = (
    '{"timeoutSeconds": NaN}',
    '{"timeoutSeconds": Infinity}',
    '{"timeoutSeconds": -Infinity}',
    '{"timeoutSeconds": 1, "timeoutSeconds": 2}',
    '{"timeoutSeconds": 1e}',
    '{"timeoutSeconds"',
)


def state(shared_gateway: McpGateway, *callers: SignedCaller) -> list[Any]:
    """The mailboxes of some agents, and the operator's."""
    with shared_gateway.client() as operator:
        names = ["operator", *(caller.name for caller in callers)]
        return [operator.get(f"/api/hub/mailboxes/default/{name}").json() for name in names]


def test_a_wrong_call_is_refused_with_the_field_and_changes_nothing(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann = new_caller("ann")
    ann.call("send_to_agent", targetAgentId=ann.name, message="x")
    before = state(shared_gateway, ann)
    for tool, arguments in WRONG:
        found = ann.error(tool, **arguments)
        assert found["reason"] == "malformed", (tool, arguments, found)
        assert found["message"], (tool, arguments)
        assert not any(sign in found["message"] for sign in ("<b>", "\u202e", "\n", "\a")), found
    assert ann.error("lease_messages", timeoutSeconds=-1)["message"].startswith("timeoutSeconds")
    assert state(shared_gateway, ann) == before


def test_arguments_that_are_no_json_or_beyond_all_numbers_are_refused(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann = new_caller("ann")
    before = state(shared_gateway, ann)
    for tool in ("wait_for_messages", "lease_messages", "ask_agent"):
        for arguments in NOT_JSON:
            body = call_body(tool).replace(b"{}", arguments.encode())
            answer = ann.post(body)
            assert (answer.status_code, answer.json()["reason"]) == (400, "malformed"), arguments
        answer = ann.post(call_body(tool).replace(b"{}", b'{"timeoutSeconds": 1e999}'))
        assert "malformed" in answer.text, answer.text
    assert state(shared_gateway, ann) == before


def test_a_message_that_is_too_long_or_for_nobody_is_not_asked(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann = new_caller("ann")
    before = state(shared_gateway, ann)
    too_long = "x" * (shared_gateway.settings.limits.payload_bytes + 1)
    asked = {"targetAgentId": "operator", "message": too_long, "timeoutSeconds": 20}
    assert ann.error("ask_agent", **asked)["reason"] == "too_large"
    asked = {"targetAgentId": "nobody-of-this-name", "message": "x", "timeoutSeconds": 20}
    assert ann.error("ask_agent", **asked)["reason"] == "unknown_recipient"
    assert state(shared_gateway, ann) == before


def test_messages_that_do_not_fit_into_one_answer_are_leased_by_the_next_call(new_caller: NewCaller) -> None:
    ann = new_caller("ann")
    for number in range(6):
        ann.call("send_to_agent", targetAgentId=ann.name, message=f"{number}" * 1024 * 1024)
    lease = ann.call("lease_messages", idempotencyKey="l1")
    assert [one["content"][0] for one in lease["messages"]] == ["0", "1", "2", "3"]
    assert ann.call("lease_messages", idempotencyKey="l1") == lease
    rest = ann.call("lease_messages")
    assert [(one["content"][0], one["attempt"]) for one in rest["messages"]] == [("4", 1), ("5", 1)]
    done = ann.call("ack_messages", leaseId=lease["leaseId"], messageIds=ids(lease))["done"]
    assert done == ids(lease)


def test_an_agent_ends_no_lease_of_another_and_takes_none_of_its_messages(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")
    message_id = ann.call("send_to_agent", targetAgentId=ann.name, message="ann's")["messageId"]
    lease = ann.call("lease_messages", idempotencyKey="k1")
    before = state(shared_gateway, ann, bo)
    ends = {"leaseId": lease["leaseId"], "messageIds": [message_id]}
    for caller, given, reason in (
        (bo, ends, "unknown_stream"),
        (ann, {**ends, "leaseId": "another"}, "illegal_transition"),
        (ann, {**ends, "messageIds": ["m-none"]}, "unknown_stream"),
    ):
        for tool in ("ack_messages", "extend_lease", "nack_message"):
            if tool == "nack_message":
                given = {"leaseId": given["leaseId"], "messageId": given["messageIds"][0]}
            found = caller.call(tool, **given)
            assert found["done"] == []
            assert [one["reason"] for one in found["refused"]] == [reason], (tool, given)
    # The keys of another agent are its own.
    assert bo.call("lease_messages", idempotencyKey="k1") == {"messages": [], "leaseId": None, "left": 0}
    assert ids(bo.call("wait_for_messages", timeoutSeconds=0)) == []
    assert state(shared_gateway, ann, bo) == before
    assert ann.call("ack_messages", **ends)["done"] == [message_id]


def test_a_forged_an_old_or_a_used_signature_changes_nothing(
    shared_gateway: McpGateway, new_caller: NewCaller
) -> None:
    ann, bo = new_caller("ann"), new_caller("bo")
    ids_ = [ann.call("send_to_agent", targetAgentId=ann.name, message=one)["messageId"] for one in "abc"]
    lease_id = ann.call("lease_messages", limit=2)["leaseId"]
    ends = {"leaseId": lease_id, "messageIds": ids_[:1]}
    calls: dict[str, dict[str, Any]] = {
        "wait_for_messages": {"timeoutSeconds": 0},
        "extend_lease": {**ends, "leaseSeconds": 600},
        "ack_messages": ends,
        "nack_message": {"leaseId": lease_id, "messageId": ids_[1]},
        "lease_messages": {"limit": 1},
        "ask_agent": {"targetAgentId": bo.name, "message": "?", "timeoutSeconds": 0},
    }
    before = state(shared_gateway, ann, bo)
    for tool, arguments in calls.items():
        body = call_body(tool, **arguments)
        signed = ann.headers(body)
        forged = bo.headers(body) | {"X-Agent-ID": ann.name}
        for headers in (forged, ann.headers(body + b" "), ann.headers(body, now(-301)), {}):
            assert ann.post(body, headers).status_code == 403, tool
        assert state(shared_gateway, ann, bo) == before, tool
        answer = ann.post(body, signed)
        assert not answer.json()["result"].get("isError"), answer.text
        after = state(shared_gateway, ann, bo)
        again = ann.post(body, signed)
        if tool == "wait_for_messages":
            # It changes nothing, so it may be repeated.
            assert json.loads(again.content)["result"] == answer.json()["result"]
        else:
            assert is_replay(again), tool
            assert after != before, tool
        assert state(shared_gateway, ann, bo) == after, tool
        before = after
