"""Nothing is taken for good for a client whose cable is out: a gateway and a client with a cable (DL-52)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from connectors.plumbing.network.sockets import silent_ms
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import LOOPBACK, STOP_S, program_environment, wait_until
from tests.network_namespaces import HUB, cabled_namespaces, may_make_namespaces, socket_in, unplug
from tests.tcp_proxy import TcpProxy

MESSAGES = "/api/hub/messages"
PORT = 3200  # nothing else listens in a new namespace


class ApartGateway:
    """A gateway in a namespace of its own, and requests to it from there or from the end of its cable."""

    def __init__(self, settings: Settings, hub: str, agent: str) -> None:
        self.settings, self._hub, self.agent = settings, hub, agent

    def connect(self, *, is_agent: bool = False) -> HTTPConnection:
        """A new connection, which the gateway's machine or the agent's makes."""
        found = HTTPConnection(HUB, PORT, timeout=30)
        found.sock = socket_in(
            self.agent if is_agent else self._hub, lambda: socket.create_connection((HUB, PORT), 30)
        )
        return found

    def ask(self, method: str, path: str, body: Any = None, token: str | None = None) -> Any:
        """The JSON, or the text, of an answer to the operator, or to the owner of a token."""
        connection = self.connect()
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, self.headers(token))
            answer = connection.getresponse()
            found = answer.read().decode()
            assert answer.status < 300, found
            return found if path == "/metrics" else json.loads(found)
        finally:
            connection.close()

    def headers(self, token: str | None = None) -> dict[str, str]:
        """The headers of a request with this token; None: the operator's."""
        token = token or self.settings.operator_token_file.read_text().strip()
        return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def waits(self) -> int:
        """The number of requests that wait for a message."""
        lines = self.ask("GET", "/metrics").splitlines()
        return int(float(next(one for one in lines if one.startswith("trunkline_mailbox_waits ")).split()[1]))


@pytest.fixture
def apart(backbone_settings: Settings, tmp_path: Path) -> Iterator[ApartGateway | None]:
    """A gateway on a machine of its own, which reaches Kafka by a proxy; None without root."""
    if not may_make_namespaces():
        yield None
        return
    kafka_port = int(backbone_settings.kafka.bootstrap_servers.rpartition(":")[2])
    changed = backbone_settings.gateway.model_copy(
        update={"host": HUB, "port": PORT, "allow_plaintext": True, "url": f"http://{HUB}:{PORT}"}
    )
    settings = backbone_settings.model_copy(update={"gateway": changed})
    ready = tmp_path / "ready"
    with ExitStack() as opened:
        hub, agent = opened.enter_context(cabled_namespaces())
        listener = socket_in(hub, lambda: socket.create_server((LOOPBACK, kafka_port)))
        opened.enter_context(closing(TcpProxy(listener, kafka_port)))
        log = opened.enter_context((tmp_path / "gateway.log").open("wb"))
        process = subprocess.Popen(
            ["ip", "netns", "exec", hub, sys.executable, "-m", "connectors.programs.gateway_program"],
            cwd=PROJECT_ROOT,
            env=program_environment(settings) | {"TRUNKLINE_READY_FILE": str(ready)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            wait_until(ready.exists, 60, f"ready file; log: {log.name}")
            yield ApartGateway(settings, hub, agent)
        finally:
            process.kill()
            process.wait(STOP_S)


@pytest.mark.requirement("DL-52")
@pytest.mark.timeout(180)
def test_a_drain_and_a_wait_for_a_reply_take_nothing_for_a_client_whose_cable_is_out(
    apart: ApartGateway | None,
) -> None:
    if apart is None:  # without root, there is no cable to take out
        return
    tokens = {
        name: apart.ask("POST", "/api/hub/principals", {"principal": name, "role": "worker"})["token"]
        for name in ("ann", "bo", "cy")
    }
    with closing(apart.connect(is_agent=True)) as drain, closing(apart.connect(is_agent=True)) as asking:
        drain.request("GET", f"{MESSAGES}?wait=120&limit=1", headers=apart.headers(tokens["ann"]))
        question = json.dumps({"recipient": "cy", "type": "ask", "payload": 1})
        asking.request("POST", f"{MESSAGES}?wait_reply=120", question, apart.headers(tokens["bo"]))
        (asked,) = apart.ask("GET", f"{MESSAGES}?wait=20", token=tokens["cy"])["messages"]
        wait_until(lambda: apart.waits() == 2, what="both wait")
        unplug(apart.agent)
        # A client of which the gateway heard within the last second is not probed.
        wait_until(lambda: min(silent_ms(one.sock) for one in (drain, asking)) > 1100, what="the silence")

        note = {"recipient": "ann", "type": "note", "payload": 2}
        reply = {"recipient": "bo", "type": "note", "payload": 3, "in_reply_to": asked["id"]}
        sent = [apart.ask("POST", MESSAGES, note), apart.ask("POST", MESSAGES, reply, tokens["cy"])]
        wait_until(lambda: apart.waits() == 0, what="both have ended")

    found = [apart.ask("GET", MESSAGES, token=tokens[name])["messages"] for name in ("ann", "bo")]
    assert [[one["id"] for one in messages] for messages in found] == [[one["message_id"]] for one in sent]
