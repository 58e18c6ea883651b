"""Signatures at the agent MCP server (AM-02): each part of a request changed, left out, doubled."""

from __future__ import annotations

import base64
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.connectors.doors.mcp_tools.conftest import FURTHER_NAME, Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import ACCEPT, SignedCaller, call_body, now, open_stream
from tests.mcp_protocol import ENVELOPE
from trunkline_agent.mcp.signing import AGENT_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, WINDOW_S

pytestmark = pytest.mark.requirement("AM-02")

HEADERS = (AGENT_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
NewAgent = Callable[[str], Agent]


@pytest.fixture(scope="module")
def ann(shared_gateway: McpGateway, new_agent: NewAgent) -> Iterator[SignedCaller]:
    """An agent that takes part."""
    with SignedCaller(new_agent("ann"), shared_gateway) as caller:
        yield caller


@pytest.fixture(scope="module")
def bo(shared_gateway: McpGateway, new_agent: NewAgent) -> Iterator[SignedCaller]:
    """Another one."""
    with SignedCaller(new_agent("bo"), shared_gateway) as caller:
        yield caller


def asked(caller: SignedCaller, how: str, headers: Any, body: bytes) -> httpx.Response:
    """The answer at one of the three places: a call, the opening of a stream, what is posted to one."""
    if how == "GET /sse":
        return caller.client.get("/sse", headers=headers)
    path = {"POST /mcp": "/mcp", "POST /messages/": "/messages/?session_id=" + "0" * 32}[how]
    return caller.post(body, headers, path)


def spoiled(caller: SignedCaller, other: SignedCaller, body: bytes) -> dict[str, Any]:
    """Headers that are not good for the body, by what is wrong with them."""
    good = caller.headers(body)
    signature = bytearray(base64.b64decode(good[SIGNATURE_HEADER]))
    signature[-1] ^= 1
    said = good[SIGNATURE_HEADER]
    found: dict[str, Any] = {
        "another agent": good | {AGENT_HEADER: other.name},
        "unknown agent": good | {AGENT_HEADER: "nobody"},
        "no name": good | {AGENT_HEADER: "no name"},
        "the operator": good | {AGENT_HEADER: "operator"},
        "upper case": good | {AGENT_HEADER: caller.name.upper()},
        "one second later": good | {TIMESTAMP_HEADER: str(int(good[TIMESTAMP_HEADER]) + 1)},
        "the same second, written otherwise": good | {TIMESTAMP_HEADER: good[TIMESTAMP_HEADER] + ".0"},
        "no timestamp": good | {TIMESTAMP_HEADER: "now"},
        "infinite timestamp": good | {TIMESTAMP_HEADER: "1e400"},
        "other digits": good | {TIMESTAMP_HEADER: b"\xd9\xa1" * 10},
        "a bit of the signature": good | {SIGNATURE_HEADER: base64.b64encode(signature).decode()},
        "short signature": good | {SIGNATURE_HEADER: said[4:]},
        "no padding": good | {SIGNATURE_HEADER: said.rstrip("=")},
        "no base64": good | {SIGNATURE_HEADER: "*" + said[1:]},
        "empty signature": good | {SIGNATURE_HEADER: ""},
        "signature of zeros": good | {SIGNATURE_HEADER: base64.b64encode(bytes(256)).decode()},
        "signature of ones": good | {SIGNATURE_HEADER: base64.b64encode(b"\xff" * 256).decode()},
        "another body": caller.headers(body + b" "),
        "another key": other.headers(body) | {AGENT_HEADER: caller.name},
        "too old": caller.headers(body, now(-WINDOW_S - 5)),
        "too early": caller.headers(body, now(WINDOW_S + 5)),
    }
    for name in HEADERS:
        found[f"without {name}"] = {key: value for key, value in good.items() if key != name}
        found[f"{name} twice"] = [*good.items(), (name, good[name])]
    return found


@pytest.mark.parametrize("how", ["POST /mcp", "GET /sse", "POST /messages/"])
def test_each_part_of_a_signed_request_counts(ann: SignedCaller, bo: SignedCaller, how: str) -> None:
    body = (
        b""
        if how == "GET /sse"
        else call_body("send_to_agent", targetAgentId=bo.name, message=f"spoiled {how}")
    )
    for what, headers in spoiled(ann, bo, body).items():
        answer = asked(ann, how, headers, body)
        assert answer.status_code == 403, (what, answer.text)
        assert answer.json()["reason"] == "unauthorized", what
    assert not [one for one in bo.messages() if one["content"].startswith("spoiled")]


@pytest.mark.parametrize("path", ["/", "/mcp/", "/nowhere", "/healthz"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_is_told_without_a_signature(ann: SignedCaller, method: str, path: str) -> None:
    assert ann.client.request(method, path).status_code == 403


def test_a_timestamp_may_be_five_minutes_away(ann: SignedCaller) -> None:
    for offset in (-WINDOW_S + 20, 0, WINDOW_S - 20):
        body = call_body("discover_agents")
        assert ann.post(body, ann.headers(body, now(offset))).status_code == 200
        fraction = now(offset) + ".25"
        assert ann.post(body, ann.headers(body, fraction)).status_code == 200


def test_a_request_needs_no_session_and_gets_no_redirect(ann: SignedCaller) -> None:
    body = call_body("discover_agents")
    assert "mcp-session-id" not in ann.post(body).headers
    assert ann.post(body, path="/mcp/").status_code == 404
    for method in ("GET", "DELETE"):
        headers = ann.headers() | {"Accept": "*/*"}
        # One that were answered by a stream would have no end.
        with ann.client.stream(method, "/mcp", headers=headers) as answer:
            assert answer.status_code == 405


@pytest.mark.parametrize(
    "method", ["subscriptions/listen", "resources/list", "prompts/list", "logging/setLevel"]
)
def test_there_are_tools_and_nothing_else(ann: SignedCaller, method: str) -> None:
    """None of these may hold a connection open, or know anything."""
    document: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {}}
    for body, more in (
        (json.dumps(document), {}),
        (modern(json.dumps(document)), MODERN | {"Mcp-Method": method}),
    ):
        headers = ACCEPT | ann.headers(body.encode()) | more
        with ann.client.stream("POST", "/mcp", content=body.encode(), headers=headers) as answer:
            assert answer.headers["content-type"].startswith("application/json")
            assert "error" in json.loads(answer.read())


def test_other_hosts_and_origins_are_refused(ann: SignedCaller, shared_gateway: McpGateway) -> None:
    body = call_body("discover_agents")
    assert ann.post(body, Host="evil.example:3100").status_code == 421
    assert ann.post(body, Origin="http://evil.example").status_code == 403
    answer = ann.client.get("/sse", headers=ann.headers() | {"Host": "evil.example:3100"})
    assert answer.status_code == 421
    # An error after the answer is logged after it.
    assert ann.messages() == []
    assert "Traceback" not in shared_gateway.program.log()


@pytest.mark.requirement("HH-20")
def test_a_host_is_compared_as_a_name_and_further_names_come_from_the_settings(ann: SignedCaller) -> None:
    port = ann.client.base_url.port
    names = ("LOCALHOST", "localhost.", "LocalHost.", FURTHER_NAME, FURTHER_NAME.upper() + ".")
    for host in (*names, *(f"{name}:{port}" for name in names)):
        assert ann.post(call_body("discover_agents"), Host=host).status_code == 200, host
    refused = ann.post(call_body("discover_agents"), Host=f"other.test:{port}")
    assert refused.status_code == 421
    assert f"'other.test:{port}'" in refused.json()["message"]
    assert "gateway.host_names" in refused.json()["message"]


MODERN = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "send_to_agent"}
_NAME = '"name": "send_to_agent"'
DISGUISES: dict[str, tuple[Callable[[str], str | bytes], dict[str, str]]] = {
    "none": (str, {}),
    "name twice": (lambda text: text.replace(_NAME, '"name": "get_my_messages", ' + _NAME), {}),
    "name twice, the other way": (lambda text: text.replace(_NAME, _NAME + ', "name": "discover_agents"'), {}),
    "escaped key twice": (lambda text: text.replace(_NAME, '"n\\u0061me": "discover_agents", ' + _NAME), {}),
    "method twice": (lambda text: text.replace('"method":', '"method": "tools/list", "method":'), {}),
    "params twice": (lambda text: text.replace('"params":', '"params": {"name": "x"}, "params":'), {}),
    "escaped name": (lambda text: text.replace("send_to_agent", "\\u0073end_to_agent"), {}),
    "escaped method": (lambda text: text.replace("tools/call", "tools\\/call"), {}),
    "batch": (lambda text: f"[{text}]", {}),
    "batch of two": (lambda text: f"[{text.replace('send_to_agent', 'discover_agents')}, {text}]", {}),
    "two documents": (lambda text: text.replace("send_to_agent", "discover_agents") + "\n" + text, {}),
    "with a mark": (lambda text: b"\xef\xbb\xbf" + text.encode(), {}),
    "other case of the name": (lambda text: text.replace("send_to_agent", "Send_To_Agent"), {}),
    "other case of the method": (lambda text: text.replace("tools/call", "Tools/Call"), {}),
    "other case of a key": (lambda text: text.replace('"name"', '"Name"'), {}),
    "space in the method": (lambda text: text.replace("tools/call", "tools/call "), {}),
    "full-width name": (lambda text: text.replace("send_to_agent", "send\\uff3fto_agent"), {}),
    "name in a list": (lambda text: text.replace('"send_to_agent"', '["send_to_agent"]'), {}),
    "unknown tool": (lambda text: text.replace("send_to_agent", "__init__"), {}),
    "notification": (lambda text: text.replace('"id"', '"x-id"'), {}),
    "null id": (lambda text: json.dumps(json.loads(text) | {"id": None}), {}),
    "newer protocol": (str, MODERN),
    "newer protocol, with what it asks for": (lambda text: modern(text), MODERN),
    "newer protocol, other header": (lambda text: modern(text), MODERN | {"Mcp-Name": "get_my_messages"}),
    "newer protocol, notification": (lambda text: modern(text).replace('"id"', '"x-id"'), MODERN),
    "unknown protocol": (str, {"MCP-Protocol-Version": "2099-01-01"}),
    "UTF-16": (lambda text: text.encode("utf-16"), {}),
    "UTF-32": (lambda text: text.encode("utf-32"), {}),
    "compressed": (lambda text: gzip.compress(text.encode()), {"Content-Encoding": "gzip"}),
    "as a form": (str, {"Content-Type": "application/x-www-form-urlencoded"}),
}
HAS_EFFECT = {"none", "escaped name", "escaped method", "newer protocol, with what it asks for"}


def modern(text: str) -> str:
    """The call as the protocol without a handshake has it."""
    document = json.loads(text)
    document["params"]["_meta"] = ENVELOPE
    return json.dumps(document)


@pytest.mark.parametrize("what", DISGUISES)
def test_a_changing_call_in_disguise_needs_a_signature_of_its_own(
    ann: SignedCaller, bo: SignedCaller, what: str
) -> None:
    """Sent twice with one signature, it has its effect once, or is no such call and has none."""
    disguised, more = DISGUISES[what]
    content = f"hidden: {what}"
    text = disguised(call_body("send_to_agent", targetAgentId=bo.name, message=content).decode())
    body = text.encode() if isinstance(text, str) else text
    headers = ann.headers(body)
    ann.post(body, headers, **more)
    again = ann.post(body, headers, **more)
    assert len([one for one in bo.messages() if one["content"] == content]) == (what in HAS_EFFECT)
    if what in HAS_EFFECT:
        assert again.status_code == 403
        assert "used before" in again.json()["message"]


def test_the_same_words_in_another_case_are_another_tool(ann: SignedCaller) -> None:
    for name in ("Send_To_Agent", "send_to_agent ", "", "mark_read\u200b", "_settle_all"):
        assert ann.error(name)["reason"] == "not_found", name


def test_what_is_no_message_is_refused(ann: SignedCaller) -> None:
    deep = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":' + b"[" * 100 + b"]" * 100 + b"}"
    refused = {
        b"": 400,
        b"{": 400,
        b"nonsense": 400,
        b"\xff\xfe": 400,
        b"7": 400,
        b"[]": 400,
        b"null": 400,
        b"{}": 400,
        b'{"a": NaN}': 400,
        b'{"a": 1e999}': 400,
        b'{"a": "\\ud800"}': 400,
        b'{"a": 99999999999999999999999}': 400,
        deep: 400,
        b"[" * 100_000: 400,
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call"}': 200,
    }
    for body, status in refused.items():
        answer = ann.post(body)
        assert answer.status_code == status, (body[:80], answer.text)
    assert ann.messages() == []


def test_a_body_over_the_limit_is_refused(ann: SignedCaller, bo: SignedCaller) -> None:
    at_least = 3 * 1024 * 1024
    body = call_body("send_to_agent", targetAgentId=bo.name, message="x" * (at_least + 100_000))
    answer = ann.post(body)
    assert (answer.status_code, answer.json()["reason"]) == (413, "too_large")
    answer = ann.post(b"x" * (17 * 1024 * 1024))
    assert answer.status_code == 413
    found = ann.error("send_to_agent", targetAgentId=bo.name, message="x" * (1024 * 1024 + 1))
    assert found["reason"] == "too_large"


def test_refusals_stand_in_the_log_of_the_gateway_and_quote_nothing(
    ann: SignedCaller, shared_gateway: McpGateway
) -> None:
    secret = "what-an-agent-says"
    body = json.dumps({"jsonrpc": "2.0", "id": {"not": secret}, "method": secret, "params": secret}).encode()
    with open_stream(ann) as stream:
        assert ann.post(body, path=stream.path).status_code == 400
        assert ann.post(body, path=f"/messages/?session_id={secret}").status_code == 400
    ann.post(body)
    ann.post(body, Host=f"{secret}:1")
    lines = shared_gateway.program.log()
    assert secret not in lines
    assert "mcp_library" in lines
    for line in lines.splitlines():
        json.loads(line)


def medians_s(attempts: dict[str, Callable[[], httpx.Response]], count: int) -> dict[str, float]:
    """How long each takes, asked in turns."""
    took: dict[str, list[float]] = {name: [] for name in attempts}
    for turn in range(count):
        # The one that goes first in a turn must not always be the same.
        for name in sorted(attempts, reverse=bool(turn % 2)):
            began = time.perf_counter()
            assert attempts[name]().status_code == 403
            took[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in took.items()}


def test_the_time_does_not_tell_which_agents_there_are(ann: SignedCaller) -> None:
    """Medians of 500 interleaved calls within 10%; on a machine that others use, in one of five attempts."""
    body = call_body("send_to_agent", targetAgentId="operator", message="x")
    wrong = base64.b64encode(b"\x01" + bytes(range(255))).decode()
    known = ann.headers(body) | {SIGNATURE_HEADER: wrong}
    # Of the same length, so that nothing but the agent differs.
    unknown = known | {AGENT_HEADER: "x" * len(ann.name)}
    attempts = {"known": lambda: ann.post(body, known), "unknown": lambda: ann.post(body, unknown)}
    medians_s(attempts, 50)
    found = []
    for _ in range(5):
        medians = medians_s(attempts, 500)
        found.append(abs(medians["known"] - medians["unknown"]) / min(medians.values()))
        if found[-1] <= 0.1:
            return
    pytest.fail(f"differ by {found}")
