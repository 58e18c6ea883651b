"""The operations on one's own mailbox, alike at the HTTP and the MCP door: take, end leases, send and ask."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from tests.faults.prove.delivery_notes import ACK, EXTEND, EXTEND_S, NACK, Deliveries, Ending, Got, Taking
from tests.faults.prove.hub_client import HubClient, shown
from tests.faults.prove.load_messages import MESSAGES, mailbox
from tests.faults.prove.mcp_client import McpClient
from tests.faults.prove.oracle import Oracle, content_hash
from trunkline_agent.hub.plans import Answer

HTTP, MCP = "http", "mcp"
_TOOLS: Final = {ACK: "ack_messages", NACK: "nack_message", EXTEND: "extend_lease"}


_numbers: Final = itertools.count()


def _speaker(name: str) -> str:
    """Return who speaks, for the order of messages: several threads may have the same name, and no order."""
    return f"{name}, thread {next(_numbers)}"


class Lease(NamedTuple):
    """Messages, and the id of the lease that they are under."""

    id: str
    got: tuple[Got, ...]


def _note_taking(
    at: HubMailbox | McpMailbox,
    request: str,
    sent: float,
    sends: int,
    *,
    limit: int,
    wait_s: float,
    lease_s: int,
    lease: Lease,
) -> None:
    """Note a request for messages that was answered now."""
    name, gateway, now = mailbox(at.name), at.client.answered_by, time.time()
    at.log.note(
        Taking(name, at.door, gateway, request, sent, now, sends, limit, wait_s, lease_s, lease.id, lease.got)
    )


class HubMailbox:
    """A mailbox at the HTTP door. Notes each request and each answer about a message."""

    door = HTTP

    def __init__(self, client: HubClient, name: str, log: Deliveries) -> None:
        self.client, self.name, self.log = client, name, log
        self._speaker = _speaker(name)

    def take(self, request: str, *, limit: int, lease_s: int = 0, wait_s: float = 0) -> Lease:
        """Take messages under a lease, or for good if `lease_s` is 0."""
        asked = (
            {"limit": limit} | ({"lease": lease_s} if lease_s else {}) | ({"wait": wait_s} if wait_s else {})
        )
        sent, before = time.time(), self.client.sends
        answer = self.client.ask_known("GET", MESSAGES, headers={"X-Request-ID": request}, params=asked)
        told = _told(answer)
        lease = Lease(told.get("lease_id", ""), tuple(_got(message) for message in told["messages"]))
        sends = self.client.sends - before
        _note_taking(self, request, sent, sends, limit=limit, wait_s=wait_s, lease_s=lease_s, lease=lease)
        return lease

    def end(self, how: str, lease: str, ids: Sequence[str], reason: str = "") -> list[str]:
        """Acknowledge, give back or extend; returns the ids for which it was done."""
        body: dict[str, Any] = {"lease_id": lease, "message_ids": list(ids)}
        body |= {"reason": reason} if how == NACK else {"lease": EXTEND_S} if how == EXTEND else {}
        sent, before = time.time(), self.client.sends
        key = uuid.uuid4().hex
        told = _told(self.client.ask_known("POST", f"{MESSAGES}/{how}", key=key, json=body))
        refused = {one["message_id"]: one["reason"] for one in told["refused"]}
        sends = self.client.sends - before
        return note_ends(self.log, self.name, how, lease, ids, refused, sent, sends, reason)

    def send(self, to: str, text: str, key: str, in_reply_to: str | None, oracle: Oracle, **more: Any) -> str:
        """Send a message, note that it was acknowledged, and return its id. `more` are further fields."""
        body = {"recipient": to, "type": "note", "payload": {"text": text}, "in_reply_to": in_reply_to, **more}
        message_id = str(_told(self.client.ask_known("POST", MESSAGES, key=key, json=body))["message_id"])
        oracle.acked(HTTP, mailbox(to), message_id, self._speaker, _hub_hash(self.name, to, text))
        return message_id

    def try_to_send(self, to: str, text: str, key: str, oracle: Oracle) -> str | None:
        """Send a message as `send` does; None if the mailbox is full. For a client that takes refusals."""
        body = {"recipient": to, "type": "note", "payload": {"text": text}}
        answer = self.client.ask_known("POST", MESSAGES, key=key, json=body)
        if answer.status == 429:
            return None
        message_id = str(_told(answer)["message_id"])
        oracle.acked(HTTP, mailbox(to), message_id, self._speaker, _hub_hash(self.name, to, text))
        return message_id

    def publish(self, topic: str, text: str, key: str) -> None:
        """Publish a message to a topic, until that is acknowledged."""
        body = {"type": "note", "payload": {"text": text}}
        _told(self.client.ask_known("POST", f"/api/hub/topics/{topic}", key=key, json=body))

    def ask(self, to: str, text: str, key: str, wait_s: int, oracle: Oracle) -> tuple[str, Got | None]:
        """Ask and wait for the reply; returns the question's id, and the reply if it came in time."""
        body = {"recipient": to, "type": "ask", "payload": {"text": text}}
        answer = self.client.ask_known("POST", MESSAGES, key=key, params={"wait_reply": wait_s}, json=body)
        if answer.status not in (200, 202) or ("reply" in answer.json()) != (answer.status == 200):
            raise AssertionError(f"an answer to a question: {shown(answer)}")
        told = answer.json()
        oracle.acked(HTTP, mailbox(to), told["message_id"], self._speaker, _hub_hash(self.name, to, text))
        return told["message_id"], _got(told["reply"]) if "reply" in told else None


class McpMailbox:
    """The same at the MCP door."""

    door = MCP

    def __init__(self, client: McpClient, name: str, log: Deliveries) -> None:
        self.client, self.name, self.log = client, name, log
        self._speaker = _speaker(name)

    def take(self, request: str, *, limit: int, lease_s: int = 0, wait_s: float = 0) -> Lease:
        """Take messages under a lease; this door has no other way."""
        if not lease_s:
            raise ValueError("an MCP agent takes messages under a lease")
        sent, before = time.time(), self.client.sends
        asked = {"leaseSeconds": lease_s, "timeoutSeconds": wait_s, "limit": limit, "idempotencyKey": request}
        told = self.client.call("lease_messages", **asked)
        lease = Lease(told["leaseId"] or "", tuple(_mcp_got(message) for message in told["messages"]))
        sends = self.client.sends - before
        _note_taking(self, request, sent, sends, limit=limit, wait_s=wait_s, lease_s=lease_s, lease=lease)
        return lease

    def end(self, how: str, lease: str, ids: Sequence[str], reason: str = "") -> list[str]:
        """Acknowledge, give back or extend; returns the ids for which it was done."""
        asked: dict[str, Any] = {"leaseId": lease}
        asked |= {"messageId": ids[0], "reason": reason} if how == NACK else {"messageIds": list(ids)}
        if how == EXTEND:
            asked |= {"leaseSeconds": EXTEND_S, "idempotencyKey": uuid.uuid4().hex}
        sent, before = time.time(), self.client.sends
        told = self.client.call(_TOOLS[how], **asked)
        refused = {one["id"]: one["reason"] for one in told["refused"]}
        sends = self.client.sends - before
        return note_ends(self.log, self.name, how, lease, ids, refused, sent, sends, reason)

    def wait(self, wait_s: float) -> list[Got]:
        """Wait for unread messages and look at them; this takes none."""
        told = self.client.call("wait_for_messages", timeoutSeconds=wait_s)
        return [_mcp_got(message) for message in told["messages"]]

    def send(self, to: str, text: str, key: str, in_reply_to: str | None, oracle: Oracle) -> str:
        """Send a message, note that it was acknowledged, and return its id."""
        asked = {"targetAgentId": to, "message": text, "idempotencyKey": key, "inReplyTo": in_reply_to}
        message_id = str(self.client.call("send_to_agent", **asked)["messageId"])
        oracle.acked(MCP, mailbox(to), message_id, self._speaker, content_hash(self.name, to, text))
        return message_id

    def ask(self, to: str, text: str, key: str, wait_s: int, oracle: Oracle) -> tuple[str, Got | None]:
        """Ask and wait for the reply; returns the question's id, and the reply if it came in time."""
        asked = {"targetAgentId": to, "message": text, "idempotencyKey": key, "timeoutSeconds": wait_s}
        told = self.client.call("ask_agent", **asked)
        oracle.acked(MCP, mailbox(to), told["messageId"], self._speaker, content_hash(self.name, to, text))
        return told["messageId"], _mcp_got(told["reply"]) if told["reply"] else None


OwnMailbox = HubMailbox | McpMailbox


def note_ends(
    log: Deliveries,
    name: str,
    how: str,
    lease: str,
    ids: Sequence[str],
    refused: dict[str, str],
    sent: float,
    sends: int,
    reason: str,
) -> list[str]:
    """Note the answer about each message. Returns the ids that are not refused."""
    answered = time.time()
    for one in ids:
        is_done, refusal = one not in refused, refused.get(one, "")
        log.note(Ending(how, mailbox(name), lease, one, sent, answered, sends, is_done, reason, refusal))
    return [one for one in ids if one not in refused]


def _told(answer: Answer) -> dict[str, Any]:
    if answer.status != 200:
        raise AssertionError(f"not 200: {shown(answer)}")
    return dict(answer.json())


def _hub_hash(sender: str, to: str, text: str) -> str:
    return content_hash(sender, to, json.dumps({"text": text}, ensure_ascii=False, separators=(",", ":")))


def _got(message: dict[str, Any]) -> Got:
    deadline = message.get("deadline")
    return Got(
        id=message["id"],
        attempt=message.get("attempt", 0),
        deadline=0.0 if deadline is None else datetime.fromisoformat(deadline).timestamp(),
        sender=message["sender"],
        in_reply_to=message.get("in_reply_to", ""),
        body=str(message["payload"]["text"]),
    )


def _mcp_got(message: dict[str, Any]) -> Got:
    content = message["content"]
    return Got(
        id=message["id"],
        attempt=message.get("attempt", 0),
        deadline=message.get("deadline", 0) / 1000,
        sender=message["from"],
        in_reply_to=message.get("inReplyTo", ""),
        body=json.loads(content)["text"] if content.startswith('{"text":') else content,
    )
