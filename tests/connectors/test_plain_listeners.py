"""Listeners that other machines reach without TLS are refused, unless a proxy in front does TLS."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from connectors.cli.doctor.findings import FAIL, OK, WARN
from connectors.cli.doctor.machine import check_plain_listeners
from connectors.plumbing.gateway_client.gateway_access import check_listeners, open_plain_listeners
from connectors.plumbing.machine import state_file
from connectors.programs.local_stack.part import child_environment
from schemas.settings.setting_types import is_loopback
from schemas.settings.settings import (
    MASTER_KEY_VARIABLE,
    Settings,
    SettingsError,
    load_settings,
    settings_environment,
)
from tests.connectors.programs.local_stack.conftest import settings_in
from tests.forked_programs import forked_command
from tests.programs import run_program

pytestmark = pytest.mark.requirement("SE-05")

ANYWHERE = "0.0.0.0"  # noqa: S104  it is refused
COMMAND_S = 60


def given(**names: str) -> Settings:
    """Settings of these variables, `section__name=value`."""
    return load_settings(
        {f"TRUNKLINE__{name.upper()}": value for name, value in names.items()}, Path(os.devnull)
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost"])
def test_loopback_is_allowed_without_tls(host: str) -> None:
    assert is_loopback(host)
    check_listeners(given(gateway__host=host, agent_mcp__host=host, dashboard__host=host))


@pytest.mark.parametrize(
    "host",
    [
        ANYWHERE,
        "::",
        "10.0.0.5",
        "192.168.1.9",
        "hub.example",
        "localhost.example",
        "128.0.0.1",
        "::ffff:1.2.3.4",
    ],
)
@pytest.mark.parametrize("section", ["gateway", "agent_mcp", "dashboard"])
def test_a_plain_listener_is_refused_with_setting_value_and_both_ways_out(host: str, section: str) -> None:
    assert not is_loopback(host)
    settings = given(**{f"{section}__host": host})
    with pytest.raises(SettingsError) as refused:
        check_listeners(settings)
    for said in (
        f"{section}.host is {host!r}",
        "gateway.certfile",
        "gateway.keyfile",
        "gateway.allow_plaintext",
    ):
        assert said in str(refused.value)
    assert check_plain_listeners(settings).level == FAIL


def test_tls_a_closed_listener_and_the_override_let_it_start_and_doctor_warns_of_the_override(
    tmp_path: Path,
) -> None:
    open_to_all = {f"{section}__host": ANYWHERE for section in ("gateway", "agent_mcp", "dashboard")}
    by_tls = given(**open_to_all, gateway__certfile=str(tmp_path / "c"), gateway__keyfile=str(tmp_path / "k"))
    closed = given(agent_mcp__host=ANYWHERE, agent_mcp__port="0", dashboard__host=ANYWHERE, dashboard__port="0")
    for settings in (by_tls, closed):
        check_listeners(settings)
        assert (open_plain_listeners(settings), check_plain_listeners(settings).level) == ({}, OK)
    allowed = given(**open_to_all, gateway__allow_plaintext="true")
    check_listeners(allowed)
    found = check_plain_listeners(allowed)
    assert found.level == WARN
    assert all(said in found.found for said in ("gateway.host is '0.0.0.0'", "gateway.allow_plaintext"))


@pytest.mark.long
def test_up_and_the_gateway_refuse_a_plain_listener_that_other_machines_reach(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "data")
    environment = child_environment(settings) | settings_environment(settings)
    environment["TRUNKLINE__DASHBOARD__HOST"] = ANYWHERE
    environment[MASTER_KEY_VARIABLE] = json.dumps(
        {"active": "k", "keys": {"k": base64.b64encode(bytes(32)).decode()}}
    )
    for program, *arguments in (("connectors.cli", "up"), ("connectors.programs.gateway_program",)):
        command = [*forked_command(program), *arguments]
        done = run_program(command, timeout_s=COMMAND_S, env=environment)
        assert done.returncode == 2, done.stderr
        assert "dashboard.host is '0.0.0.0'" in done.stderr and "Traceback" not in done.stderr
    assert state_file.read_state(settings) is None and not settings.data_path.exists()
