"""`trunkline agents mqtt`, `mqtt-remove`, and what a registered job tells, as a user asks for it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from connectors.plumbing.gateway_client.gateway_client import GatewayClient, path_of
from tests.connectors.cli.conftest import CommandLine
from trunkline_agent.credentials import Credentials

pytestmark = pytest.mark.requirement("JE-26")


def test_an_agent_is_registered_with_its_secret_in_a_file_or_once_on_the_screen_and_removed(
    hub: GatewayClient, trunkline: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "builder.json"
    done = trunkline.call("agents", "mqtt", "builder", "--out", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    credentials = Credentials.load(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert credentials.mqtt is not None
    assert (credentials.name, credentials.mqtt.port) == ("builder", trunkline.settings.mqtt.port)
    assert credentials.mqtt.secret not in done.stdout
    assert json.loads(file.read_text())["password"] not in done.stdout
    assert f"{credentials.mqtt.prefix}/builder/inbox" in done.stdout

    refused = trunkline.call("agents", "mqtt", "builder", "--out", str(tmp_path / "again.json"))
    assert (refused.returncode, list(tmp_path.glob("again*"))) == (4, [])
    assert trunkline.call("agents", "mqtt", "x", "--out", str(file)).returncode == 2
    assert trunkline.call("agents", "mqtt", "../x").returncode == 2

    shown = [trunkline.call("agents", "mqtt", "planner", "--request-id", "r1", "--json") for _ in range(2)]
    first, again = (json.loads(one.stdout) for one in shown)
    assert first == again
    assert first["username"] == "agent.planner"
    assert trunkline.call("agents", "mqtt-remove", "planner").stdout == "agent planner over MQTT is removed\n"
    assert trunkline.call("agents", "mqtt-remove", "nobody").returncode == 3
    screen = trunkline.call("agents", "mqtt", "planner").stdout
    assert "secret" in screen
    assert first["secret"] not in screen


def test_jobs_register_says_what_to_be_told_of(hub: GatewayClient, trunkline: CommandLine) -> None:
    for asked, kept in (
        ((), None),
        (("--notify", "end", "--notify", "permission"), ["end", "permission"]),
        (("--notify", "nothing"), []),
    ):
        done = trunkline.call("jobs", "register", "--description", "x", *asked, "--json")
        assert done.returncode == 0, done.stderr
        assert hub.get(path_of("jobs", json.loads(done.stdout)["job_id"]))["notify"] == kept
