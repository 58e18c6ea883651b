"""`trunkline upgrade` on the tables of an earlier fold version: its plan, its refusals, its result."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deltalake import DeltaTable

from connectors.cli.stack.upgrade_steps import LAST_COMMITS
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.tables.fold_version import FOLD_PROPERTY, version_of
from schemas.tables.ledger import LEDGER
from tests.connectors.cli.conftest import CommandLine
from tests.connectors.cli.test_fold import FIRST, JOB, records_of
from tests.jobs.topic_load import append_all, event, registration
from tests.settled_topic import settle_topic

# None of our commits has it, so nothing is checked out.
UNKNOWN = min(LAST_COMMITS) - 1


def set_version(settings: Settings, version: int) -> None:
    """Note in the ledger that this version settles it."""
    ledger = DeltaTable(settings.table_path(LEDGER))
    ledger.alter.set_table_properties({FOLD_PROPERTY: str(version)}, raise_if_not_exists=False)


def version(settings: Settings) -> int | None:
    return version_of(DeltaTable(settings.table_path(LEDGER)))


def told(trunkline: CommandLine, *arguments: str) -> dict[str, Any]:
    """The answer of `upgrade --json`."""
    done = trunkline.call("upgrade", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.requirement("ST-07")
def test_an_upgrade_switches_the_ledger_and_builds_the_views(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    append_all(hub_settings, [registration(JOB, keyring), event(JOB, 1, "started")])
    settle_topic(hub_settings, keyring)
    set_version(hub_settings, UNKNOWN)
    planned = told(trunkline, "--dry-run")
    assert (planned["ledger_version"], planned["left"], planned["dry_run"]) == (UNKNOWN, 0, True)
    assert version(hub_settings) == UNKNOWN, "the dry run changes nothing"
    up = trunkline.call("up", "--only", "gateway")
    assert (up.returncode, "./trunkline upgrade" in up.stderr) == (4, True)
    done = told(trunkline)
    assert [step["step"] for step in done["steps"]] == ["settle", "fold", "views", "done"]
    assert version(hub_settings) == FOLD_VERSION
    again = told(trunkline)
    assert [step["step"] for step in again["steps"]] == ["fold", "views", "done"]
    assert again["steps"][0]["result"] == f"is at version {FOLD_VERSION} already"


@pytest.mark.requirement("ST-07")
def test_an_upgrade_refuses_what_it_cannot_settle_a_newer_ledger_and_none(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    assert trunkline.call("upgrade").returncode == 3
    append_all(hub_settings, [registration(JOB, keyring), event(JOB, 1, "started")])
    last = records_of(hub_settings, FIRST + 2)[-1]
    settle_topic(hub_settings, keyring, lambda record: record.offset < last.offset or record.key != last.key)
    set_version(hub_settings, UNKNOWN)
    planned = told(trunkline, "--dry-run")
    assert planned["left"] == 1
    refused = trunkline.call("upgrade")
    assert refused.returncode == 4, refused.stderr
    assert f"no code with version {UNKNOWN}" in refused.stderr
    assert "./trunkline up --only kafka,streams" in refused.stderr
    assert version(hub_settings) == UNKNOWN
    set_version(hub_settings, FOLD_VERSION + 1)
    newer = trunkline.call("upgrade")
    assert (newer.returncode, "start the newer program" in newer.stderr) == (4, True)


@pytest.mark.requirement("ST-07")
def test_a_checkpoint_of_earlier_versions_is_left_behind_unless_it_is_ahead_of_the_ledger(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    append_all(hub_settings, [registration(JOB, keyring), event(JOB, 1, "started")])
    records = records_of(hub_settings, FIRST + 2)
    settle_topic(hub_settings, keyring)
    ends = {str(record.partition): record.offset + 1 for record in records}
    query = hub_settings.data_path / "checkpoints" / "settle_events"
    for name in ("commits", "offsets"):
        (query / name).mkdir(parents=True)
    (query / "commits" / "7").write_text('v1\n{"nextBatchWatermarkMs":0}')

    def settled(ends: dict[str, int]) -> None:
        lines = ("v1", '{"batchWatermarkMs":0}', json.dumps({hub_settings.kafka.topic: ends}))
        (query / "offsets" / "7").write_text("\n".join(lines))

    settled({**ends, "0": ends["0"] + 1})
    (query / "offsets" / "8").write_text("v1\n{}\n{}")
    refused = trunkline.call("upgrade")
    assert (refused.returncode, "the ledger has lost records" in refused.stderr) == (4, True)
    settled(ends)
    done = told(trunkline)
    assert "nothing reads" in next(step["result"] for step in done["steps"] if step["step"] == "state")
    assert (query / "commits" / "7").is_file(), "nothing is deleted"
