"""The table of samples of the agents' MCP tools: for each tool a call that works, and agents that send it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from connectors.doors.mcp_tools.agents.operation_tools import ARGUMENTS, ONLY_READS
from schemas.streams.agents.agent_registry import AgentCalled
from tests.agent_signatures import signed_headers
from tests.connectors.doors.mcp_tools.signed_calls import ACCEPT, MCP, call_body
from tests.matrix.asking import WAYS, Watched
from tests.matrix.ground import Ground, fresh
from tests.matrix.memory_gateway import Answer
from trunkline_agent.mcp.signing import load_private_key, new_key_pair

KEY = "idempotencyKey"


class Agents:
    """Two agents with one key pair after the other, and calls of theirs."""

    def __init__(self, ground: Ground) -> None:
        self.ground, self._keys = ground, dict[str, Any]()
        self.ann, self.bo = (self._joined(name) for name in ("ann", "bo"))

    def _joined(self, kind: str) -> str:
        private, public = new_key_pair()
        name = fresh(kind)
        self.ground.do("POST", "/participants", {"agent_name": name, "public_key": public})
        self._keys[name] = load_private_key(private)
        return name

    def key_of(self, name: str) -> Any:
        """Return the private key of an agent."""
        return self._keys[name]

    def post(self, body: bytes, careful: bool, agent: str | None = None, **changed: str) -> Answer:
        """Send a signed request of an agent, by default the first."""
        name = agent or self.ann
        headers = {**ACCEPT, **signed_headers(name, self._keys[name], body), **changed}
        gateway = self.ground.gateway
        return gateway.ask("POST", MCP, body, "", careful=careful, door=1, **headers)

    def call(
        self, tool: str, arguments: Mapping[str, Any], careful: bool = False, agent: str | None = None
    ) -> Any:
        """Return the content of a tool's answer, with `reason` if it is an error."""
        answer = self.post(call_body(tool, **arguments), careful, agent)
        assert answer.status == 200, answer
        result = answer.document["result"]
        assert result["isError"] or json.loads(result["content"][0]["text"]) == result["structuredContent"]
        assert result["isError"] == ("reason" in result["structuredContent"])
        return result["structuredContent"]

    def both(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Return the content for which both ways have the same one."""
        direct, careful = (self.call(tool, arguments, way) for way in WAYS)
        assert direct == careful, arguments
        return careful

    def sent(self) -> str:
        """Return a new message in the mailbox of the first agent."""
        body = {"recipient": self.ann, "type": "note"}
        return str(self.ground.do("POST", "/messages", body)["message_id"])

    def leased(self) -> dict[str, Any]:
        """Return a lease of the first agent and a new message in it."""
        message_id = self.sent()
        found = self.call("lease_messages", {"limit": 100})
        assert message_id in [one["id"] for one in found["messages"]]
        return {"leaseId": found["leaseId"], "messageIds": [message_id]}

    def topic(self) -> str:
        """Return a new topic of the first agent."""
        name = fresh("topic")
        self.call("subscribe", {"topic": name})
        return name


def _none(agents: Agents) -> dict[str, Any]:
    return {}


def _given_back(agents: Agents) -> dict[str, Any]:
    leased = agents.leased()
    return {"leaseId": leased["leaseId"], "messageId": leased["messageIds"][0]}


@dataclass(frozen=True)
class ToolSample:
    """A call that works.

    Attributes:
        make: Makes the things that it is about, and returns their arguments.
        arguments: The further arguments: all of the tool but `lacks` and the key.
        lacks: Arguments that it leaves out.
        unknown: Arguments that name a thing that does not exist. None: there are none, or that is no error.
        changes: The fields of the answer that another answer to the same call has otherwise.
    """

    make: Callable[[Agents], dict[str, Any]] = _none
    arguments: Mapping[str, Any] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    unknown: Mapping[str, Any] | None = None
    changes: tuple[str, ...] = ()


_SENT = {
    "message": "the-message",
    "subject": "the-subject",
    "priority": "high",
    "expiresInSeconds": 7201,
    "deliverAfterSeconds": 61,
}
_IN_THREAD = {"inReplyTo": "the-message-before", "thread": "the-thread"}
_NOBODY = {"targetAgentId": "nobody-of-this-name"}
SAMPLES: dict[str, ToolSample] = {
    "discover_agents": ToolSample(
        arguments={"capability": "no-such-capability", "status": "working", "after": "a"}
    ),
    "send_to_agent": ToolSample(
        lambda agents: {"targetAgentId": agents.bo}, {**_SENT, **_IN_THREAD}, ("blob",), _NOBODY
    ),
    "ask_agent": ToolSample(
        lambda agents: {"targetAgentId": agents.bo},
        {**_SENT, **_IN_THREAD, "timeoutSeconds": 0},
        ("blob",),
        _NOBODY,
    ),
    "broadcast_message": ToolSample(arguments=_SENT, lacks=("blob",)),
    "list_topics": ToolSample(arguments={"limit": 3, "after": "a"}),
    "subscribe": ToolSample(lambda _: {"topic": fresh("topic")}),
    "unsubscribe": ToolSample(lambda agents: {"topic": agents.topic()}, unknown={"topic": "no-such-topic"}),
    "publish_message": ToolSample(
        lambda agents: {"topic": agents.topic()},
        {**_SENT, "thread": "the-thread"},
        ("blob",),
        {"topic": "no-such-topic"},
    ),
    "get_my_messages": ToolSample(arguments={"unreadOnly": True, "limit": 3, "since": 0}),
    "wait_for_messages": ToolSample(arguments={"timeoutSeconds": 0, "limit": 3, "since": 0}),
    "mark_read": ToolSample(lambda agents: {"messageIds": [agents.sent()]}, changes=("marked",)),
    "lease_messages": ToolSample(
        lambda agents: {"limit": 100} if agents.sent() else {}, {"leaseSeconds": 4711, "timeoutSeconds": 0}
    ),
    "count_messages": ToolSample(),
    "ack_messages": ToolSample(Agents.leased),
    "nack_message": ToolSample(_given_back, {"reason": "the-reason"}),
    "extend_lease": ToolSample(Agents.leased, {"leaseSeconds": 4711}, changes=("deadline",)),
    "upload_blob": ToolSample(
        lambda _: {"content": base64.b64encode(fresh("content").encode()).decode()},
        {"isLast": True, "contentType": "text/the-type", "offset": 0},
        ("uploadId", "digest"),
        {"uploadId": "no-such-upload"},
        ("keepUntil",),
    ),
    "read_blob": ToolSample(arguments={"messageId": "no-such-message", "offset": 0, "limit": 3}),
    "update_my_status": ToolSample(lambda _: {"capabilities": [fresh("capability")]}, {"status": "working"}),
}
CHANGES = [name for name in SAMPLES if name not in ONLY_READS]
# Without a key, a repetition has the same effect by what it says.
KEYED = [name for name in CHANGES if KEY in {one.alias for one in ARGUMENTS[name].model_fields.values()}]
# Not the engine's: they wait, or take parts of a content.
CAREFUL = ("ask_agent", "wait_for_messages", "upload_blob", "read_blob")


def call_of(agents: Agents, tool: str) -> dict[str, Any]:
    """Return the arguments of a call about a new thing."""
    return {**SAMPLES[tool].arguments, **SAMPLES[tool].make(agents)}


class Effects(Watched):
    """The accepted records since it was made, without those of the calls themselves."""

    @property
    def records(self) -> list[Any]:
        """The records."""
        return [one for one in super().records if one.type != AgentCalled.TYPE]
