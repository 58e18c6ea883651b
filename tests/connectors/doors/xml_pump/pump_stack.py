"""A gateway with listeners, pumps as processes, and somebody who posts XML and reads the answers."""

from __future__ import annotations

import json
import re
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import AgentMcpSettings, LimitSettings, Settings, XmlPumpSettings
from tests.broker_processes import BrokerProcess, ProgramProcess, kafka_at, wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess, add_principal
from tests.connectors.doors.xml_pump.pump_handlers import FOLDER_VARIABLE, SPACE
from tests.own_settings import make_topic
from tests.raw_records import read_to_end

HANDLERS = "tests.connectors.doors.xml_pump.pump_handlers"
ENVELOPE = "urn:trunkline:envelope:1"
HUH = "huh"


def listener(name: str, root_tag: str, handler: str, **more: Any) -> dict[str, Any]:
    """An entry of the organism's file."""
    return {"name": name, "root_tag": root_tag, "namespace": SPACE, "handler": f"{HANDLERS}:{handler}", **more}


def document(payload: str, to: str | None = None, head: str = "") -> bytes:
    """An envelope with a payload of the tests' namespace."""
    named = "" if to is None else f"<to>{to}</to>"
    return f'<message xmlns="{ENVELOPE}">{head}{named}{payload}</message>'.encode()


def element(tag: str, **fields: object) -> str:
    """A payload of the tests' namespace."""
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return f'<{tag} xmlns="{SPACE}">{inside}</{tag}>'


class Poster:
    """A worker: posts XML, and reads its mailbox."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self.client = client
        self.name = name
        self.read: list[dict[str, Any]] = []

    def post(self, body: bytes, **more: Any) -> httpx.Response:
        """Post a document."""
        return self.client.post("/messages", content=body, headers={"Content-Type": "application/xml"}, **more)

    def send(self, payload: str, to: str | None = None) -> list[str]:
        """Post a payload that is taken; the ids of its messages."""
        answer = self.post(document(payload, to))
        assert answer.status_code == 202, answer.text
        return re.findall(r'<message id="([^"]+)"', answer.text)

    def answers(self, at_least: int, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        """All that has come so far, once it is as much: sender, type, text."""

        def enough() -> bool:
            drained = self.client.get("/api/hub/messages", params={"limit": 1000}).json()["messages"]
            for one in drained:
                self.read.append(
                    {"sender": one["sender"], "type": one["type"], "text": one["payload"].get("text", "")}
                )
            return len(self.read) >= at_least

        wait_until(enough, timeout_s, f"{at_least} answers")
        return self.read


class PumpStack:
    """One gateway over a topic of its own. Pumps find the tests' handlers, which note into `folder`."""

    def __init__(self, settings: Settings, folder: Path, gateway: GatewayProcess, opened: ExitStack) -> None:
        self.settings = gateway.settings
        self.folder = folder
        self.gateway = gateway
        self._opened = opened
        self.operator = opened.enter_context(gateway.client())
        self.pumps: list[ProgramProcess] = []
        self._numbers = iter(range(1, 1000))

    def poster(self, role: str = "worker") -> Poster:
        """A new principal."""
        name = f"{role}-{next(self._numbers)}"
        token = add_principal(self.operator, name, role)
        return Poster(self._opened.enter_context(self.gateway.client(token)), name)

    def start_pump(self, settings: Settings | None = None, *, wait: bool = True) -> ProgramProcess:
        """One more pump."""
        number = next(self._numbers)
        pump = ProgramProcess(
            "connectors.doors.xml_pump", settings or self.settings, self.folder, f"pump{number}"
        )
        self.pumps.append(pump)
        if wait:
            pump.wait_ready()
        return pump

    def end_pumps(self) -> None:
        """End all pumps in order: what a killed one has asked for may still be handed out to it."""
        for pump in self.pumps:
            pump.process.send_signal(signal.SIGTERM)
        for pump in self.pumps:
            pump.stop()
        self.pumps.clear()

    def notes(self, what: str) -> list[dict[str, Any]]:
        """Return the notes of the handlers."""
        file = self.folder / f"{what}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_notes(self, what: str, count: int, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        """The same, once there are so many."""
        wait_until(lambda: len(self.notes(what)) >= count, timeout_s, f"{count} notes of {what}")
        return self.notes(what)

    def forget(self, *names: str) -> None:
        """Remove files of the folder."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def records(self) -> list[dict[str, Any]]:
        """All records of mailboxes: type, stream, body."""
        return [
            {
                "type": dict(record.headers)["ce_type"].decode(),
                "stream": record.key.decode(),
                "body": json.loads(record.value),
            }
            for record in read_to_end(self.settings.kafka)
            if record.key.startswith(b"mailbox/")
        ]

    def messages(self, **fields: str) -> list[dict[str, Any]]:
        """Rows of `GET /api/hub/listeners` by name."""
        return list(self.operator.get("/api/hub/listeners", params=fields).json()["listeners"])


@contextmanager
def pump_stack(
    kafka: BrokerProcess, folder: Path, organism: Mapping[str, Sequence[dict[str, Any]] | dict[str, Any]]
) -> Iterator[PumpStack]:
    """A gateway that has loaded an organism."""
    own = uuid.uuid4().hex[:12]
    file = folder / "organism.yaml"
    file.write_text(yaml.safe_dump(dict(organism)))
    settings = Settings(
        data_dir=folder / "data",
        kafka=kafka_at(kafka.port, topic=f"test.{own}", delivery_timeout_s=10),
        limits=LimitSettings(payload_bytes=256 * 1024),
        agent_mcp=AgentMcpSettings(export_interval_ms=0),
        xml_pump=XmlPumpSettings(organism_file=file, lease_margin_s=2.0, processes=2),
    )
    ensure_keyring(settings)
    make_topic(settings)
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        patch.setenv("PYTHONPATH", str(folder))
        gateway = GatewayProcess(settings, folder)
        try:
            gateway.wait_ready()
            stack = PumpStack(settings, folder, gateway, opened)
            wait_until(lambda: len(stack.messages()) > 0, what="the organism is loaded")
            try:
                yield stack
            finally:
                stack.end_pumps()
        finally:
            gateway.program.kill()
