"""The organism file at a gateway's start: loaded once, when it is another, and commands' changes stand."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from connectors.doors.out_of_band.signed_commands import AddListener, HotReload, RemoveListener
from tests.broker_processes import BrokerProcess, wait_until
from tests.connectors.doors.http_api.hub_access import GatewayProcess
from tests.connectors.doors.out_of_band.conftest import CommandStack, command_settings
from tests.connectors.doors.out_of_band.sample_handlers import MODULE
from tests.connectors.programs.local_stack.conftest import run_cli

pytestmark = pytest.mark.requirement("XP-09")

_FIRST = f"listeners: [{{name: adder, handler: '{MODULE}:add'}}, {{name: ann, type: human}}]\n"
_SECOND = f"listeners: [{{name: adder, handler: '{MODULE}:add', concurrency: 2}}, {{name: bob, type: human}}]\n"


@pytest.fixture(scope="module")
def stack(kafka_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandStack]:
    """Two gateways that were started at once with the first file."""
    folder = tmp_path_factory.mktemp("organism")
    stack = CommandStack(command_settings(kafka_broker, folder), folder)
    try:
        restart(stack, _FIRST, gateways=2)
        yield stack
    finally:
        stack.close()


def restart(stack: CommandStack, text: str, gateways: int = 1) -> GatewayProcess:
    """End the gateways and start others at once, with this file."""
    (stack.folder / "organism.yaml").write_text(text)
    for gateway in stack.gateways:
        gateway.program.stop(signal.SIGTERM)
    stack.gateways += [GatewayProcess(stack.settings, stack.folder) for _ in range(gateways)]
    for gateway in stack.gateways[-gateways:]:
        gateway.wait_ready()
    return stack.gateways[-1]


def loaded(stack: CommandStack) -> list[str]:
    """The files that were loaded, by their digest, as often as it was said."""
    return [one.body["digest"] for one in stack.organism_log() if one.type == "organism.loaded"]


def fault_of(stack: CommandStack) -> str | None:
    """Why the last gateway has not loaded its file."""
    with stack.operator() as client:
        said: str | None = client.get("/api/hub/listeners").json()["fault"]
    return said


def test_gateways_that_start_at_once_load_a_file_once(stack: CommandStack):
    assert set(stack.listeners()) == {"adder", "ann"}, "a gateway that is ready has the listeners of its file"
    wait_until(lambda: len(loaded(stack)) in (1, 2), what="one or both have said it")
    assert stack.version() == 1


def test_a_reload_always_counts_and_touches_only_what_is_another(stack: CommandStack):
    before, version = stack.listeners(), stack.version()
    for step in (1, 2):
        status, answer = stack.give(HotReload())
        assert (status, answer["listeners"], answer["version"]) == (200, 2, version + step)
    assert stack.listeners() == before
    (stack.folder / "organism.yaml").write_text(_SECOND)
    assert stack.give(HotReload())[0] == 200
    after = stack.listeners()
    assert after.keys() == {"adder", "bob"}
    assert after["adder"]["concurrency"] == 2


def test_what_commands_have_changed_stands_while_the_file_is_the_same(stack: CommandStack):
    assert stack.give(RemoveListener("bob"))[0] == 200
    assert stack.give(AddListener({"name": "eve", "type": "human"}))[0] == 200
    said = len(loaded(stack))
    gateway = restart(stack, _SECOND)
    assert "organism_unchanged" in gateway.program.log()
    assert len(loaded(stack)) == said
    assert stack.listeners().keys() == {"adder", "eve"}


def test_another_file_is_loaded_at_the_next_start(stack: CommandStack):
    restart(stack, _FIRST)
    assert set(stack.listeners()) == {"adder", "ann"}
    assert stack.listeners()["adder"]["concurrency"] == 8
    with stack.operator() as client:
        removed = client.get("/api/hub/listeners", params={"status": "removed"}).json()["listeners"]
    assert {row["listener"] for row in removed} == {"bob", "eve"}


def test_a_bad_file_changes_nothing_and_the_log_says_what_is_wrong(stack: CommandStack):
    gateway = restart(stack, "listeners: [{name: a}]")
    assert "organism_not_loaded" in gateway.program.log()
    assert "listeners, a: handler: a listener needs one" in gateway.program.log()
    assert stack.listeners().keys() == {"adder", "ann"}


def test_a_file_with_a_principals_name_is_refused(stack: CommandStack):
    with stack.operator() as client:
        assert (
            client.post("/api/hub/principals", json={"principal": "kim", "role": "worker"}).status_code == 201
        )
    (stack.folder / "organism.yaml").write_text("listeners: [{name: kim, type: human}]")
    status, answer = stack.give(HotReload())
    assert (status, answer["reason"]) == (403, "policy")
    assert "listener kim: a principal or an agent has this name" in answer["message"]
    assert stack.listeners().keys() == {"adder", "ann"}


@pytest.mark.requirement("OP-08")
def test_a_file_with_an_agents_name_is_a_fault_that_the_gateway_shows_until_a_good_one_is_loaded(
    stack: CommandStack,
):
    restart(stack, "listeners: [{name: echo, type: human}]")
    assert "organism.yaml: listener echo: a principal or an agent has this name" in str(fault_of(stack))
    assert stack.listeners().keys() == {"adder", "ann"}
    shown = run_cli(stack.gateways[-1].settings, "organism", "show")
    assert shown.returncode == 0 and "the organism file is not loaded" in shown.stderr
    (stack.folder / "organism.yaml").write_text(_FIRST)
    assert stack.give(HotReload())[0] == 200
    assert fault_of(stack) is None


_SLOW = f"""
import time
from pathlib import Path
from {MODULE} import add
while not Path(__file__).with_name("go-on").exists():
    time.sleep(0.02)
"""


def test_a_command_given_while_a_file_is_read_is_not_undone_by_it(
    stack: CommandStack, monkeypatch: pytest.MonkeyPatch
):
    (stack.folder / "slow_to_import.py").write_text(_SLOW)
    monkeypatch.setenv("PYTHONPATH", str(stack.folder))
    gateway = restart(stack, "listeners: [{name: summer, handler: 'slow_to_import:add'}]")
    assert "organism_waits" in gateway.program.log()
    assert stack.give(AddListener({"name": "zoe", "type": "human"}))[0] == 200
    (stack.folder / "go-on").touch()
    wait_until(lambda: fault_of(stack) is not None, what="the gateway says that it has not loaded the file")
    assert "the listeners were changed while it was read; load it by" in str(fault_of(stack))
    assert stack.listeners().keys() == {"adder", "ann", "zoe"}
    assert stack.give(HotReload())[0] == 200
    assert (fault_of(stack), stack.listeners().keys()) == (None, {"summer"})
