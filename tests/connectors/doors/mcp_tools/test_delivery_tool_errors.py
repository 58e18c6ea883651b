"""Wrong calls of the MCP tools that wait, lease and ask (DL-09): each has a reason, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.connectors.doors.mcp_tools.conftest import McpGateway
from tests.connectors.doors.mcp_tools.delivery_calls import ids
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller, call_body

pytestmark = pytest.mark.requirement("DL-09")

NewCaller = Callable[[str], SignedCaller]

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
