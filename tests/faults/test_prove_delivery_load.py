"""The delivery clients of `./trunkline prove` at two real gateways, one of which is killed in the middle."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.programs.local_stack import free_port
from schemas.keys.sealing import ensure_keyring, load_keyring
from schemas.settings.settings import AgentMcpSettings, Settings
from tests.broker_processes import BrokerProcess, ProgramProcess
from tests.connectors.doors.http_api.hub_access import GatewayProcess, add_principal
from tests.connectors.doors.http_api.hub_stack import hub_settings
from tests.faults.prove.comparison import Finding, Line
from tests.faults.prove.delivery_checks import Outage
from tests.faults.prove.delivery_load import CONSUMED, LINA, NEEDED, DeliveryLoad, judge_deliveries
from tests.faults.prove.delivery_notes import ATTEMPTS_MOST, Deliveries
from tests.faults.prove.evidence import answered
from tests.faults.prove.hub_client import Clock, HubClient
from tests.faults.prove.load_messages import DORA, FOLA, HubSender, Words, mailbox
from tests.faults.prove.oracle import Oracle
from tests.faults.prove.schedule import draw_schedule
from tests.faults.test_pickers import folded

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

LOAD_S = 12.0
PATIENCE_S = 60.0
RECOVERED_S = 10.0


class ToTheTwo(Words):
    """Words for the mailboxes that are consumed and followed."""

    def next(self) -> tuple[str, str]:
        """The next recipient and text."""
        _, text = super().next()
        return self.draw.choice((DORA, FOLA)), text


@pytest.fixture
def gateways(kafka_broker: BrokerProcess, tmp_path: Path) -> Iterator[list[GatewayProcess]]:
    """Two gateways with an MCP door each."""
    found = [GatewayProcess(settings, tmp_path) for settings in two_settings(kafka_broker, tmp_path)]
    try:
        for gateway in found:
            gateway.wait_ready()
        yield found
    finally:
        for gateway in found:
            gateway.program.kill()


def two_settings(broker: BrokerProcess, folder: Path) -> list[Settings]:
    """Settings of two gateways on one data directory."""
    settings = hub_settings(broker, folder)
    ensure_keyring(settings)
    gateway = settings.gateway.model_copy(update={"max_attempts": ATTEMPTS_MOST})
    return [
        settings.model_copy(
            update={"gateway": gateway, "agent_mcp": AgentMcpSettings(port=free_port(), export_interval_ms=0)}
        )
        for _ in range(2)
    ]


class Run:
    """One run of the load; `findings` when it is over."""

    def __init__(self, gateways: list[GatewayProcess], folder: Path) -> None:
        self._gateways, self._folder = gateways, folder
        self._clock = Clock()
        self._clients: list[HubClient] = []
        self._clock.begin(0.0, PATIENCE_S)
        self._settings = gateways[0].settings
        self.oracle = Oracle(folder / "oracle.jsonl")
        self.log = Deliveries(folder / "deliveries.jsonl")
        with gateways[0].client() as operator:
            self.load = DeliveryLoad(
                [gateway.url for gateway in gateways],
                [gateway.settings.mcp_server_url for gateway in gateways],
                lambda name: add_principal(operator, name, "worker"),
                self._client(gateways[0].operator_token),
                self.log,
                self.oracle,
                self._clock,
                seed=1,
            )
            self._senders = [
                HubSender(
                    self._client(add_principal(operator, name, "worker")),
                    ToTheTwo(draw_schedule(1), name),
                    self.oracle,
                    self._clock,
                )
                for name in ("hugo", "hedy")
            ]
        self.troubles: list[str] = []
        self.outages: list[Outage] = []
        self.findings: list[Finding] = []

    def _client(self, token: str) -> HubClient:
        self._clients.append(HubClient([self._gateways[0].url], token, self._clock, seed=1))
        return self._clients[-1]

    def run(self) -> None:
        """Load, a kill of the second gateway, and the end of all threads."""
        self._clock.begin(LOAD_S, PATIENCE_S)
        sending = [self._thread("Sender", sender.run) for sender in self._senders]
        threads = [
            self._thread(name, run)
            for name, run in self.load.runs(lambda: not any(thread.is_alive() for thread in sending))
        ]
        time.sleep(LOAD_S / 2)
        peer = self._gateways[1]
        for url in (peer.url, peer.settings.mcp_server_url):
            self.outages.append(Outage(url, time.time(), time.time() + RECOVERED_S))
        peer.program.kill()
        peer.program = ProgramProcess(
            "connectors.programs.gateway_program", peer.settings, self._folder, "again"
        )
        for thread in (*sending, *threads):
            thread.join(PATIENCE_S + LOAD_S)
        for client in (self.load, *self._clients):
            client.close()
        self._judge()

    def _thread(self, name: str, run: object) -> threading.Thread:
        def guarded() -> None:
            try:
                run()  # type: ignore[operator]
            except BaseException as error:  # a thread's error would be lost
                self.troubles.append(f"{name}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _judge(self) -> None:
        shown = answered("gateway", self._gateways[0].url, self._settings, {*CONSUMED, mailbox(LINA)})
        self.findings = judge_deliveries(
            self.log, self.oracle, shown.mail, posted(self._settings), self.outages, is_at_rest=True
        )


def posted(settings: Settings) -> list[Line]:
    """The accepted messages and claims in the log."""
    found = []
    for record, verdict in folded(settings, load_keyring(settings)):
        headers = dict(zip(record.header_names, record.header_values, strict=True))
        kind = headers["ce_type"].decode()
        if kind not in ("message.posted", "message.claimed") or verdict != "accepted" or record.key is None:
            continue
        body = json.loads(record.value or b"")
        line = Line(
            record.partition,
            record.offset,
            record.key.decode(),
            kind,
            verdict,
            body.get("message_id", ""),
            request=body.get("request_id", ""),
        )
        found.append(line)
    return found


@pytest.mark.requirement("DL-01")
@pytest.mark.requirement("DL-02")
@pytest.mark.requirement("DL-03")
@pytest.mark.requirement("DL-04")
@pytest.mark.requirement("DL-05")
@pytest.mark.requirement("DL-06")
@pytest.mark.requirement("DL-07")
@pytest.mark.requirement("LM-07")
def test_careless_consumers_followers_and_askers_see_what_was_promised(
    gateways: list[GatewayProcess], tmp_path: Path
) -> None:
    run = Run(gateways, tmp_path)
    run.run()
    print(*run.troubles, *run.findings, sep="\n")
    assert run.troubles == []
    assert run.findings == []
    done = run.load.done()
    assert [name for name in NEEDED if not done.get(name)] == []
