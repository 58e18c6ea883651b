"""Signed input of agents and operators: MCP requests, tool calls, keys in PEM, out-of-band commands."""

from __future__ import annotations

import base64
import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st
from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError

from connectors.doors.mcp_tools.agents.agent_keys import AgentKeys
from connectors.doors.mcp_tools.agents.operation_tools import ARGUMENTS, ONLY_READS
from connectors.doors.mcp_tools.agents.signed_requests import (
    DOOR,
    PRINCIPAL,
    SignedRequests,
    _called_tool,
    _decoded,
)
from connectors.doors.mcp_tools.agents.tool_arguments import WAITS
from connectors.doors.out_of_band.signed_commands import (
    AddListener,
    CommandKey,
    CommandRefused,
    HotReload,
    RemoveListener,
    command_bytes,
    read_command,
)
from connectors.hub.serving.answers import ApiError
from connectors.hub.serving.strict_request import HostNames
from schemas.streams.agents.agent_registry import AgentKeyRow
from schemas.streams.mailboxes.mailbox_bodies import MailboxLease
from schemas.streams.mailboxes.message import verified_message
from tests.connectors.doors.mcp_tools.folded_hub import FoldedHub
from tests.fuzz.fuzzing import awaited, changed_documents, fuzzed, mutated, mutated_json, mutated_text
from trunkline_agent.mcp import signing as agent_signing
from trunkline_agent.wire.signing import key_id_of

PRIVATE, PUBLIC = agent_signing.new_key_pair()
KEY = agent_signing.load_private_key(PRIVATE)


def _call(tool: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


GOOD_CALLS = (
    _call("discover_agents", status="idle"),
    _call("get_my_messages", limit=3, unreadOnly=True, since=0),
    _call("send_to_agent", targetAgentId="bo", message="hello", priority="high", idempotencyKey="k"),
    _call("broadcast_message", message="hello"),
    _call("mark_read", messageIds=["m1"]),
    _call("update_my_status", status="working", capabilities=["a"]),
    _call("wait_for_messages", timeoutSeconds=0, limit=3, since=0),
    _call("lease_messages", timeoutSeconds=0, limit=3, leaseSeconds=60, idempotencyKey="k"),
    _call("ack_messages", leaseId="l1", messageIds=["m1"]),
    _call("nack_message", leaseId="l1", messageId="m1", reason="no disk"),
    _call("extend_lease", leaseId="l1", messageIds=["m1"], leaseSeconds=60, idempotencyKey="k"),
    _call("ask_agent", targetAgentId="bo", message="hello", inReplyTo="m1", thread="t1", timeoutSeconds=0),
    _call("subscribe", topic="news", idempotencyKey="k"),
    _call("unsubscribe", topic="news", idempotencyKey="k"),
    _call("publish_message", topic="news", message="hello", ttlSeconds=60, thread="t1", idempotencyKey="k"),
    _call("list_topics", limit=3, after="a"),
    {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
)


class Door:
    """The check of signatures over a hub in memory; `let_in` is what came through, with its agent."""

    def __init__(self) -> None:
        self.hub: Any = FoldedHub()
        self.hub.join("ann", PUBLIC)
        keys = AgentKeys()
        keys.load([row for row in self.hub.rows("registry_keys") if isinstance(row, AgentKeyRow)])
        self.let_in: list[tuple[str, bytes]] = []
        self._app = SignedRequests(
            self._inner, self.hub, keys, ONLY_READS.__contains__, HostNames(["127.0.0.1"]), ["/mcp"]
        )

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        self.let_in.append((scope[PRINCIPAL], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def status(self, headers: list[tuple[bytes, bytes]], body: bytes) -> int:
        """Return the status of the door's answer to one request."""
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/mcp", "query_string": b"", "headers": headers}
        await self._app(scope, receive, send)
        return int(sent[0]["status"])


NAMES = (agent_signing.AGENT_HEADER, agent_signing.TIMESTAMP_HEADER, agent_signing.SIGNATURE_HEADER)
# Which part is spoiled, and how: an edit of that part, made when the case is run because the clock is in it.
SPOILS = st.sampled_from((*NAMES, "body", "another body", "nothing", "twice", "missing"))
REQUESTS = st.tuples(mutated_json(*GOOD_CALLS), SPOILS, st.integers(0, 400), st.binary(min_size=1, max_size=2))


@pytest.mark.long
@pytest.mark.requirement("AM-02")
@fuzzed(REQUESTS, examples=80)
def test_no_request_gets_in_but_as_it_was_signed(case: Any) -> str:
    """One part of a signed request is spoiled: what gets in is what was signed, by who signed it."""
    body, spoiled, place, put = case
    now, door = str(int(time.time())), Door()
    parts = {
        agent_signing.AGENT_HEADER: b"ann",
        agent_signing.TIMESTAMP_HEADER: now.encode(),
        agent_signing.SIGNATURE_HEADER: agent_signing.sign(KEY, now, body).encode(),
    }
    signed, sent = dict(parts), body
    if spoiled in parts:
        text = parts[spoiled]
        place %= len(text)
        parts[spoiled] = text[:place] + put + text[place + 1 :]
    elif spoiled == "body":
        sent = body[: place % (len(body) + 1)] + put + body[place % (len(body) + 1) :]
    elif spoiled == "another body":
        sent = json.dumps(_call("broadcast_message", message=f"not what was signed {place}")).encode()
    headers = [(name.lower().encode(), value) for name, value in parts.items()]
    if spoiled == "twice":
        headers.append(headers[place % 3])
    elif spoiled == "missing":
        del headers[place % 3]
    status = awaited(door.status(headers, sent))
    if status == 200:
        assert door.let_in == [("ann", body)]
        assert (parts, sent, len(headers)) == (signed, body, 3)
    else:
        assert door.let_in == []
        assert status in (400, 403)
    return f"{spoiled}: {status}"


@pytest.mark.long
@pytest.mark.requirement("AM-02")
@fuzzed(mutated_json(*GOOD_CALLS), examples=150)
def test_what_the_library_takes_for_a_call_is_a_call_to_the_check_of_signatures(case: bytes) -> str:
    """A changing call that looks like nothing to us and like a call to the library would be let in twice."""
    try:
        tool = _called_tool(_decoded(case))
    except ApiError as error:
        assert (error.status_code, error.reason) == (400, "malformed")
        return "refused"
    try:
        message = jsonrpc_message_adapter.validate_json(case, by_name=False)
    except ValidationError:
        return "refused by the library"
    if getattr(message, "method", None) != "tools/call":
        assert tool is None
        return "no call"
    name = (getattr(message, "params", None) or {}).get("name")
    assert tool == (name if isinstance(name, str) else "")
    return "a call"


TOOL_CASES = st.sampled_from([call["params"] for call in GOOD_CALLS if "params" in call]).flatmap(
    lambda params: st.tuples(st.just(params["name"]), changed_documents(params["arguments"]))
)


@pytest.mark.long
@pytest.mark.requirement("AM-04")
@pytest.mark.requirement("DL-09")
@fuzzed(TOOL_CASES, examples=160)
def test_a_tool_takes_what_its_model_takes_and_answers_or_refuses(case: Any) -> str:
    """For any arguments a tool returns an answer or raises an ApiError with a status."""
    name, arguments = case
    try:
        asked = ARGUMENTS[name].model_validate(arguments)
    except ValidationError:
        return "no arguments"
    if name in WAITS:
        asked = asked.model_copy(update={"timeout_seconds": 0})
    hub = FoldedHub()
    for agent in ("ann", "bo"):
        hub.join(agent, PUBLIC)
    message = verified_message("m1", "bo", "ann", "message", "hello", "text/plain")
    hub.add(message.record(door=DOOR, principal="bo"))
    hub.add(MailboxLease(to="ann", request_id="l1", lease_ms=60_000).record(door=DOOR, principal="ann"))
    try:
        answer = awaited(getattr(hub.tools, name)("ann", asked))
    except ApiError as error:
        assert 400 <= error.status_code < 500
        return error.reason
    assert json.dumps(answer)
    return "answered"


@pytest.mark.requirement("AM-03")
@fuzzed(mutated_text(PUBLIC), examples=100)
def test_a_key_in_pem_is_an_rsa_key_in_one_notation_or_refused(case: str) -> str:
    """The checked form of an accepted key is accepted unchanged, has one id, and is in the index of keys."""
    assert agent_signing.verify(case, "1", b"", "x" * 344) is False
    try:
        pem = agent_signing.checked_public_key(case)
    except ValueError:
        return "refused"
    assert agent_signing.checked_public_key(pem) == pem
    assert agent_signing.key_id(case) == key_id_of(pem)
    return "a key"


BODY = b'{"jsonrpc":"2.0"}'
SIGNED = agent_signing.sign(KEY, "1700000000", BODY)
# The same bytes in another base64: the last character before the padding has bits that say nothing.
_LAST = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
SAME = [text for end in _LAST if base64.b64decode(text := f"{SIGNED[:-3]}{end}==") == base64.b64decode(SIGNED)]


@pytest.mark.requirement("AM-02")
@fuzzed(
    st.tuples(mutated_text("1700000000", "1700000000.0"), mutated_text(SIGNED, *SAME), mutated(BODY)),
    examples=80,
)
def test_a_signature_has_one_notation_and_fits_one_request(case: Any) -> str:
    """Neither raises nor takes anything but the timestamp, the body and the text that belong together."""
    if agent_signing.verify(PUBLIC, case[0], case[2], case[1]):
        assert case == ("1700000000", SIGNED, BODY)
        return "good"
    return "refused"


ISSUED = datetime(2026, 11, 22, 12, tzinfo=UTC)
LISTENER = {
    "name": "search",
    "type": "llm",
    "capability": "looks things up",
    "root_tag": "ask",
    "namespace": "urn:x:1",
    "model": "m",
    "client": "a.b:c",
    "concurrency": 2,
    "per_minute": 60,
    "tokens_per_minute": 1000,
    "timeout_s": 1.5,
    "tools": ["calculator", "bo"],
    "system_prompt": "You look < things > up.",
}
COMMANDS = [
    command_bytes(action, nonce="7c1f" * 8, issued=ISSUED, key_id="0f3a" * 4)
    for action in (AddListener(LISTENER), RemoveListener("search"), HotReload())
]


@pytest.mark.requirement("XP-11")
@fuzzed(mutated(*COMMANDS), examples=120)
def test_a_command_is_one_by_its_schema_or_refused(case: bytes) -> str:
    """A command can be written and read again; its time has a zone, so that it can be compared."""
    try:
        command = read_command(case)
    except CommandRefused as error:
        assert error.reason in ("malformed", "too_large")
        assert len(str(error)) < 700
        return "refused"
    assert command.issued.tzinfo is not None
    again = command_bytes(command.action, nonce=command.nonce, issued=command.issued, key_id=command.key_id)
    assert read_command(again).action == command.action
    return type(command.action).__name__


COMMAND_KEY = Ed25519PrivateKey.generate()
COMMAND_SIGNED = base64.b64encode(COMMAND_KEY.sign(COMMANDS[1])).decode()


@pytest.mark.requirement("XP-11")
@fuzzed(st.tuples(mutated(COMMANDS[1]), mutated_text(COMMAND_SIGNED)))
def test_a_commands_signature_fits_its_bytes_in_one_notation(case: Any) -> str:
    """Never raises; a text that says the same in another base64 would be another command to who counts them."""
    if CommandKey("operator", "0f3a" * 4, COMMAND_KEY.public_key()).has_signed(*case):
        assert case == (COMMANDS[1], COMMAND_SIGNED)
        return "good"
    return "refused"
