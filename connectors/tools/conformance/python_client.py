"""The adapter of the Python library: the protocol of conformance checks on the surface of `trunkline_agent`.

./trunkline conformance -- python -m connectors.tools.conformance.python_client
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from trunkline_agent import Agent, Credentials, HubAccess, Message, Sent, errors
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.message_fields import MESSAGE_FIELDS
from trunkline_agent.wire.signing import SIGNATURE_FIELD, sign_event
from trunkline_agent.wire.strict_json import MalformedJsonError, canonical, decode

Fields = dict[str, Any]

_PROTOCOL: Final = 1
# Without `extend`: the library extends leases by itself.
_FEATURES: Final = [
    "canonical",
    "signing",
    "hub",
    "keeps_leases",
    "ends_long_handlings",
    "ask",
    "topics",
    "handlings",
    "discovery",
    "schedules",
    "blobs",
    "job_http",
]
_SHOWN_AGENT: Final = ("name", "status", "task", "capabilities")
_SHOWN: Final = ("id", "sender", "type", "payload", "attempt", "topic", *(one.name for one in MESSAGE_FIELDS))
# The kind of an error by its class; a class comes before those that it is below.
_KINDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (MalformedJsonError, "malformed"),
    (errors.NoReply, "no_reply"),
    (errors.LeaseLost, "lease_lost"),
    (errors.RateLimited, "rate_limited"),
    (errors.EventRejected, "rejected"),
    (errors.OutboxBusy, "outbox_busy"),
    (errors.NotFound, "not_found"),
    (errors.UsageError, "usage"),
    (errors.BackboneUnreachable, "unreachable"),
    (errors.Refused, "refused"),
)


class Adapter:
    """Answers the requests of the kit. Each operation is a method of its name."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._messages: dict[str, Message] = {}
        self._jobs: dict[str, Job] = {}

    @property
    def agent(self) -> Agent:
        """The agent that was opened."""
        if self._agent is None:
            raise errors.UsageError("no agent was opened")
        return self._agent

    def hello(self, request: Fields) -> Fields:
        """Name the library."""
        del request
        try:
            found = version("trunkline-agent")
        except PackageNotFoundError:
            found = "of this checkout"
        features = [*_FEATURES, "job_mqtt"] if find_spec("paho") else _FEATURES
        return {"protocol": _PROTOCOL, "name": "trunkline-agent", "version": found, "features": features}

    def canonical(self, request: Fields) -> Fields:
        """Return the canonical form of a JSON text."""
        written = canonical(decode(base64.b64decode(request["json_base64"]))[0])
        return {"canonical_base64": base64.b64encode(written).decode("ascii")}

    def sign_event(self, request: Fields) -> Fields:
        """Return the signature of an event."""
        event = decode(base64.b64decode(request["json_base64"]))[0]
        return {"hmac_sig": sign_event(event, request["secret"])["data"][SIGNATURE_FIELD]}

    def open(self, request: Fields) -> Fields:
        """Make the agent."""
        credentials = Credentials(request["name"], HubAccess(**request["hub"]))
        self._agent = Agent(None, credentials, patience_s=request["patience_s"])
        return {}

    def send(self, request: Fields) -> Fields:
        """Send a message."""
        content = (request["to"], request["type"], *([request["payload"]] if "payload" in request else ()))
        handled = request.get("while_handling")

        def send() -> Sent:
            if handled is not None:
                # As the block of a `with` statement that has not ended.
                self._messages[handled].__enter__()
            return self.agent.send(*content, blob=request.get("blob"))

        return {"message_id": copy_context().run(send).message_id}

    def lease(self, request: Fields) -> Fields:
        """Lease the next message."""
        longest_s = request.get("longest_s")
        message = self.agent.receive(lease_s=request["lease_s"], wait_s=request["wait_s"], longest_s=longest_s)
        if message is not None:
            self._messages[message.id] = message
        return {"message": None if message is None else _shown(message)}

    def ack(self, request: Fields) -> Fields:
        """Acknowledge a message."""
        self._messages[request["message_id"]].ack()
        return {}

    def nack(self, request: Fields) -> Fields:
        """Give a message back."""
        self._messages[request["message_id"]].nack(request["error"])
        return {}

    def fail(self, request: Fields) -> Fields:
        """End the handling of a message by an exception."""
        with suppress(RuntimeError), self._messages[request["message_id"]]:
            raise RuntimeError(request["text"])
        return {}

    def reply(self, request: Fields) -> Fields:
        """Answer a message."""
        message = self._messages[request["message_id"]]
        return {"message_id": message.reply(request["payload"], request["type"]).message_id}

    def ask(self, request: Fields) -> Fields:
        """Ask and wait for the reply."""
        reply = self.agent.ask(request["to"], request["type"], request["payload"], timeout_s=request["wait_s"])
        return {"reply": _shown(reply)}

    def publish(self, request: Fields) -> Fields:
        """Publish a message to a topic."""
        published = self.agent.publish(request["topic"], request["type"], request["payload"])
        return {"message_id": published.message_id}

    def subscribe(self, request: Fields) -> Fields:
        """Subscribe to a topic."""
        self.agent.subscribe(request["topic"])
        return {}

    def unsubscribe(self, request: Fields) -> Fields:
        """End a subscription."""
        self.agent.unsubscribe(request["topic"])
        return {}

    def status(self, request: Fields) -> Fields:
        """Report what the agent does."""
        return {"message_id": self.agent.status(request["state"], request["text"]).message_id}

    def discover(self, request: Fields) -> Fields:
        """Find agents."""
        found = self.agent.discover(request.get("capability"), request.get("status"))
        return {"agents": [{name: getattr(one, name) for name in _SHOWN_AGENT} for one in found]}

    def schedule(self, request: Fields) -> Fields:
        """Set a schedule."""
        content = (request["name"], request["to"], request["type"], request["payload"])
        return asdict(self.agent.schedule(*content, every_s=request["every_s"]))

    def unschedule(self, request: Fields) -> Fields:
        """Remove a schedule."""
        return asdict(self.agent.unschedule(request["name"]))

    def schedules(self, request: Fields) -> Fields:
        """List the schedules of the agent."""
        del request
        return {"schedules": [asdict(one) for one in self.agent.schedules()]}

    def upload(self, request: Fields) -> Fields:
        """Store a large content."""
        return asdict(self.agent.upload(base64.b64decode(request["content_base64"]), request["content_type"]))

    def blob(self, request: Fields) -> Fields:
        """Fetch the large content of a message."""
        content = self._messages[request["message_id"]].blob()
        return {"content_base64": base64.b64encode(content).decode("ascii")}

    def job_open(self, request: Fields) -> Fields:
        """Make the publisher of a job."""
        door: Fields = {}
        if request["via"] == "http":
            door["hub"] = HubAccess(**request["hub"])
        else:
            # An installation without the extra `mqtt` has the other features.
            from trunkline_agent.mqtt import Broker

            broker = request["mqtt"]
            door["mqtt"] = Broker(
                broker["host"],
                broker["port"],
                broker["tls"],
                topic_prefix=broker["prefix"],
                receipt_timeout_s=request["receipt_timeout_s"],
            )
        self._jobs[request["job_id"]] = Job(
            request["job_id"],
            request["secret"],
            state_dir=Path(request["state_dir"]),
            patience_s=request["patience_s"],
            **door,
        )
        return {}

    def job_publish(self, request: Fields) -> Fields:
        """Publish an event of a job."""
        receipt = self._jobs[request["job_id"]].publish(request["event"], request["detail"], request["data"])
        place = receipt.position
        position = None if place is None else {"partition": place.partition, "offset": place.offset}
        shown = {name: getattr(receipt, name) for name in ("ce_id", "seq", "verdict", "reason")}
        return {"receipt": {**shown, "position": position}}

    def job_resend(self, request: Fields) -> Fields:
        """Send what is in the outbox of a job."""
        return {"count": self._jobs[request["job_id"]].resend()}

    def close(self, request: Fields) -> Fields:
        """End the agent."""
        del request
        if self._agent is not None:
            self._agent.close()
        return {}


_OPERATIONS: Final = [
    "hello",
    "canonical",
    "sign_event",
    "open",
    "send",
    "lease",
    "ack",
    "nack",
    "fail",
    "reply",
    "ask",
    "publish",
    "subscribe",
    "unsubscribe",
    "status",
    "discover",
    "schedule",
    "unschedule",
    "schedules",
    "upload",
    "blob",
    "job_open",
    "job_publish",
    "job_resend",
    "close",
]


def _shown(message: Message) -> Fields:
    return {name: getattr(message, name) for name in _SHOWN}


def _error(error: Exception) -> Fields:
    kind = next((kind for of, kind in _KINDS if isinstance(error, of)), "failed")
    return {
        "kind": kind,
        "reason": getattr(error, "reason", type(error).__name__),
        "retry_after_s": getattr(error, "retry_after_s", None),
        "message": str(error),
    }


def main() -> None:
    """Answer requests until `close`, or until the standard input ends."""
    adapter = Adapter()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        do = request["do"]
        answer: Fields
        try:
            if do not in _OPERATIONS:
                answer = {"error": {"kind": "unsupported", "reason": f"no operation {do}"}}
            else:
                operation: Callable[[Fields], Fields] = getattr(adapter, do)
                answer = {"ok": operation(request)}
        except Exception as error:  # noqa: BLE001  an answer of the protocol
            answer = {"error": _error(error)}
        print(json.dumps({"id": request["id"], **answer}), flush=True)
        if do == "close":
            return


if __name__ == "__main__":
    main()
