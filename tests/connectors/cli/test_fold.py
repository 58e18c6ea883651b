"""`trunkline fold`: what is left to settle before a version is switched on, and which doors must be closed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from connectors.log.topic_consumer import LogTail
from connectors.programs.local_stack import LocalStack, free_port
from schemas.fold.settled import FOLD_VERSION
from schemas.keys.sealing import Keyring
from schemas.settings.settings import Settings
from schemas.tables.arrow_tables import ledger_batch
from schemas.tables.fold_version import FOLD_PROPERTY
from schemas.tables.ledger import LEDGER, ledger_row
from schemas.wire.record import Record
from tests.broker_processes import LOOPBACK, wait_until
from tests.connectors.cli.conftest import CommandLine
from tests.connectors.folded_log import FoldedLog
from tests.jobs.topic_load import append_all, event, registration
from tests.raw_records import begin_transaction

JOB = "0badcafe"
# The topology, and that each of the four partitions requires MACs.
FIRST = 5


def records_of(settings: Settings, count: int) -> list[Record]:
    """The first records of the log, in the order of partition and offset."""
    found: list[Record] = []

    def are_all_read() -> bool:
        found.extend(tail.poll(0.2))
        return len(found) >= count

    with LogTail(settings.kafka, {}) as tail:
        wait_until(are_all_read, what=f"{count} records")
    assert len(found) == count
    return sorted(found, key=lambda record: (record.partition, record.offset))


def write_ledger(settings: Settings, keyring: Keyring, records: list[Record]) -> None:
    """The ledger of these records, settled by this version, in the place of what there is."""
    folded = FoldedLog(keyring)
    rows = [ledger_row(record, folded.add(record), keyring) for record in records]
    write_deltalake(settings.table_path(LEDGER), ledger_batch(rows), mode="overwrite")


def write_views(settings: Settings, keyring: Keyring, records: list[Record]) -> None:
    """`stream_entries` with the progress of having seen these records."""
    folded = FoldedLog(keyring)
    for record in records:
        folded.add(record)
    folded.write_entries(settings, folded.next_offsets)


def settle_by_an_earlier_version(settings: Settings) -> None:
    """Note in the ledger that another version settles it."""
    noted = {FOLD_PROPERTY: str(FOLD_VERSION - 1)}
    DeltaTable(settings.table_path(LEDGER)).alter.set_table_properties(noted, raise_if_not_exists=False)


def status(trunkline: CommandLine) -> dict[str, Any]:
    """`fold status --json`."""
    done = trunkline.call("fold", "status", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_status_says_how_many_records_of_the_log_ledger_and_views_lack(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    append_all(hub_settings, [registration(JOB, keyring), event(JOB, 1, "started"), event(JOB, 2)])
    records = records_of(hub_settings, FIRST + 3)
    of_the_job = [record for record in records if record.key == f"job/{JOB}".encode()]
    write_ledger(hub_settings, keyring, [one for one in records if one != of_the_job[-1]])
    assert status(trunkline)["left"] == {"ledger": 1, "views": FIRST + 3}
    write_views(hub_settings, keyring, [one for one in records if one not in of_the_job[1:]])
    found = status(trunkline)
    assert (found["left"], found["why"]) == ({"ledger": 1, "views": 2}, None)
    assert found["log"][str(of_the_job[-1].partition)] == of_the_job[-1].offset + 1
    told = trunkline.call("fold", "status").stdout
    assert "left: 1 for the ledger, 2 for the views" in told
    settle_by_an_earlier_version(hub_settings)
    refused = trunkline.call("fold", "switch")
    assert (refused.returncode, "the ledger lacks records of the log, 1 in all" in refused.stderr) == (4, True)
    assert "until ./trunkline fold status says that none are left" in refused.stderr
    write_ledger(hub_settings, keyring, records)
    write_views(hub_settings, keyring, records)
    assert status(trunkline)["left"] == {"ledger": 0, "views": 0}
    assert "left: 0 for the ledger, 0 for the views" in trunkline.call("fold", "status").stdout


@pytest.mark.parametrize("ending", ["commit_transaction", "abort_transaction"])
def test_the_end_of_a_transaction_is_nothing_that_is_left_and_holds_up_no_switch(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring, ending: str
) -> None:
    getattr(begin_transaction(hub_settings.kafka), ending)(20)
    found = records_of(hub_settings, FIRST + 1)
    *first, strange = sorted(found, key=lambda record: record.key == b"job/0a1b2c3d")
    write_ledger(hub_settings, keyring, first)
    write_views(hub_settings, keyring, first)
    left = status(trunkline)["left"]
    assert left["ledger"] == left["views"] >= 1
    write_ledger(hub_settings, keyring, found)
    assert status(trunkline)["left"] == {"ledger": 0, "views": 1}
    write_views(hub_settings, keyring, found)
    assert status(trunkline)["left"] == {"ledger": 0, "views": 0}
    settle_by_an_earlier_version(hub_settings)
    switched = trunkline.call("fold", "switch", "--json")
    assert switched.returncode == 0, switched.stderr
    assert json.loads(switched.stdout)["switch"]["offsets"][str(strange.partition)] == strange.offset + 1


def test_while_kafka_does_not_answer_the_status_says_so_and_all_else(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    write_ledger(hub_settings, keyring, records_of(hub_settings, FIRST))
    away = {"TRUNKLINE__KAFKA__BOOTSTRAP_SERVERS": f"{LOOPBACK}:{free_port()}"}
    told = trunkline.call("fold", "status", **away)
    assert told.returncode == 0, told.stderr
    assert f"version {FOLD_VERSION} settles the ledger" in told.stdout
    assert "left is not known: Kafka does not answer at" in told.stdout
    found = json.loads(trunkline.call("fold", "status", "--json", **away).stdout)
    assert (found["log"], found["left"]) == (None, None)
    assert "Kafka does not answer at" in found["why"]
    assert sum(found["ledger"].values()) == FIRST


def test_nothing_is_switched_while_the_stack_has_a_part_beside_its_brokers(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    records = records_of(hub_settings, FIRST)
    write_ledger(hub_settings, keyring, records)
    write_views(hub_settings, keyring, records)
    settle_by_an_earlier_version(hub_settings)
    with LocalStack(hub_settings, ("bridge",)):
        refused = trunkline.call("fold", "switch")
    assert refused.returncode == 4
    assert "the doors are open: bridge run; close them first: ./trunkline down" in refused.stderr
    assert trunkline.call("fold", "switch").returncode == 0, "nothing else was in the way"
