"""Floods of connections at each listener of a gateway, by several processes, and legitimate clients beside."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.plumbing.tls_keys.tls_files import create
from schemas.settings.settings import DashboardSettings, Settings
from tests.broker_processes import LOOPBACK, BrokerProcess, ProgramProcess, free_port, wait_until
from tests.connection_flood import Flood, assert_slows_nobody
from tests.connectors.doors.http_api.hub_access import add_principal
from tests.connectors.doors.mcp_tools.conftest import Agent, McpGateway
from tests.connectors.doors.mcp_tools.signed_calls import SignedCaller
from tests.own_settings import own_settings

BUDGET = 40
TIMEOUT_S = 2.0
# The pause after each request of the legitimate clients; a round is long enough for some hundred of them.
PAUSE_S = 0.01
ROUND_S = 2.0


@pytest.fixture(scope="module")
def gateway(
    kafka_broker: BrokerProcess, mosquitto_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[McpGateway]:
    """A gateway with all of its listeners, small budgets and short time-outs, for all tests of the file."""
    folder = tmp_path_factory.mktemp("bounded")
    own = own_settings(kafka_broker, mosquitto_broker, folder)
    bounds = {
        "anonymous_connections": BUDGET,
        "connections": BUDGET,
        "head_timeout_s": TIMEOUT_S,
        "body_timeout_s": TIMEOUT_S,
    }
    settings = own.model_copy(
        update={
            "dashboard": DashboardSettings(port=free_port()),
            "gateway": own.gateway.model_copy(update=bounds),
        }
    )
    found = McpGateway(settings, folder)
    try:
        found.wait_ready()
        yield found
    finally:
        found.program.kill()


def ports_of(gateway: McpGateway) -> dict[str, int]:
    settings = gateway.settings
    return {
        "hub": settings.gateway.port,
        "agent_mcp": settings.agent_mcp.port,
        "dashboard": settings.dashboard.port,
    }


def metric(gateway: McpGateway, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    with gateway.client("") as client:
        lines = client.get("/metrics").text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = [line for line in lines if line.startswith(f"{name}{{") and all(one in line for one in wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


class Legitimate:
    """Clients of all listeners, some with a connection that they keep, some with a new one for each request."""

    def __init__(self, gateway: McpGateway, agent: Agent, stack: ExitStack) -> None:
        self._gateway = gateway
        token = gateway.operator_token
        page = f"http://{LOOPBACK}:{gateway.settings.dashboard.port}"
        kept_hub = stack.enter_context(gateway.client())
        kept_page = stack.enter_context(
            httpx.Client(base_url=page, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        )
        kept_agent = stack.enter_context(SignedCaller(agent, gateway))

        def new_hub() -> None:
            with gateway.client() as client:
                client.get("/api/hub/agents").raise_for_status()

        def new_agent() -> None:
            with SignedCaller(agent, gateway) as caller:
                caller.call("discover_agents")

        def login() -> None:
            with httpx.Client(base_url=page, trust_env=False) as client:
                client.post("/api/login", json={"token": token}).raise_for_status()

        self.asks: dict[str, Callable[[], Any]] = {
            "hub, kept": lambda: kept_hub.get("/api/hub/agents").raise_for_status(),
            "hub, new": new_hub,
            "hub, health": lambda: httpx.get(f"{gateway.url}/healthz", trust_env=False).raise_for_status(),
            "agent_mcp, kept": lambda: kept_agent.call("discover_agents"),
            "agent_mcp, new": new_agent,
            "dashboard, kept": lambda: kept_page.get("/api/snapshot").raise_for_status(),
            "dashboard, new": login,
        }

    def measure(self, seconds: float) -> list[float]:
        """Ask in turns for so long; returns how long each request took, in seconds. Raises what failed."""
        taken: list[float] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name, ask in self.asks.items():
                began = time.monotonic()
                try:
                    ask()
                except Exception as error:
                    raise AssertionError(f"{name}: {error!r}") from error
                taken.append(time.monotonic() - began)
                time.sleep(PAUSE_S)
        return taken


@pytest.mark.undisturbed
@pytest.mark.requirement("SE-10")
def test_twice_the_budget_of_idle_and_slow_connections_at_each_listener_slows_no_legitimate_client(
    gateway: McpGateway, tmp_path: Path
) -> None:
    ports = ports_of(gateway)
    paths = {"hub": "/api/hub/messages", "agent_mcp": "/mcp", "dashboard": "/api/login"}
    with gateway.client() as operator, ExitStack() as stack:
        worker = add_principal(operator, f"worker-{uuid.uuid4().hex[:6]}", "worker")
        agent = Agent(f"agent-{uuid.uuid4().hex[:6]}", tmp_path).joined(operator)
        legitimate = Legitimate(gateway, agent, stack)
        legitimate.measure(ROUND_S / 4)
        floods = [
            Flood(port, kind, BUDGET, paths[name])
            for name, port in ports.items()
            for kind in ("silent", "head", "body")
        ]
        floods.append(Flood(ports["hub"], "body", 2 * BUDGET, paths["hub"], token=worker))

        def within_the_budgets() -> None:
            assert metric(gateway, "trunkline_connections") <= 2 * BUDGET

        counted = assert_slows_nobody(floods, lambda: legitimate.measure(ROUND_S), within_the_budgets)
        assert sum(one["opened"] for one in counted) >= 11 * BUDGET
        for listener in ports:
            assert metric(gateway, "trunkline_connections_cut_total", listener=listener) > BUDGET
        assert metric(gateway, "trunkline_connections_cut_total", reason="principal_share") >= BUDGET
    log = [json.loads(line) for line in gateway.program.log().splitlines()]
    cut = [line for line in log if line["event"] == "connection_cut"]
    # Hundreds were cut; each kind has a line every few seconds.
    assert 0 < len(cut) < 30
    assert not [line for line in log if line["level"] == "error"]


def ended_after(port: int, sent: bytes, within_s: float, drip: bytes = b"") -> tuple[float, bytes]:
    """How long a connection with these bytes lasts, in seconds, and what came on it."""
    began, received = time.monotonic(), b""
    with socket.create_connection((LOOPBACK, port), timeout=0.1) as connection:
        connection.sendall(sent)
        while time.monotonic() - began < within_s:
            try:
                found = connection.recv(65536)
                if not found:
                    return time.monotonic() - began, received
                received += found
            except TimeoutError:
                try:
                    connection.sendall(drip)
                except ConnectionError:
                    return time.monotonic() - began, received
            except ConnectionError:
                return time.monotonic() - began, received
    pytest.fail(f"still open after {within_s} s: {received!r}")


@pytest.mark.requirement("SE-11")
def test_a_client_has_a_bounded_time_for_head_body_and_silence_at_each_listener(gateway: McpGateway) -> None:
    cases: dict[str, tuple[int, bytes, bytes]] = {}
    for name, port in ports_of(gateway).items():
        host = f"Host: {LOOPBACK}:{port}\r\n".encode()
        cases[f"{name}: silent"] = (port, b"", b"")
        cases[f"{name}: slow head"] = (port, b"GET / HTTP/1.1\r\n" + host, b"X-Slow: 1\r\n")
        # Answered at once: the body that goes on coming is no reason to stay.
        cases[f"{name}: body of a refused request"] = (
            port,
            b"POST /no/such/path HTTP/1.1\r\n" + host + b"Content-Length: 100000\r\n\r\n",
            b"x",
        )
        cases[f"{name}: idle"] = (port, b"GET /healthz HTTP/1.1\r\n" + host + b"\r\n", b"")
    token = f"Authorization: Bearer {gateway.operator_token}\r\n".encode()
    hub = ports_of(gateway)["hub"]
    cases["hub: slow body with a token"] = (
        hub,
        b"POST /api/hub/messages HTTP/1.1\r\nHost: x\r\n" + token + b"Content-Length: 100000\r\n\r\n",
        b" ",
    )
    lasted: dict[str, tuple[float, bytes]] = {}

    def run(name: str) -> None:
        port, sent, drip = cases[name]
        lasted[name] = ended_after(port, sent, 20, drip)

    threads = [threading.Thread(target=run, args=(name,)) for name in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert lasted.keys() == cases.keys()
    # Noticed by a look each second; a body that no handler reads has two seconds more.
    assert {name: seconds for name, (seconds, _) in lasted.items() if seconds < TIMEOUT_S - 0.5} == {}
    assert b" 408 " in lasted["hub: slow body with a token"][1]


@pytest.mark.requirement("SE-11")
def test_a_stream_of_events_outlives_every_time_out(gateway: McpGateway) -> None:
    with gateway.client() as operator, operator.stream("GET", "/api/hub/verdicts") as stream:
        lines = stream.iter_lines()
        deadline = time.monotonic() + TIMEOUT_S + 4
        while time.monotonic() < deadline:
            next(lines)
        assert metric(gateway, "trunkline_connections", listener="hub", state="authenticated") >= 1


@pytest.mark.requirement("SE-13")
def test_requests_that_are_no_http_are_logged_at_a_bounded_rate(gateway: McpGateway) -> None:
    def lines() -> int:
        return gateway.program.log().count("Invalid HTTP request received.")

    before = lines()
    for _ in range(200):
        with socket.create_connection((LOOPBACK, gateway.settings.gateway.port), timeout=5) as connection:
            connection.sendall(b"\x16\x03\x01 no http\r\n\r\n")
            while connection.recv(4096):
                pass
    wait_until(lambda: lines() > before, what="a line of it")
    assert lines() - before <= 3


@pytest.mark.requirement("SE-15")
def test_requests_of_strangers_are_logged_at_a_bounded_rate_and_all_others_each(gateway: McpGateway) -> None:
    begun = len(gateway.program.log().splitlines())
    strangers, wanted = 0, 0
    page = f"http://{LOOPBACK}:{gateway.settings.dashboard.port}"
    mcp = f"http://{LOOPBACK}:{gateway.settings.agent_mcp.port}/mcp"
    with gateway.client() as operator, gateway.client("wrong") as stranger:
        for number in range(60):
            for url in ("/api/hub/agents", "/no/such/path", mcp, f"{page}/api/snapshot", f"{page}/page"):
                assert stranger.get(url).status_code < 500
                strangers += 1
            if number % 10 == 0:
                operator.get("/api/hub/tasks?limit=1").raise_for_status()
                wanted += 1

    def lines(principal: bool) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in gateway.program.log().splitlines()[begun:]]
        requests = [one for one in found if one["event"] in ("request", "requests_omitted")]
        return [one for one in requests if bool(one.get("principal")) is principal]

    def counted() -> int:
        found = lines(principal=False)
        return sum(one.get("omitted", 0) + (one["event"] == "request") for one in found)

    # Lines that were left out are counted even when no line of their kind follows.
    wait_until(lambda: counted() >= strangers, 15, f"{strangers} requests in the log")
    assert counted() == strangers
    assert len(lines(principal=False)) <= strangers / 6
    assert len([one for one in lines(principal=True) if one["route"] == "/api/hub/tasks"]) == wanted


def still_open(connections: list[socket.socket]) -> int:
    """How many have not been ended by the other side."""
    count = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            connection.recv(4096)
        except BlockingIOError:
            count += 1
        except ConnectionError:
            continue
    return count


@pytest.mark.requirement("SE-11")
def test_handshakes_that_never_end_are_counted_bounded_and_ended(
    backbone_settings: Settings, tmp_path: Path
) -> None:
    made = create(tmp_path / "tls")
    changes = {
        "port": free_port(),
        "certfile": made.of("gateway").certificate,
        "keyfile": made.of("gateway").key,
        "ca_certs": made.of("ca").certificate,
        "anonymous_connections": BUDGET,
        "head_timeout_s": TIMEOUT_S,
    }
    section = backbone_settings.gateway.model_copy(update=changes)
    settings = backbone_settings.model_copy(update={"gateway": section})
    program = ProgramProcess("connectors.programs.gateway_program", settings, tmp_path)
    trusted = ssl.create_default_context(cafile=str(made.of("ca").certificate))
    try:
        program.wait_ready()
        with ExitStack() as stack:
            held = [
                stack.enter_context(socket.create_connection((LOOPBACK, section.port), timeout=5))
                for _ in range(3 * BUDGET)
            ]
            for number in range(20):
                answer = httpx.get(f"{settings.gateway_url}/healthz", verify=trusted, trust_env=False)
                assert answer.status_code == 200, number
            assert still_open(held) <= BUDGET
            wait_until(lambda: still_open(held) == 0, 10, "the end of all handshakes")
            # Not TLS at all.
            with socket.create_connection((LOOPBACK, section.port), timeout=5) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while connection.recv(4096):
                    pass
        page = httpx.get(f"{settings.gateway_url}/metrics", verify=trusted, trust_env=False).text
        assert 'trunkline_connections{listener="hub",state="anonymous"} 1.0' in page
        assert '"level": "error"' not in program.log()
    finally:
        program.kill()
