"""`trunkline log rebuild`: what it says before, while and after it makes the log again from the ledger."""

from __future__ import annotations

import json

import pytest

from connectors.tools.log_rebuild.rebuilt_topic import delete_topic, topic_state
from schemas.keys.sealing import Keyring
from schemas.log_access.event_topic import check_topic
from schemas.settings.settings import Settings
from tests.broker_processes import ProgramProcess
from tests.connectors.cli.conftest import CommandLine
from tests.connectors.tools.log_rebuild.test_log_rebuild import written_log
from tests.settled_topic import records_in_topic, settle_topic


@pytest.mark.requirement("OP-30")
def test_the_command_says_what_it_would_do_does_it_and_names_what_is_lost(
    backbone_settings: Settings, keyring: Keyring
) -> None:
    before = written_log(backbone_settings, keyring)
    count = sum(map(len, before.values()))
    settle_topic(backbone_settings, keyring)
    delete_topic(backbone_settings.kafka)
    trunkline = CommandLine(backbone_settings)
    dry = trunkline.call("log", "rebuild", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert f"{count} records in 4 partitions" in dry.stdout
    assert "does not exist: it is made" in dry.stdout
    assert f"partition 0 offset 0 to {len(before[0]) - 1}" in dry.stdout
    assert f"acknowledged beyond the ledger: partition 0 from offset {len(before[0])} on" in dry.stdout
    assert topic_state(backbone_settings.kafka) is None, "a dry run changes nothing"
    done = trunkline.call("log", "rebuild", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["written"], found["to_write"], found["lost"]) == (count, count, {})
    assert found["bytes"] > 1000
    check_topic(backbone_settings)
    after = records_in_topic(backbone_settings)
    assert [len(after[n]) for n in sorted(after)] == [len(before[n]) for n in sorted(before)]
    again = trunkline.call("log", "rebuild")
    assert again.returncode == 0, again.stderr
    assert f"holds {count} records, and all that the ledger has" in again.stdout
    assert "lost" not in again.stdout


@pytest.mark.requirement("OP-33")
def test_nothing_is_rebuilt_while_a_gateway_answers(trunkline: CommandLine, gateway: ProgramProcess) -> None:
    refused = trunkline.call("log", "rebuild", "--dry-run")
    assert refused.returncode == 4
    assert "a gateway answers" in refused.stderr
