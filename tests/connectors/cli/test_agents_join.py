"""`trunkline agents join --credentials`: one file for every door, however often it breaks off."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from connectors.cli.agents.join_credentials import JoinDraft
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.local_stack import free_port
from schemas.settings.settings import Settings
from tests.connectors.cli.conftest import CommandLine
from tests.forked_programs import forked_command
from tests.programs import run_program
from trunkline_agent.credentials import Credentials
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.mcp import connect


@pytest.fixture
def hub_settings(hub_settings: Settings) -> Settings:
    """Settings with the agent MCP door, and with a port of MQTT at which nobody listens."""
    door = hub_settings.agent_mcp.model_copy(update={"port": free_port()})
    mqtt = hub_settings.mqtt.model_copy(update={"port": free_port()})
    return hub_settings.model_copy(update={"agent_mcp": door, "mqtt": mqtt})


def drafts(folder: Path) -> Iterator[Path]:
    """The unfinished joins."""
    return folder.glob(".*.joining*")


def is_let_in(settings: Settings, credentials: Credentials) -> bool:
    """True if token and key of the credentials are accepted."""
    assert credentials.hub is not None
    with GatewayClient(settings, token=credentials.hub.token) as client:
        client.get(path_of("messages"))
    return knows_the_key(credentials)


def knows_the_key(credentials: Credentials) -> bool:
    """True if the agent MCP door accepts the key of the credentials."""

    async def ask() -> bool:
        async with connect(credentials) as client:
            return not (await client.call_tool("discover_agents", {})).is_error

    return anyio.run(ask)


@pytest.mark.requirement("AG-80")
@pytest.mark.requirement("AG-83")
def test_one_file_has_access_to_every_door_and_no_secret_is_printed(
    hub: GatewayClient, hub_settings: Settings, trunkline: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "builder.json"
    done = trunkline.call("agents", "join", "builder", "--credentials", str(file), "--doors", "hub,mqtt,mcp")
    assert (done.returncode, done.stderr) == (0, "")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = Credentials.load(file)
    assert is_let_in(hub_settings, found)
    assert found.hub.url == hub_settings.gateway_url
    mqtt = found.mqtt_access()
    assert (mqtt.host, mqtt.port, mqtt.tls) == (hub_settings.mqtt.host, hub_settings.mqtt.port, False)
    assert mqtt.prefix == hub_settings.mqtt.agents_prefix
    for secret in (found.hub.token, mqtt.secret, "PRIVATE KEY"):
        assert secret not in done.stdout
    assert list(drafts(tmp_path)) == []

    shown = trunkline.json("agents", "join", "ann", "--credentials", str(tmp_path / "ann.json"))
    assert (shown["name"], shown["doors"]) == ("ann", ["mcp", "hub"])
    assert "no MQTT broker answers" in shown["left_out"]["mqtt"]
    assert Credentials.load(tmp_path / "ann.json").mqtt is None
    addresses = ("--doors", "hub,mqtt", "--hub-url", "https://hub.example", "--broker", "mqtt.example:8883")
    trunkline.call("agents", "join", "bo", "--credentials", str(tmp_path / "bo.json"), *addresses)
    far = Credentials.load(tmp_path / "bo.json")
    assert (far.hub_access().url, far.mqtt_access().host, far.mqtt_access().port) == (
        "https://hub.example",
        "mqtt.example",
        8883,
    )


@pytest.mark.requirement("AG-91")
def test_an_mcp_host_takes_part_with_the_credentials_alone(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "ann.json"
    trunkline.call("agents", "join", "ann", "--credentials", str(file), "--doors", "mcp")
    program, *arguments = forked_command("trunkline_agent.command")
    command = StdioServerParameters(
        command=program, args=[*arguments, "mcp"], env={"TRUNKLINE_CREDENTIALS": str(file)}
    )

    async def use() -> None:
        async with Client(command, read_timeout_seconds=30) as client:
            sent = await client.call_tool("send_to_agent", {"targetAgentId": "operator", "message": "ready"})
            assert not sent.is_error

    anyio.run(use)
    (message,) = hub.get(path_of("mailboxes", "default", "operator"))["messages"]
    assert (message["sender"], message["body"]) == ("ann", "ready")
    hubless = run_program([program, *arguments, "receive", "--credentials", str(file)])
    assert (hubless.returncode, "'hub'" in hubless.stderr) == (2, True)


@pytest.mark.requirement("AG-81")
def test_a_join_that_broke_off_goes_on_with_the_same_secrets(
    hub: GatewayClient,
    hub_settings: Settings,
    trunkline: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "builder.json"
    join = ("agents", "join", "builder", "--credentials", str(file), "--doors", "hub,mqtt,mcp")
    obtained: list[dict[str, str]] = []
    store = JoinDraft.put

    def broken(draft: JoinDraft, door: str, answer: dict[str, str]) -> None:
        # The gateway has carried out the request, and the answer is lost.
        obtained.append(answer)
        raise BackboneUnreachable("no answer")

    def broken_at_hub(draft: JoinDraft, door: str, answer: dict[str, str]) -> None:
        (broken if door == "hub" else store)(draft, door, answer)

    for breaking in (broken, broken_at_hub):
        monkeypatch.setattr(JoinDraft, "put", breaking)
        done = trunkline.call(*join)
        assert (done.returncode, file.exists()) == (5, False)
        assert "the same command again goes on" in done.stderr.lower()
        (draft,) = drafts(tmp_path)
        assert stat.S_IMODE(draft.stat().st_mode) == 0o600
    monkeypatch.setattr(JoinDraft, "put", store)
    assert trunkline.call("agents", "join", "other", *join[3:]).returncode == 2
    assert trunkline.call(*join).returncode == 0
    found = Credentials.load(file)
    assert found.hub_access().token == obtained[-1]["token"]
    assert is_let_in(hub_settings, found)
    assert list(drafts(tmp_path)) == []
    assert len(hub.get(path_of("participants", "builder"))["keys"]) == 1


@pytest.mark.requirement("AG-82")
def test_a_file_is_replaced_only_if_asked_and_keeps_the_secrets_that_it_has(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "builder.json"
    join = ("agents", "join", "builder", "--credentials", str(file))
    assert trunkline.call(*join, "--doors", "hub").returncode == 0
    before = file.read_bytes()
    refused = trunkline.call(*join, "--doors", "mqtt")
    assert (refused.returncode, file.read_bytes() == before) == (2, True)
    assert "--replace" in refused.stderr
    assert trunkline.call(*join, "--doors", "mqtt", "--replace").returncode == 0
    found = Credentials.load(file)
    assert found.hub == Credentials.load(file).hub
    assert json.loads(before)["hub"]["token"] == found.hub_access().token
    secret = found.mqtt_access().secret
    again = trunkline.json(*join, "--replace", "--broker", "far.example")
    assert again["doors"] == ["hub", "mqtt"]
    assert "before its token" in again["left_out"]["mcp"]
    assert (Credentials.load(file).mqtt_access().secret, Credentials.load(file).mqtt_access().host) == (
        secret,
        "far.example",
    )
    assert trunkline.call("agents", "join", "other", *join[3:], "--replace").returncode == 2
    assert trunkline.call("agents", "join", "x", "--new-key", str(tmp_path / "x"), "--replace").returncode == 2


@pytest.mark.requirement("AG-82")
def test_a_refused_join_leaves_nothing_and_says_what_to_do(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    folder = tmp_path / "credentials"
    folder.mkdir()
    trunkline.call("principals", "add", "ann", "--role", "worker")
    join = ("agents", "join", "ann", "--credentials", str(folder / "ann.json"))
    for doors, advice in (("mcp", "--doors hub,mqtt"), ("hub", "choose another name")):
        done = trunkline.call(*join, "--doors", doors)
        assert (done.returncode, advice in done.stderr) == (4, True)
        assert list(folder.iterdir()) == []
    # One door opens and the next one does not: what was obtained is not lost.
    trunkline.call("agents", "mqtt", "bo")
    half = ("agents", "join", "bo", "--credentials", str(tmp_path / "bo.json"))
    done = trunkline.call(*half, "--doors", "hub,mqtt")
    assert (done.returncode, "--doors hub" in done.stderr, len(list(drafts(tmp_path)))) == (4, True, 1)
    assert trunkline.call(*half, "--doors", "hub").returncode == 0
    assert Credentials.load(tmp_path / "bo.json").hub is not None
    assert trunkline.call(*half[:4], str(tmp_path / "no" / "bo.json")).returncode == 2


@pytest.mark.requirement("AG-81")
def test_a_gateway_that_is_away_leaves_a_draft(trunkline: CommandLine, tmp_path: Path) -> None:
    done = trunkline.call("agents", "join", "ann", "--credentials", str(tmp_path / "ann.json"))
    assert (done.returncode, len(list(drafts(tmp_path)))) == (5, 1)
