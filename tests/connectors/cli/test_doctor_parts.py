"""The doctor's findings about the parts of a stack: each part, each pump, each listener."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from connectors.cli.doctor.doctor_command import CHECKS
from connectors.cli.doctor.findings import FAIL, OK, WARN, check_files, check_organism, check_xml_pump
from connectors.cli.doctor.gateway import check_gateway
from connectors.cli.shared.call import Call
from connectors.cli.stack import up_command
from connectors.doors.file_bridge.records import Progress, progress_file
from connectors.plumbing.machine import state_file
from connectors.plumbing.tls_keys.tls_files import TlsFolder, create
from connectors.programs.local_stack import free_port
from connectors.programs.local_stack.part_plan import ALL_PARTS, MOSQUITTO
from schemas.settings.settings import (
    AgentMcpSettings,
    DashboardSettings,
    GatewaySettings,
    Settings,
    XmlPumpSettings,
)
from trunkline_agent.errors import UsageError

LOOPBACK = "127.0.0.1"
READY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def stack_of(settings: Settings, **parts: tuple[str, int, bool]) -> None:
    """The state file of a stack that this process runs; of each part state, restarts, and whether it lives."""
    own = state_file.identity()
    gone = own | {"created": own["created"] - 1000}
    told = {
        name: {
            "state": state,
            "restarts": restarts,
            "failure": None,
            "waits_for": None,
            "summary": name,
            **(own if lives else gone),
        }
        for name, (state, restarts, lives) in parts.items()
    }
    state_file.write_state(settings, {"supervisor": own, "phase": state_file.RUNNING, "parts": told})


def test_every_part_of_the_stack_has_a_check() -> None:
    assert {"mqtt" if part == MOSQUITTO else part for part in ALL_PARTS} <= CHECKS.keys()


@pytest.mark.requirement("LM-08")
def test_lines_of_the_file_queue_that_wait_are_a_warning_with_few_names(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    stack_of(settings, files=("ready", 0, True))
    assert check_files(settings).level == OK
    held = {f"a{number}": "mailbox_full" for number in range(7)}
    Progress(held={"default": held, "other": {"bo": "rate_limited"}}).save(progress_file(settings))
    found = check_files(settings)
    assert found.level == WARN and "default/a0 (mailbox_full)" in found.found
    assert found.found.count("mailbox_full") == 5 and found.found.endswith(", and 3 more")
    stack_of(settings, files=("ready", 0, False))
    assert check_files(settings).level != OK


@pytest.mark.requirement("FQ-18")
def test_a_session_of_the_file_queue_that_is_not_carried_is_a_warning_with_its_reason(
    tmp_path: Path,
) -> None:
    settings = Settings(data_dir=tmp_path)
    stack_of(settings, files=("ready", 0, True))
    why = "messages.jsonl: not a regular file\x1b[1m"
    Progress(stuck={"build": why}, held={"default": {"bo": "rate_limited"}}).save(progress_file(settings))
    found = check_files(settings)
    assert found.level == WARN
    assert "build (messages.jsonl: not a regular file\\x1b[1m)" in found.found
    assert "trunkline logs files" in found.mend


def test_pumps_that_are_not_started_are_told_unless_none_is_to_run(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    found = check_xml_pump(settings)
    assert (found.level, found.found) == (WARN, "not started by this stack")
    none = settings.model_copy(update={"xml_pump": XmlPumpSettings(processes=0)})
    assert check_xml_pump(none).level == OK
    stack_of(settings, kafka=("ready", 0, True))
    assert check_xml_pump(settings).level == WARN


def test_a_pump_that_lives_is_well_and_one_that_died_names_its_log(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    stack_of(settings, xml_pump=("ready", 0, True))
    assert (check_xml_pump(settings).level, check_xml_pump(settings).found) == (OK, "ready, restarts: 0")
    stack_of(settings, xml_pump=("ready", 2, True))
    died = check_xml_pump(settings)
    assert died.level == WARN and "trunkline logs xml_pump says why" in died.mend
    stack_of(settings, xml_pump=("ready", 0, False))
    gone = check_xml_pump(settings)
    assert gone.level == FAIL and gone.found.startswith("stopped")


@pytest.mark.requirement("OP-08")
def test_a_listener_with_an_agents_name_is_named_by_doctor_and_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    organism, agents = tmp_path / "organism.yaml", tmp_path / "agents"
    agents.mkdir()
    (agents / "ann.json").write_text('{"name": "ann", "image": "x"}')
    settings = Settings(
        data_dir=tmp_path / "data",
        gateway=GatewaySettings(agents_dir=agents),
        xml_pump=XmlPumpSettings(organism_file=organism),
    )
    organism.write_text("listeners: [{name: bob, type: human}]")
    assert check_organism(settings).level == OK
    organism.write_text("listeners: [{name: bob, type: human}, {name: ann, type: human}]")
    found = check_organism(settings)
    assert found.level == FAIL
    assert f"{organism}: listener ann: an agent in {agents} has this name" in found.found
    with pytest.raises(UsageError, match="no such part: nothing"):
        up_command.run(Call(only="gateway,nothing", timeout=1.0, profile=None, settings=settings))
    assert f"{organism}: listener ann: an agent in {agents} has this name" in capsys.readouterr().err


@pytest.mark.requirement("OP-05")
def test_a_part_that_does_not_answer_fails_the_doctor_by_this_name(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, gateway=GatewaySettings(port=free_port()))
    stack_of(settings, gateway=("unresponsive", 0, True))
    found = check_gateway(settings)
    assert found.level == FAIL
    assert "unresponsive, restarts: 0: runs and does not answer" in found.found


def test_of_several_pumps_the_worst_is_told_with_the_log_that_is_its_own(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    lives = ("ready", 0, True)
    stack_of(settings, xml_pump=lives, xml_pump_2=("waiting", 3, False), xml_pump_3=lives)
    found = check_xml_pump(settings)
    assert found.level == FAIL
    assert "xml_pump_2: waiting, restarts: 3" in found.found and "xml_pump_3: ready" in found.found
    assert "trunkline logs xml_pump_2" in found.mend


@contextmanager
def listener(pair: TlsFolder | None) -> Iterator[tuple[int, list[bytes]]]:
    """Answers all requests with 200, under TLS where there is a pair: its port, and what it was asked."""
    asked: list[bytes] = []
    context = None
    if pair is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.of("gateway").certificate, pair.of("gateway").key)
    server = socket.create_server((LOOPBACK, 0))

    def answer() -> None:
        while True:
            try:
                plain, _ = server.accept()
            except OSError:
                return
            with plain:
                plain.settimeout(5)
                try:
                    peer = plain if context is None else context.wrap_socket(plain, server_side=True)
                    if request := peer.recv(4096):
                        asked.append(request)
                        peer.sendall(READY)
                    peer.close()
                except OSError:
                    continue

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1], asked
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TlsFolder:
    return create(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> TlsFolder:
    return create(tmp_path_factory.mktemp("strangers"))


def gateway_at(
    folder: Path, hub: int, agent_mcp: int, dashboard: int, pair: TlsFolder | None = None
) -> Settings:
    """Settings of a stack whose gateway listens on these ports, under TLS where there is a pair."""
    tls = (
        {} if pair is None else {"certfile": pair.of("gateway").certificate, "keyfile": pair.of("gateway").key}
    )
    ca = None if pair is None else pair.of("ca").certificate
    settings = Settings(
        data_dir=folder,
        gateway=GatewaySettings(port=hub, ca_certs=ca, **tls),
        agent_mcp=AgentMcpSettings(port=agent_mcp),
        dashboard=DashboardSettings(port=dashboard),
    )
    stack_of(settings, gateway=("ready", 0, True))
    return settings


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_gateways_other_listeners_are_opened_and_asked_nothing(
    tmp_path: Path, ours: TlsFolder, tls: bool
) -> None:
    pair = ours if tls else None
    with listener(pair) as (hub, _), listener(pair) as (mcp, asked), listener(pair) as (page, _):
        found = check_gateway(gateway_at(tmp_path, hub, mcp, page, pair))
    assert found.level == OK, found
    assert found.found.endswith("/readyz answers, agent_mcp is open, dashboard is open")
    # A request that is not signed would be a refusal in the ledger.
    assert asked == []


@pytest.mark.requirement("JE-23")
@pytest.mark.parametrize("wrong", ["agent_mcp", "dashboard"])
def test_a_listener_with_a_strangers_certificate_is_told_with_the_setting(
    tmp_path: Path, ours: TlsFolder, strangers: TlsFolder, wrong: str
) -> None:
    pairs = [strangers if wrong == section else ours for section in ("hub", "agent_mcp", "dashboard")]
    with ExitStack() as stack:
        ports = [stack.enter_context(listener(pair))[0] for pair in pairs]
        settings = gateway_at(tmp_path, *ports, pair=ours)
        found = check_gateway(settings)
        assert found.level == FAIL and found.found.startswith(f"{wrong} at https://")
        assert "gateway.ca_certs" in found.found
        # A server answers that is not trusted, no matter who started it.
        state_file.remove_state(settings)
        assert check_gateway(settings).level == FAIL


@pytest.mark.parametrize("closed", ["agent_mcp", "dashboard"])
def test_a_listener_that_is_not_there_is_told_where_the_gateway_is_ours_and_its_port_is_not_0(
    tmp_path: Path, closed: str
) -> None:
    with listener(None) as (hub, _), listener(None) as (other, _):
        ports = {"agent_mcp": other, "dashboard": other, closed: free_port()}
        settings = gateway_at(tmp_path, hub, **ports)
        found = check_gateway(settings)
        assert found.level == FAIL and found.found.startswith(f"{closed} at http://") and closed in found.mend
        off = gateway_at(tmp_path, hub, **{**ports, closed: 0})
        assert check_gateway(off).level == OK and closed not in check_gateway(off).found
        state_file.remove_state(settings)
        assert check_gateway(settings).level == OK


@pytest.mark.requirement("OP-44")
def test_a_java_home_that_does_not_serve_is_a_warning_of_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch()
    (tmp_path / "release").write_text('JAVA_VERSION="11.0.2"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = CHECKS["java"](Settings(data_dir=tmp_path))
    assert found.level == WARN and "it has Java 11.0.2, and Java 17, 21 or 25 is needed" in found.found
    assert str(tmp_path) not in found.found.partition(";")[0]
