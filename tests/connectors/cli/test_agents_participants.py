"""`trunkline agents` for agents that take part, their keys, and `trunkline mcp agent`, as a user runs them."""

from __future__ import annotations

import json
import shutil
import stat
import time
from pathlib import Path

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters

from connectors.cli.agents.agent_key_pair import new_key_file, public_key_in, successor_of
from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from connectors.programs.local_stack import free_port
from schemas.settings.settings import PROJECT_ROOT, Settings
from tests.broker_processes import wait_until
from tests.connectors.cli.conftest import CommandLine
from tests.forked_programs import forked_command
from trunkline_agent.errors import Refused
from trunkline_agent.mcp import REFUSED, agent_client
from trunkline_agent.mcp.signing import key_id

HOSTILE = "red bidi \u202e zero\u200b"


@pytest.fixture
def hub_settings(hub_settings: Settings) -> Settings:
    """Settings with the agent MCP door, and with agents that are looked after often."""
    door = hub_settings.agent_mcp.model_copy(update={"port": free_port()})
    gateway = hub_settings.gateway.model_copy(update={"task_check_s": 0.5, "stop_grace_s": 2.0})
    return hub_settings.model_copy(update={"agent_mcp": door, "gateway": gateway})


def works(settings: Settings, name: str, key: Path) -> bool:
    """True if a call that is signed with this key is let in."""

    async def ask() -> bool:
        try:
            async with agent_client(settings.mcp_server_url, name, key) as client:
                return not (await client.call_tool("discover_agents", {})).is_error
        except Refused:
            return False
        except MCPError as error:
            # The key can end between two calls of one connection.
            assert error.code == REFUSED, error
            return False

    return anyio.run(ask)


@pytest.mark.requirement("AM-09")
@pytest.mark.requirement("CM-06")
def test_an_agent_is_spawned_listed_shown_and_stopped(
    hub: GatewayClient, agents_end: None, trunkline: CommandLine
) -> None:
    assert trunkline.call("agents", "active").returncode == 3
    assert trunkline.json("agents", "active") == {"agents": []}
    spawn = ("agents", "spawn", HOSTILE.replace("\u202e", ""), "--name", "mailer", "--capability", "sum")
    made = trunkline.call(*spawn, "--capability", "sort", "--request-id", "s-1")
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines()[0] == "agent  mailer"
    again = trunkline.json(*spawn, "--capability", "sort", "--request-id", "s-1")
    assert (again["id"], again["capabilities"], again["request_id"]) == ("mailer", ["sum", "sort"], "s-1")
    assert trunkline.call("agents", "spawn", "x", "--name", "mailer").returncode == 4
    table = trunkline.call("agents", "active", "--capability", "sort").stdout
    assert table.splitlines()[1].split()[:4] == ["mailer", *table.splitlines()[1].split()[1:4]]
    assert "\\u200b" in table
    assert "\u200b" not in table
    shown = trunkline.call("agents", "status", "mailer").stdout
    assert again["keys"][0]["key_id"] in shown
    assert trunkline.call("agents", "stop", "mailer", "--reason", "done").stdout == "agent mailer is stopped\n"
    assert trunkline.json("agents", "status", "mailer")["status"] == "stopped"
    assert trunkline.call("agents", "active").returncode == 3
    assert len(trunkline.json("agents", "active", "--status", "stopped")["agents"]) == 1
    for wrong, code in (("stranger", 3), ("../principals", 2)):
        assert trunkline.call("agents", "stop", wrong).returncode == code
        assert trunkline.call("agents", "status", wrong).returncode == code


@pytest.mark.requirement("AM-03")
def test_one_that_joins_has_its_key_in_a_file_for_its_owner_alone_and_nothing_is_left_of_a_refused_one(
    hub: GatewayClient, hub_settings: Settings, trunkline: CommandLine, tmp_path: Path
) -> None:
    key, public = tmp_path / "ann.pem", tmp_path / "bo.pub"
    made = trunkline.json("agents", "join", "ann", "--new-key", str(key), "--task", "counts")
    assert (made["id"], made["task"], made["key_file"]) == ("ann", "counts", str(key))
    assert [one["key_id"] for one in made["keys"]] == [key_id(public_key_in(key))]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert works(hub_settings, "ann", key)
    held = key.read_bytes()
    taken = trunkline.call("agents", "join", "bo", "--new-key", str(key))
    assert (taken.returncode, key.read_bytes() == held) == (2, True)
    refused = trunkline.call("agents", "join", "ann", "--new-key", str(tmp_path / "other.pem"))
    assert (refused.returncode, (tmp_path / "other.pem").exists()) == (4, False)
    private = tmp_path / "bo.pem"
    public.write_text(new_key_file(private, "--new-key"))
    assert trunkline.call("agents", "join", "bo", "--key", str(public)).returncode == 0
    assert works(hub_settings, "bo", private)
    bad = tmp_path / "bad.pem"
    bad.write_text("no key")
    for wrong in (bad, tmp_path / "none.pem"):
        done = trunkline.call("agents", "join", "carl", "--key", str(wrong))
        assert (done.returncode, "no key" in done.stderr.replace("no key of", "")) == (2, False)


@pytest.mark.requirement("AM-03")
def test_with_the_gateway_away_the_new_key_is_kept_and_how_to_go_on_is_told(
    hub_settings: Settings, trunkline: CommandLine, tmp_path: Path
) -> None:
    key = tmp_path / "ann.pem"
    done = trunkline.call("agents", "join", "ann", "--new-key", str(key))
    assert (done.returncode, key.exists()) == (5, True)
    assert "--request-id" in done.stderr
    assert f"The key is in {key}: name it by --key" in done.stderr
    rotated = trunkline.call("agents", "rotate", "ann", str(key))
    assert (rotated.returncode, "the same command again goes on" in rotated.stderr) == (5, True)


@pytest.mark.requirement("AM-08")
def test_a_key_is_rotated_with_an_overlap_and_what_breaks_off_in_between_is_mended_by_the_same_again(
    hub: GatewayClient, hub_settings: Settings, trunkline: CommandLine, tmp_path: Path
) -> None:
    key, old = tmp_path / "ann.pem", tmp_path / "old.pem"
    trunkline.call("agents", "join", "ann", "--new-key", str(key))
    shutil.copy2(key, old)
    rotate = ("agents", "rotate", "ann", str(key))
    first = trunkline.json(*rotate)
    assert first["key_id"] == key_id(public_key_in(key)) != key_id(public_key_in(old))
    assert [one["valid_until"] is None for one in first["keys"]] == [False, True]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert works(hub_settings, "ann", key)
    assert works(hub_settings, "ann", old)
    # Killed before the gateway knew, and killed before the file was put in its place.
    following = successor_of(key)
    assert trunkline.json(*rotate)["key_id"] == key_id(following)
    following = successor_of(key)
    hub.post(path_of("participants", "ann", "keys"), {"public_key": following, "overlap_s": 60})
    assert trunkline.json(*rotate)["key_id"] == key_id(following) == key_id(public_key_in(key))
    assert works(hub_settings, "ann", key)
    half = key.with_name(f".{key.name}.next")
    half.write_text("-----BEGIN")
    assert trunkline.json(*rotate, "--overlap", "1s")["key_id"] == key_id(public_key_in(key))
    ends = time.monotonic()
    wait_until(lambda: not works(hub_settings, "ann", old), what="the end of the old key")
    assert time.monotonic() - ends < 10
    assert works(hub_settings, "ann", key)
    held = key.read_bytes()
    assert trunkline.call("agents", "rotate", "stranger", str(key)).returncode == 3
    assert (key.read_bytes() == held, half.exists()) == (True, False)
    key.chmod(0o644)
    assert trunkline.call(*rotate).returncode == 2


@pytest.mark.requirement("AM-03")
def test_keys_are_added_and_removed(
    hub: GatewayClient, hub_settings: Settings, trunkline: CommandLine, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.pem", tmp_path / "second.pem"
    trunkline.call("agents", "join", "ann", "--new-key", str(first))
    new_key_file(second, "FILE")
    added = trunkline.call("agents", "add-key", "ann", str(second), "--overlap", "2h")
    assert added.returncode == 0
    assert added.stdout.splitlines()[2].startswith(f"older  {key_id(public_key_in(first))} until ")
    removed = trunkline.call("agents", "remove-key", "ann", key_id(public_key_in(first)))
    assert removed.stdout == "agent ann has 1 keys\n"
    assert (works(hub_settings, "ann", first), works(hub_settings, "ann", second)) == (False, True)
    assert trunkline.call("agents", "remove-key", "ann", "0" * 16).returncode == 3
    assert trunkline.call("agents", "remove-key", "ann", "x").returncode == 2


@pytest.mark.requirement("AM-10")
def test_an_agents_host_takes_part_by_the_command_that_the_help_names(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    key = tmp_path / "ann.pem"
    trunkline.call("agents", "join", "ann", "--new-key", str(key))
    program, *words = forked_command("connectors.cli")
    command = StdioServerParameters(
        command=program,
        args=[*words, "mcp", "agent", "--id", "ann", "--key", str(key)],
        env=trunkline.environment(),
        cwd=PROJECT_ROOT,
    )

    async def use() -> None:
        async with Client(command, read_timeout_seconds=30) as client:
            sent = await client.call_tool("send_to_agent", {"targetAgentId": "operator", "message": "ready"})
            assert not sent.is_error

    anyio.run(use)
    (message,) = hub.get(path_of("mailboxes", "default", "operator"))["messages"]
    assert (message["sender"], message["body"]) == ("ann", "ready")


@pytest.mark.requirement("AM-10")
@pytest.mark.parametrize("action", ["management", "agent"])
def test_the_help_holds_a_configuration_that_can_be_copied(action: str, trunkline: CommandLine) -> None:
    text = trunkline.call("mcp", action, "--help").stdout
    snippet = json.loads(text[text.index("{\n") : text.index("\n}\n") + 2])
    (server,) = snippet["mcpServers"].values()
    assert server["args"] == ["mcp", action]
    assert Path(server["command"]) == PROJECT_ROOT / "trunkline"
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.requirement("AM-05")
@pytest.mark.requirement("AM-07")
def test_messages_are_broadcast_cleared_and_exported(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    for name in ("ann", "bo"):
        trunkline.call("agents", "join", name, "--new-key", str(tmp_path / f"{name}.pem"))
    send = ("messages", "broadcast", "news", "--text", "soup", "--request-id", "b-1")
    first = trunkline.json(*send)
    assert (first["recipients"], first["request_id"]) == (2, "b-1")
    assert trunkline.call(*send).stdout == f"broadcast {first['broadcast_id']} lies in 2 mailboxes\n"
    assert trunkline.json("messages", "broadcast", "list", "[1]")["recipients"] == 2
    cleared = trunkline.call("messages", "clear", "ann")
    assert (cleared.returncode, cleared.stdout) == (0, "2 messages were taken out of ann\n")
    assert trunkline.json("messages", "clear", "default/ann")["cleared"] == 0
    assert hub.get(path_of("mailboxes", "default", "bo"), {"pending": True})["total"] == 2
    assert trunkline.call("messages", "clear", "../ann").returncode == 2
    # There are no tables here; with them the export is tested in test_message_export.py.
    nothing = trunkline.call("messages", "export", str(tmp_path / "m.parquet"))
    assert (nothing.returncode, "no messages in the tables" in nothing.stderr) == (3, True)
