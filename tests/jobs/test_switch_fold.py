"""Programs do not run on a ledger of another version of the fold until it is switched on, with conditions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from deltalake import DeltaTable

from connectors.plumbing.gateway_client.gateway_access import ensure_operator_token
from jobs import run_streams
from jobs.build_views import catch_up
from jobs.driver.programs import WriterClaim
from jobs.switch_fold import switch
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import topic_reader
from schemas.settings.settings import Settings, settings_environment
from schemas.streams.control.control_fold import FOLD_STREAM
from schemas.tables.fold_version import FOLD_PROPERTY, check_fold_version
from schemas.tables.ledger import LEDGER
from tests.broker_processes import wait_until
from tests.connectors.cli.conftest import CommandLine
from tests.connectors.doors.http_api.hub_access import GatewayProcess, starting
from tests.jobs.conftest import Rows
from tests.jobs.topic_load import append_all, event, registration
from tests.programs import run_program
from tests.raw_records import read_to_end
from trunkline_agent.errors import Refused

JOB = "0badcafe"


def ran(settings: Settings, *command: str) -> subprocess.CompletedProcess[str]:
    """One of our programs, to its end."""
    return run_program(
        [sys.executable, "-m", *command], timeout_s=90, env=os.environ | settings_environment(settings)
    )


def fold(settings: Settings, action: str) -> subprocess.CompletedProcess[str]:
    return CommandLine(settings).call("fold", action, "--json")


def settled_by(settings: Settings, version: int | None = None) -> str:
    """The version that the ledger is settled by; sets it first, if one is named."""
    ledger = DeltaTable(settings.table_path(LEDGER))
    if version is not None:
        ledger.alter.set_table_properties({FOLD_PROPERTY: str(version)}, raise_if_not_exists=False)
    return str(ledger.metadata().configuration[FOLD_PROPERTY])


def switches(settings: Settings) -> list[bytes]:
    """The bodies of all records of a switch in the log."""
    return [one.value for one in read_to_end(settings.kafka) if one.key == FOLD_STREAM.encode()]


@pytest.fixture
def kept_handlers() -> Iterator[None]:
    """Restore this process's signal handlers when the test ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.timeout(300)
def test_no_version_is_switched_on_with_a_door_open_and_no_program_runs_on_another_one(
    drain: Callable[[], Rows], backbone_settings: Settings, tmp_path: Path
) -> None:
    drain()
    assert settled_by(backbone_settings) == str(FOLD_VERSION), "a new ledger is of this version"
    with starting(GatewayProcess, backbone_settings, tmp_path) as start:
        gateway = start()
        settings = gateway.settings
        settled_by(settings, FOLD_VERSION - 1)
        is_open = fold(settings, "switch")
        assert is_open.returncode == 4
        assert "a gateway answers" in is_open.stderr
    for program in ("connectors.programs.gateway_program", "jobs.run_streams"):
        refused = ran(settings, program)
        assert refused.returncode == 4, refused.stderr
        assert "trunkline upgrade" in refused.stderr
    assert settled_by(settings) == str(FOLD_VERSION - 1), "nothing that was refused has switched"


@pytest.mark.timeout(300)
def test_a_version_is_switched_on_with_the_doors_closed_and_everything_settled(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring
) -> None:
    settings = backbone_settings
    ensure_operator_token(settings)
    append_all(settings, [registration(JOB, keyring), event(JOB, 1, "started")])
    drain()
    catch_up(settings)
    settled_by(settings, FOLD_VERSION - 1)
    append_all(settings, [event(JOB, 2)])
    with topic_reader(settings.kafka) as consumer:
        found = consumer.end_offsets(sorted(consumer.assignment()))
    ends = {str(where.partition): end for where, end in found.items()}
    with pytest.raises(Refused, match="the ledger lacks"):
        switch(settings, ends)
    ledger = drain()
    assert settled_by(settings) == str(FOLD_VERSION - 1), "nothing that was refused has switched"
    settings.operator_token_file.chmod(0o644)
    unreadable = fold(settings, "switch")
    assert (unreadable.returncode, "a gateway answers" in unreadable.stderr) == (2, False)
    assert f"chmod 600 {settings.operator_token_file}" in unreadable.stderr
    settings.operator_token_file.chmod(0o600)
    done = fold(settings, "switch")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["switched"] is True
    assert settled_by(settings) == str(FOLD_VERSION)
    check_fold_version(settings)
    state = json.loads(done.stdout)
    assert state["views"] == state["ledger"], "the switch brings the views to the ledger's end"
    again = fold(settings, "switch")
    assert (again.returncode, json.loads(again.stdout)["switched"]) == (0, False)
    said = [row for row in drain() if row["type"] == "control.fold_switched"]
    assert [row["verdict"] for row in said] == ["accepted", "duplicate"]
    body = orjson.loads(said[0]["value"])
    assert (body["from_version"], body["to_version"]) == (FOLD_VERSION - 1, FOLD_VERSION)
    assert sum(body["offsets"].values()) == len(ledger)
    assert {f"{row['stream_kind']}/{row['stream_id']}" for row in said} == {FOLD_STREAM}


@pytest.mark.slow
def test_a_switch_that_was_killed_before_its_record_is_said_by_the_next_gateway_once(
    drain: Callable[[], Rows], backbone_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    append_all(backbone_settings, [registration(JOB, keyring)])
    ledger = drain()
    catch_up(backbone_settings)
    settled_by(backbone_settings, FOLD_VERSION - 1)
    # All that `fold switch` does but the record.
    state = switch(backbone_settings, {str(row["partition"]): row["offset"] + 1 for row in ledger})
    with starting(GatewayProcess, backbone_settings, tmp_path) as start:
        for _ in range(2):
            gateway = start()
            said = wait_until(lambda: switches(backbone_settings), 20, "the record of the switch")
            assert gateway.program.stop() == 0
    assert [json.loads(value) for value in said] == [{"schema_version": 1, **state["switch"]}]
    (row,) = [row for row in drain() if row["type"] == "control.fold_switched"]
    assert (row["verdict"], row["value"]) == ("accepted", said[0])
    assert fold(backbone_settings, "switch").returncode == 0
    assert [row["verdict"] for row in drain() if row["type"] == "control.fold_switched"][1:] == ["duplicate"]


def test_a_switch_between_the_start_of_the_streams_and_their_lock_is_noticed(
    drain: Callable[[], Rows],
    backbone_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kept_handlers: None,
) -> None:
    drain()
    for name, value in settings_environment(backbone_settings).items():
        monkeypatch.setenv(name, value)

    @contextmanager
    def locked_after_a_switch(settings: Settings) -> Iterator[None]:
        settled_by(settings, FOLD_VERSION + 1)
        with WriterClaim(settings):
            yield

    monkeypatch.setattr(run_streams, "WriterClaim", locked_after_a_switch)
    monkeypatch.setattr(run_streams, "prepare_session", lambda settings: pytest.fail("the streams start"))
    assert run_streams.main() == 4
    assert "start the newer program" in capsys.readouterr().err


def test_a_program_that_is_older_than_the_ledger_is_told_so(
    drain: Callable[[], Rows], backbone_settings: Settings
) -> None:
    drain()
    settled_by(backbone_settings, FOLD_VERSION + 1)
    for command in (["jobs.run_streams"], ["connectors.cli", "fold", "switch"]):
        refused = ran(backbone_settings, *command)
        assert refused.returncode == 4, refused.stderr
        assert "start the newer program" in refused.stderr
