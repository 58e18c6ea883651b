"""The whole stack as `tls create` says to set it: Kafka with a login, Mosquitto and the gateway under TLS, and
all of our programs as clients of them. A client with wrong settings gets an error that names the setting.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deltalake import DeltaTable

from connectors.cli.doctor.brokers import check_accounts, check_kafka, check_mqtt
from connectors.cli.doctor.findings import check_xml_pump
from connectors.cli.doctor.gateway import check_gateway
from connectors.doors.file_bridge.queue_folder import queue_root
from connectors.doors.xml_pump.gateway_link import HttpConnections
from connectors.hub.launcher.launch_spec import AGENT_TOKEN_VARIABLE
from connectors.hub.launcher.local_processes import stop_all
from connectors.plumbing.gateway_client.gateway_access import CA_VARIABLE
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, post_xml
from connectors.plumbing.tls_keys.tls_files import create
from connectors.programs.local_stack import LocalStack, child_process
from connectors.programs.local_stack.part import child_environment
from connectors.programs.local_stack.part_plan import STREAMS
from schemas.settings.settings import PROJECT_ROOT, Settings, load_settings, settings_environment
from tests.broker_processes import LOOPBACK, wait_until
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.file_modes import CAN_BECOME_ANOTHER_USER, open_to_others, opened_by_another_user, paths_below
from tests.forked_programs import forked_command
from trunkline_agent import Agent, Credentials
from trunkline_agent.credentials import HUB_URL_VARIABLE
from trunkline_agent.errors import BackboneUnreachable, Refused
from trunkline_agent.jobs.job import Job
from trunkline_agent.mcp import agent_client
from trunkline_agent.mcp.signing import new_key_pair
from trunkline_agent.queue import Queue

pytestmark = [pytest.mark.requirement("JE-23"), pytest.mark.stack]

CLI_S = 60
CALCULATION = (
    b"<message xmlns='urn:trunkline:envelope:1'><calculate xmlns='urn:trunkline:sample:1'>"
    b"<operation>multiply</operation><first>6</first><second>7</second></calculate></message>"
)


def run_cli(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`trunkline …` in a process of its own."""
    command = [*forked_command("connectors.cli"), *arguments]
    return subprocess.run(
        command, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=CLI_S, check=False
    )


def hardened_settings(folder: Path) -> Settings:
    """Settings as a user makes them: those that the command prints, pasted into a file."""
    bare = settings_in(folder / "data")
    done = run_cli(child_environment(bare), "tls", "create", "--mutual")
    assert done.returncode == 0, done.stderr
    pasted = done.stdout.partition("down, up:\n")[2].partition("\nClients elsewhere")[0]
    assert "require_client_cert" in pasted, done.stdout
    assert yaml.safe_load(pasted)["mqtt"]["tls"] is True
    conf = folder / "trunkline.yaml"
    conf.write_text(pasted)
    verdict_wait = {"TRUNKLINE__MQTT__RECEIPT_VERDICT_WAIT_S": "10"}
    return load_settings(settings_environment(bare) | verdict_wait, conf)


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """The hardened stack for the whole file, started under the umask that most users have, in a folder that all
    users of the machine may enter. The streams take longest to start, and only the test of the tables waits for
    them.
    """
    before = os.umask(0o022)
    folder = Path(tempfile.mkdtemp(prefix="hardened-"))
    folder.chmod(0o755)
    try:
        settings = hardened_settings(folder)
        try:
            running = LocalStack(settings)
            others = [part for part in running.parts.values() if part.name != STREAMS]
            try:
                running.start(should_stop=lambda: all(part.is_ready for part in others))
                yield running
            finally:
                running.stop()
        finally:
            stop_all(settings)
            child_process.kill_marked(child_process.mark_of(settings.data_path, ""))
    finally:
        os.umask(before)
        shutil.rmtree(folder)


@pytest.fixture
def settings(stack: LocalStack) -> Settings:
    return stack.settings


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another authority's certificate."""
    return create(tmp_path_factory.mktemp("stranger")).of("ca").certificate


def trusting(settings: Settings, ca: Path | None) -> Settings:
    """The settings with another authority for the gateway."""
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"ca_certs": ca})})


def addresses(settings: Settings) -> dict[str, str]:
    """Each listener of the gateway with a page that needs no token."""
    return {
        "hub": f"{settings.gateway_url}/healthz",
        "dashboard": settings.dashboard_url,
        "agent_mcp": f"{settings.mcp_server_url}/mcp",
    }


def test_an_event_goes_its_whole_way_under_tls_and_its_receipt_comes_back(
    settings: Settings, tmp_path: Path
) -> None:
    with GatewayClient(settings) as gateway:
        job = gateway.post("/api/hub/jobs", {"description": "under TLS"})
    publisher = Job(job["job_id"], job["secret"], mqtt=settings.mqtt, state_dir=tmp_path)
    publisher.publish("started", "")
    # The bridge hears verdicts over HTTPS, and right after the start may not have found the gateway yet.
    wait_until(lambda: publisher.publish("progress", "").verdict == "accepted", 30, "a receipt with a verdict")


def test_all_three_listeners_speak_https_alone_and_at_least_tls_1_2(settings: Settings, stranger: Path) -> None:
    for url in addresses(settings).values():
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(settings.gateway.ca_certs))
        with httpx.Client(verify=trusted, trust_env=False) as client:
            assert client.get(url).status_code < 500
        for wrong in (str(stranger), None):
            with (
                httpx.Client(verify=ssl.create_default_context(cafile=wrong), trust_env=False) as client,
                pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
            ):
                client.get(url)
        with (
            httpx.Client(trust_env=False) as client,
            pytest.raises(httpx.RemoteProtocolError, match="disconnected without sending"),
        ):
            client.get(url.replace("https:", "http:"))
        old = ssl.create_default_context(cafile=str(settings.gateway.ca_certs))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        port = int(url.split(":")[2].partition("/")[0])
        with (
            socket.create_connection((LOOPBACK, port), timeout=5) as plain,
            old.wrap_socket(plain, server_hostname=LOOPBACK) as inner,
        ):
            assert inner.version() == "TLSv1.2"
        with pytest.warns(DeprecationWarning, match="TLSVersion"):
            old.minimum_version = ssl.TLSVersion.TLSv1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with (
            socket.create_connection((LOOPBACK, port), timeout=5) as plain,
            pytest.raises(OSError, match=r"\[SSL"),
        ):
            old.wrap_socket(plain, server_hostname=LOOPBACK)


def test_our_clients_name_the_setting_when_they_do_not_trust_the_gateway(
    settings: Settings, stranger: Path
) -> None:
    mistaken = trusting(settings, stranger)
    with (
        GatewayClient(mistaken) as gateway,
        pytest.raises(BackboneUnreachable, match=r"not trusted: .*gateway\.ca_certs"),
    ):
        gateway.check()
    done = run_cli(child_environment(mistaken), "jobs", "list")
    assert done.returncode == 5 and "gateway.ca_certs" in done.stderr
    in_clear = settings.model_copy(
        update={
            "gateway": settings.gateway.model_copy(update={"url": f"http://{LOOPBACK}:{settings.gateway.port}"})
        }
    )
    with (
        GatewayClient(in_clear) as gateway,
        pytest.raises(BackboneUnreachable, match="perhaps it speaks HTTPS"),
    ):
        gateway.check()
    agent = {HUB_URL_VARIABLE: settings.gateway_url, AGENT_TOKEN_VARIABLE: "x"}
    with (
        Agent(None, Credentials.from_environment(agent), patience_s=0) as stray,
        pytest.raises(BackboneUnreachable, match=CA_VARIABLE),
    ):
        stray.discover()
    trusted = Credentials.from_environment({**agent, CA_VARIABLE: str(settings.gateway.ca_certs)})
    with Agent(None, trusted, patience_s=0) as known, pytest.raises(Refused, match="token"):
        known.discover()

    async def pump(ca_certs: Path | None) -> int:
        connections = HttpConnections(settings.gateway_url, None, ca_certs)
        try:
            return (await connections.ask("GET", "/healthz", None, 10)).status
        finally:
            connections.close()

    assert asyncio.run(pump(settings.gateway.ca_certs)) == 200
    with pytest.raises(BackboneUnreachable, match=r"gateway\.ca_certs"):
        asyncio.run(pump(stranger))


def test_the_doctor_finds_all_of_it_well_and_says_what_is_not(settings: Settings, stranger: Path) -> None:
    for check in (check_kafka, check_mqtt, check_accounts, check_gateway, check_xml_pump):
        found = check(settings)
        assert found.level == "ok", found
    assert "agent_mcp is open, dashboard is open" in check_gateway(settings).found
    mistaken = check_gateway(trusting(settings, stranger))
    assert mistaken.level == "fail" and "gateway.ca_certs" in mistaken.found


def test_a_spawned_agent_and_one_that_joined_speak_mcp_over_https(
    settings: Settings, stranger: Path, tmp_path: Path
) -> None:
    private, public = new_key_pair()
    key = tmp_path / "ann.pem"
    key.touch(mode=0o600)
    key.write_bytes(private)
    with GatewayClient(settings) as gateway:
        gateway.post("/api/hub/participants", {"agent_name": "ann", "public_key": public})
        gateway.post("/api/hub/participants/spawn", {"task": "wait", "agent_name": "spawned"})

        async def told(ca: Path) -> str:
            async with agent_client(settings.mcp_server_url, "ann", key, ca_certs=ca) as client:
                answer = await client.call_tool("discover_agents", {})
                return json.dumps([one.model_dump(mode="json") for one in answer.content])

        assert settings.gateway.ca_certs is not None
        assert "ann" in asyncio.run(told(settings.gateway.ca_certs))
        with pytest.raises(BackboneUnreachable, match=CA_VARIABLE):
            asyncio.run(told(stranger))

        def spawned() -> Any:
            listed = gateway.get("/api/hub/participants")["participants"]
            return [one for one in listed if one["id"] == "spawned" and one["status"] == "idle"]

        wait_until(spawned, 30, "the spawned agent says over HTTPS that it is idle")
        gateway.post("/api/hub/participants/spawned/stop", {})


def test_a_browsers_cookie_is_for_https_alone_and_its_origin_too(settings: Settings) -> None:
    address = settings.dashboard_url.rstrip("/")
    trusted = ssl.create_default_context(cafile=str(settings.gateway.ca_certs))
    token = json.dumps({"token": settings.operator_token_file.read_text().strip()}).encode()
    statuses = {}
    for origin in (address, address.replace("https:", "http:")):
        request = urllib.request.Request(  # noqa: S310  our own address
            f"{address}/api/login",
            data=token,
            headers={"Content-Type": "application/json", "Origin": origin},
        )
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted)
        )
        try:
            with opener.open(request, timeout=10) as answer:
                statuses[origin[:5]] = (answer.status, "; Secure" in answer.headers["set-cookie"])
        except urllib.error.HTTPError as error:
            with error:
                statuses[origin[:5]] = (error.code, False)
    assert statuses["https"][0] in (200, 204) and statuses["https"][1]
    assert statuses["http:"] == (403, False)


def test_the_streams_reach_kafka_by_its_login(stack: LocalStack) -> None:
    def are_ready() -> bool:
        stack.look_after()
        return stack[STREAMS].is_ready

    wait_until(are_ready, 60, "the streams, for which nothing has waited yet")


def test_what_comes_by_event_file_and_document_is_settled_into_the_tables_under_tls(
    settings: Settings, tmp_path: Path
) -> None:
    def rows(table: str, *columns: str) -> list[dict[str, Any]]:
        return DeltaTable(settings.table_path(table)).to_pyarrow_table(columns=list(columns)).to_pylist()

    with GatewayClient(settings) as gateway:
        job = gateway.post("/api/hub/jobs", {"description": "to the end"})
        Job(job["job_id"], job["secret"], mqtt=settings.mqtt, state_dir=tmp_path).publish("completed", "")
        gateway.post("/api/hub/principals", {"principal": "fil", "role": "worker"})
        Queue(queue_root(settings)).send("status", "by file", to="operator", sender="fil")
        post_xml(gateway, CALCULATION, request_id="under-tls")
    wanted = {("fil", "by file"), ("calculator", "42")}

    def are_there() -> bool:
        bodies = {row["message_id"]: row["body"] for row in rows("message_bodies", "message_id", "body")}
        mailbox = rows("mailbox", "message_id", "recipient", "sender")
        told = [
            (row["sender"], bodies.get(row["message_id"], ""))
            for row in mailbox
            if row["recipient"] == "operator"
        ]
        jobs = {row["job_id"]: row["status"] for row in rows("registry_jobs", "job_id", "status")}
        return jobs.get(job["job_id"]) == "completed" and all(
            any(sender == who and what in body for who, body in told) for sender, what in wanted
        )

    wait_until(are_there, 60, "the job's end, the file's message and the pump's answer in the views")
    accepted = {
        (row["door"], row["type"])
        for row in rows("ledger", "door", "type", "verdict")
        if row["verdict"] == "accepted"
    }
    assert {("mqtt", "job.event"), ("file", "message.posted"), ("xml", "message.posted")} <= accepted


# The last one: the tests above have filled every folder.
@pytest.mark.requirement("SE-02")
def test_everything_below_the_data_directory_is_for_its_owner_alone(settings: Settings) -> None:
    assert Path(settings.table_path("ledger"), "_delta_log").is_dir() and queue_root(settings).is_dir()
    root = settings.data_path
    assert not (found := open_to_others(root)), found
    everything = paths_below(root)
    assert len([path for path in everything if path.is_file()]) > 100
    if not CAN_BECOME_ANOTHER_USER:
        return
    assert opened_by_another_user(everything) == []
    readable = root.parent / "trunkline.yaml"
    readable.chmod(0o644)
    assert opened_by_another_user([readable]) == [str(readable)]
