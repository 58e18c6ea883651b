"""A gateway and an MQTT bridge over one log, agents over MQTT, and what tests ask of them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from schemas.keys.sealing import Keyring
from schemas.settings.settings import GatewaySettings, Settings
from tests.broker_processes import ProgramProcess, wait_until, with_mqtt
from tests.connectors.doors.http_api.hub_access import GatewayProcess, add_principal
from tests.faults.test_pickers import folded
from tests.mailbox_credentials import mailbox_credentials
from tests.mqtt_wire import publish_all
from trunkline_agent.credentials import Credentials
from trunkline_agent.mqtt.inbox_receiver import InboxMessage
from trunkline_agent.mqtt.mqtt_agent import MqttAgent
from trunkline_agent.wire.topics import inbox_topic, outbox_topic

MESSAGES = "/api/hub/messages"


class MailRun:
    """`close` ends what was started. `bridge_module` is the program that bridges."""

    def __init__(self, settings: Settings, keyring: Keyring, folder: Path) -> None:
        own = GatewaySettings(reactor_group=f"reactor-{settings.kafka.topic}")
        wanted = with_mqtt(settings, inbox_retry_s=0.5, receipt_verdict_wait_s=10)
        self.gateway = GatewayProcess(wanted.model_copy(update={"gateway": own}), folder)
        self.settings = self.gateway.settings
        self._keyring, self.folder = keyring, folder
        self.bridge = self.started()
        self.gateway.wait_ready()
        self.operator: httpx.Client = self.gateway.client()
        self.bridge.wait_ready()
        # Receipts have no verdict before: the bridge began first, and asks for the stream now and then.
        wait_until(lambda: "verdicts_open" in self.bridge.log(), what="the verdict stream")

    def started(self, module: str = "connectors.doors.mqtt_bridge", name: str = "bridge") -> ProgramProcess:
        """A bridge that has been started and may not be ready yet."""
        return ProgramProcess(module, self.settings, self.folder, name)

    def close(self) -> None:
        """End bridge and gateway."""
        self.operator.close()
        if self.bridge.process.poll() is None:
            self.bridge.stop()
        self.gateway.program.stop()

    def register(self, name: str) -> Credentials:
        """Register an agent for MQTT."""
        answer = self.operator.post(f"/api/hub/agents/{name}/mqtt")
        assert answer.status_code == 201, answer.text
        told = answer.json()
        return mailbox_credentials(self.settings, name, told["secret"])

    def agent(self, name: str, credentials: Credentials | None = None) -> Agent:
        """An agent over MQTT, registered unless it was, not open yet."""
        return Agent(self, credentials or self.register(name))

    def principal(self, name: str) -> httpx.Client:
        """Add a worker; a client with its token."""
        return self.gateway.client(add_principal(self.operator, name, "worker"))

    def post(self, recipient: str, payload: Any, kind: str = "note") -> str:
        """Send as the operator by HTTP; returns the message's id."""
        body = {"recipient": recipient, "type": kind, "payload": payload}
        answer = self.operator.post(MESSAGES, json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["message_id"])

    def mailbox(self, name: str) -> dict[str, dict[str, Any]]:
        """The messages of a mailbox by id."""
        answer = self.operator.get(f"/api/hub/mailboxes/default/{name}", params={"limit": 1000})
        assert answer.status_code == 200, answer.text
        return {message["message_id"]: message for message in answer.json()["messages"]}

    def wait_status(self, name: str, ids: Sequence[str], status: str = "claimed") -> None:
        """Wait until these messages of a mailbox have this status."""
        wait_until(
            lambda: {self.mailbox(name).get(one, {}).get("status") for one in ids} == {status},
            30,
            f"{len(ids)} messages of {name} are {status}",
        )

    def say(self, name: str, *payloads: bytes) -> None:
        """Publish raw payloads on an outbox, as somebody who does not use the client."""
        mqtt = self.settings.mqtt.model_copy(update={"topic_prefix": self.settings.mqtt.agents_prefix})
        publish_all(mqtt, [(f"{name}/outbox", payload) for payload in payloads])

    def topics(self, name: str) -> tuple[str, str]:
        """Inbox and outbox."""
        prefix = self.settings.mqtt.agents_prefix
        return inbox_topic(prefix, name), outbox_topic(prefix, name)

    def log(self, kind: str) -> list[tuple[str, str, bytes]]:
        """Stream, verdict and body of each record of a type."""
        found = []
        for record, verdict in folded(self.settings, self._keyring):
            headers = dict(zip(record.header_names, record.header_values, strict=True))
            if headers["ce_type"] == kind.encode():
                found.append((record.key.decode(), verdict, record.value))
        return found

    def verdicts(self, kind: str, stream: str | None = None) -> Counter[str]:
        """How often each verdict was said of a type of record."""
        return Counter(verdict for key, verdict, _ in self.log(kind) if stream in (None, key))


class Agent:
    """An agent over MQTT and what it has received. `with` it to be connected."""

    def __init__(self, run: MailRun, credentials: Credentials) -> None:
        self.run, self.credentials = run, credentials
        self.name = credentials.name
        self.got: list[InboxMessage] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._open: MqttAgent | None = None

    def __enter__(self) -> MqttAgent:
        folder = self.run.folder / "agents"
        self._open = MqttAgent(self.credentials, folder, self._receive, broker=self.run.settings.mqtt)
        return self._open.__enter__()

    def __exit__(self, *_: object) -> None:
        assert self._open is not None
        self._open.close()

    def _receive(self, message: InboxMessage) -> None:
        assert self.may_go_on.wait(30)
        self.got.append(message)

    def ids(self) -> list[str]:
        """Return the ids of the received messages."""
        return [message.message_id for message in self.got]

    def wait(self, count: int) -> list[InboxMessage]:
        """Wait until so many came."""
        wait_until(lambda: len(self.got) >= count, 30, f"{count} messages for {self.name}")
        return self.got


def body_of(message: InboxMessage) -> Any:
    """The body of a message that is JSON."""
    return json.loads(message.body)
