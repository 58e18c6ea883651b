"""`trunkline upgrade` on the tables of an earlier fold version: its plan, its refusals, its result."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from connectors.cli.stack import fold_command
from connectors.cli.stack.fold_command import run_job
from connectors.cli.stack.upgrade_command import LAST_COMMITS, _environment_for_earlier
from connectors.programs.local_stack import free_port
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import Keyring
from schemas.settings.settings import PROJECT_ROOT, Settings
from schemas.streams.mailboxes.message import MAILBOX_VIEW
from schemas.tables.fold_version import FOLD_PROPERTY, version_of
from schemas.tables.ledger import LEDGER
from tests.broker_processes import LOOPBACK
from tests.connectors.cli.conftest import CommandLine
from tests.connectors.cli.test_fold import FIRST, JOB, records_of
from tests.jobs.topic_load import append_all, event, registration
from tests.settled_topic import build_views, records_in_topic, settle_topic, settled_rows

EARLIER = min(LAST_COMMITS)
NOWHERE = "0" * 40


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
    set_version(hub_settings, EARLIER)
    planned = told(trunkline, "--dry-run")
    assert (planned["ledger_version"], planned["left"], planned["dry_run"]) == (EARLIER, 0, True)
    assert version(hub_settings) == EARLIER, "the dry run changes nothing"
    up = trunkline.call("up", "--only", "gateway")
    assert (up.returncode, "./trunkline upgrade" in up.stderr) == (4, True)
    done = told(trunkline)
    assert [step["step"] for step in done["steps"]] == ["settle", "fold", "views", "done"]
    assert version(hub_settings) == FOLD_VERSION
    again = told(trunkline)
    assert [step["step"] for step in again["steps"]] == ["fold", "views", "done"]
    assert again["steps"][0]["result"] == f"is at version {FOLD_VERSION} already"


@pytest.mark.requirement("ST-07")
def test_an_upgrade_builds_views_with_other_columns_that_lack_records(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    append_all(hub_settings, [registration(JOB, keyring)])
    ledger = settle_topic(hub_settings, keyring)
    build_views(hub_settings)
    known = {number: len(records) for number, records in records_in_topic(hub_settings).items()}
    append_all(hub_settings, [registration("0badf00d", keyring)])
    found = records_in_topic(hub_settings).items()
    ledger.commit(*(settled_rows(records, keyring)[known[number] :] for number, records in found))
    ledger.keep()
    # As an earlier version had it.
    mailbox = DeltaTable(hub_settings.table_path(MAILBOX_VIEW))
    narrow = mailbox.to_pyarrow_table().drop_columns(["last_reason", "replay_of"])
    write_deltalake(mailbox, narrow, mode="overwrite", schema_mode="overwrite", partition_by=["shelf"])
    set_version(hub_settings, EARLIER)
    assert told(trunkline)["ledger_version"] == EARLIER
    assert version(hub_settings) == FOLD_VERSION
    left = trunkline.json("fold", "status")["left"]
    assert left["views"] == left["ledger"], "the views are at the ledger's end"
    assert "last_reason" in DeltaTable(hub_settings.table_path(MAILBOX_VIEW)).to_pyarrow_table().column_names


@pytest.mark.requirement("ST-07")
def test_an_upgrade_refuses_what_it_cannot_settle_other_ledgers_and_none(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAST_COMMITS, EARLIER, NOWHERE)
    assert trunkline.call("upgrade").returncode == 3
    append_all(hub_settings, [registration(JOB, keyring), event(JOB, 1, "started")])
    last = records_of(hub_settings, FIRST + 2)[-1]
    settle_topic(hub_settings, keyring, lambda record: record.offset < last.offset or record.key != last.key)
    set_version(hub_settings, EARLIER)
    for arguments in (["--dry-run"], []):
        refused = trunkline.call("upgrade", *arguments)
        assert refused.returncode == 4, refused.stderr
        assert f"no code with version {EARLIER}" in refused.stderr
        assert "./trunkline up --only kafka,streams" in refused.stderr
    assert version(hub_settings) == EARLIER
    set_version(hub_settings, FOLD_VERSION + 1)
    newer = trunkline.call("upgrade")
    assert (newer.returncode, "start the newer program" in newer.stderr) == (4, True)
    set_version(hub_settings, EARLIER - 1)
    older = trunkline.call("upgrade", "--dry-run")
    assert (older.returncode, f"upgrade begins with version {EARLIER}" in older.stderr) == (
        4,
        True,
    )


def test_a_plan_says_that_the_earlier_version_is_missing(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAST_COMMITS, EARLIER, NOWHERE)
    settle_topic(hub_settings, keyring)
    set_version(hub_settings, EARLIER)
    away = {"TRUNKLINE__KAFKA__BOOTSTRAP_SERVERS": f"{LOOPBACK}:{free_port()}"}
    planned = json.loads(trunkline.call("upgrade", "--dry-run", "--json", **away).stdout)
    assert planned["left"] is None
    assert f"they would be refused, the history here has no code with version {EARLIER}" in str(
        planned["steps"]
    )


LOADED = """
from schemas.settings.settings import load_settings
found = load_settings()
audit, kafka, spark = found.audit, found.kafka, found.spark
print(found.data_path, found.tables_root, found.tls_path, sep="\\n")
print(audit.chain_dir, audit.anchors_dir, audit.key_file, sep="\\n")
print(spark.master, spark.driver_memory, kafka.topic, kafka.partitions, kafka.security_protocol, sep="\\n")
"""


@pytest.mark.requirement("ST-07")
def test_the_two_versions_of_the_fold_before_this_one_are_brought_over() -> None:
    assert sorted(LAST_COMMITS) == [FOLD_VERSION - 2, FOLD_VERSION - 1]
    page = (PROJECT_ROOT / "docs/how-to/upgrade.md").read_text()
    assert f"`upgrade` begins with fold version {FOLD_VERSION - 2} " in page
    assert f"\n| {FOLD_VERSION} | " in page


@pytest.mark.slow
@pytest.mark.requirement("ST-07")
@pytest.mark.parametrize("earlier", sorted(LAST_COMMITS))
def test_the_earlier_version_gets_the_settings_that_say_where_everything_is(
    tmp_path: Path, earlier: int
) -> None:
    kept = subprocess.run(
        ["git", "-C", str(PROJECT_ROOT), "archive", LAST_COMMITS[earlier], "schemas"], capture_output=True
    )
    assert kept.returncode == 0, f"this test needs the history of the repository: {kept.stderr.decode()}"
    with tarfile.open(fileobj=io.BytesIO(kept.stdout)) as archive:
        archive.extractall(tmp_path, filter="data")
    # The data directory is the default. Paths are relative to the checkout, and the earlier one has another.
    settings = Settings.model_validate(
        {
            "tls_dir": "own/tls",
            "storage": {"tables": "own/tables"},
            "audit": {"chain_dir": "own/chain", "anchors_dir": "/own/anchors", "key_file": "own/audit.pem"},
            "spark": {"driver_memory": "2g", "master": "spark://one:7077", "tasks": 8},
            "kafka": {"topic": "own", "partitions": 7, "min_in_sync_replicas": 1, "sasl_password": "own"},
        }
    )
    environment = _environment_for_earlier(settings)
    done = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    own = PROJECT_ROOT / "own"
    assert done.stdout.splitlines() == [
        *map(
            str,
            (
                PROJECT_ROOT / "var",
                own / "tables",
                own / "tls",
                own / "chain",
                "/own/anchors",
                own / "audit.pem",
            ),
        ),
        *("spark://one:7077", "2g", "own", "7", "SASL_PLAINTEXT"),
    ]


def test_a_job_that_takes_long_is_reported(
    hub_settings: Settings,
    keyring: Keyring,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settle_topic(hub_settings, keyring)
    monkeypatch.setattr(fold_command, "_REPORT_EVERY_S", 0.05)
    assert run_job(hub_settings, "switch_fold").returncode == 0
    assert "switch_fold has run for 0 s" in capsys.readouterr().err
