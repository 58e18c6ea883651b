"""`trunkline keys end` and `keys mac`: what they append and write, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from kafka.admin import NewTopic

from connectors.log.publisher import Publisher
from connectors.plumbing.machine import state_file
from connectors.plumbing.tls_keys.master_keys import activate, add_key, rotate
from connectors.programs.local_stack.part_plan import BRIDGE, KAFKA
from schemas.keys.record_macs import FILE_BRIDGE, GATEWAY, load_mac_key, write_mac_key
from schemas.keys.sealing import Keyring, load_keyring
from schemas.log_access.event_topic import admin_client, topic_config
from schemas.settings.settings import Settings
from schemas.streams.control.control_fold import Topology
from schemas.streams.control.record_macs import MAC_KEY_ENDED, macs_required_records
from schemas.streams.mailboxes.message import Message
from tests.connectors.cli.conftest import CommandLine, json_of
from tests.settled_topic import build_views, records_in_topic, settle_topic, settled_rows


@pytest.mark.requirement("ST-06")
def test_an_old_master_key_ends_in_each_partition_and_the_active_one_does_not(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    old = keyring.active
    assert trunkline.call("keys", "end", old).returncode == 4
    assert trunkline.call("keys", "end", "nobodys").returncode == 3
    rotate(hub_settings)
    done = trunkline.call("keys", "end", old, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    partitions = {str(number) for number in range(hub_settings.kafka.partitions)}
    assert (told["key_id"], set(told["ended_at"])) == (old, partitions)
    now = load_keyring(hub_settings)
    rows = [row for part in records_in_topic(hub_settings).values() for row in settled_rows(part, now)]
    ended = [row for row in rows if row.type == MAC_KEY_ENDED]
    assert {str(row.partition): row.offset for row in ended} == told["ended_at"]
    assert {row.verdict for row in ended} == {"accepted"}


@pytest.mark.requirement("ST-05")
def test_the_key_of_a_bridge_is_written_to_a_file_that_the_bridge_reads(
    trunkline: CommandLine, hub_settings: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "file.key"
    assert trunkline.call("keys", "mac", "file", str(file)).returncode == 0
    elsewhere = Settings(data_dir=tmp_path / "elsewhere", mac_key_file=file)
    assert load_mac_key(elsewhere, FILE_BRIDGE) == load_mac_key(hub_settings, FILE_BRIDGE)
    assert trunkline.call("keys", "mac", "gateway", str(file)).returncode == 2
    assert trunkline.call("keys", "mac", "file", str(tmp_path / "none" / "file.key")).returncode == 2


def bridge_appends(settings: Settings, message_id: str) -> None:
    """A message in the name of the file bridge, under the key that the bridge's file has."""
    message = Message.model_validate(
        {"message_id": message_id, "from": "ann", "to": "bob", "kind": "note", "body": "x"}
        | {"sent_at": "2026-11-26T12:00:00Z", "schema_version": 1}
    )
    with Publisher(settings, signer=FILE_BRIDGE) as publisher:
        publisher.append(message.record(door="file", principal="ann")).result(20)


@pytest.mark.requirement("ST-06")
def test_a_key_that_a_program_still_uses_ends_only_by_force(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    file, old = tmp_path / "file.key", keyring.active
    bridge = hub_settings.model_copy(update={"mac_key_file": file})
    assert trunkline.call("keys", "mac", "file", str(file)).returncode == 0
    bridge_appends(bridge, "before")
    active = rotate(hub_settings)
    with Publisher(hub_settings, signer=GATEWAY) as publisher:
        for record in macs_required_records(hub_settings.kafka.partitions):
            publisher.append(record).result(20)
    settle_topic(hub_settings, load_keyring(hub_settings))

    refused = trunkline.call("keys", "end", old)
    assert refused.returncode == 4
    # The gateway has appended under the new key since its last record under the old one.
    assert re.search(r"did last: file \(at \d\d:\d\d:\d\d UTC\)\. Restart each with " + active, refused.stderr)
    # After a new file the bridge counts as changed, until another one goes on under the old key.
    assert trunkline.call("keys", "mac", "file", str(file)).returncode == 0
    bridge_appends(bridge, "changed")
    write_mac_key(keyring, FILE_BRIDGE, file)
    bridge_appends(bridge, "forgotten")
    settle_topic(hub_settings.model_copy(update={"data_dir": tmp_path / "again"}), load_keyring(hub_settings))
    elsewhere = {"TRUNKLINE__STORAGE__TABLES": str(tmp_path / "again" / "tables")}
    refused = trunkline.call("keys", "end", old, **elsewhere)
    assert refused.returncode == 4 and "did last: file (at " in refused.stderr

    assert trunkline.call("keys", "end", old, "--force").returncode == 0
    bridge_appends(bridge, "lost")
    now = load_keyring(hub_settings)
    rows = [row for part in records_in_topic(hub_settings).values() for row in settled_rows(part, now)]
    assert {row.ce_id: row.verdict for row in rows if row.door == "file"} == {
        "before": "accepted",
        "changed": "accepted",
        "forgotten": "accepted",
        "lost": "rejected",
    }


@pytest.mark.requirement("ST-06")
def test_a_key_ends_when_its_programs_have_all_appended_under_the_next_one(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring, tmp_path: Path
) -> None:
    bridge_appends(hub_settings, "before")
    rotate(hub_settings)
    bridge_appends(hub_settings, "after")
    with Publisher(hub_settings, signer=GATEWAY) as publisher:
        for record in macs_required_records(hub_settings.kafka.partitions):
            publisher.append(record).result(20)
    settle_topic(hub_settings, load_keyring(hub_settings))
    done = trunkline.call("keys", "end", keyring.active)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.requirement("ST-06")
def test_no_key_ends_while_a_part_of_the_stack_is_older_than_the_file_of_the_keys(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    own = state_file.identity()
    parts = {name: {"state": "ready", **own} for name in (KAFKA, BRIDGE)}
    state_file.write_state(hub_settings, {"supervisor": own, "phase": state_file.RUNNING, "parts": parts})
    activate(hub_settings, add_key(hub_settings))
    refused = trunkline.call("keys", "end", keyring.active)
    assert refused.returncode == 4
    assert f"{BRIDGE} started before {hub_settings.key_file} changed" in refused.stderr
    # As after a restart.
    os.utime(hub_settings.key_file, (own["created"] - 1, own["created"] - 1))
    assert trunkline.call("keys", "end", keyring.active).returncode == 0
    os.utime(hub_settings.key_file, (time.time(), time.time()))
    assert trunkline.call("keys", "end", keyring.active, "--force").returncode == 0


@pytest.mark.requirement("ST-06")
def test_an_ended_key_is_listed_as_ended_and_never_active_again(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    old = keyring.active
    active = rotate(hub_settings)
    assert trunkline.call("keys", "end", old).returncode == 0
    settle_topic(hub_settings, load_keyring(hub_settings))
    build_views(hub_settings)
    assert json_of(trunkline.call("keys", "list", "--json"))["master"] == [
        {"key_id": old, "active": False, "ended": True},
        {"key_id": active, "active": True, "ended": False},
    ]
    assert f"{old}  opens, ended for new records" in trunkline.call("keys", "list").stdout
    refused = trunkline.call("keys", "rotate", "master", "--activate", old)
    assert (refused.returncode, load_keyring(hub_settings).active) == (4, active)
    # Even if it was activated otherwise, it cannot end another one: its records would be rejected.
    activate(hub_settings, old)
    assert trunkline.call("keys", "end", active, "--force").returncode == 4


@pytest.mark.requirement("ST-06")
def test_a_key_also_ends_in_partitions_that_did_not_require_macs_yet(
    trunkline: CommandLine, hub_settings: Settings, keyring: Keyring
) -> None:
    kafka = hub_settings.kafka.model_copy(update={"topic": f"{hub_settings.kafka.topic}-old"})
    old_topic = hub_settings.model_copy(update={"kafka": kafka})
    with admin_client(kafka) as admin:
        admin.create_topics([NewTopic(kafka.topic, kafka.partitions, 1, topic_configs=topic_config(kafka))])
        admin.wait_for_topics([kafka.topic], timeout_ms=10_000)
    with Publisher(old_topic) as publisher:
        publisher.append(
            Topology(partitions=kafka.partitions, epoch=kafka.epoch).record(door="stack", principal="operator")
        ).result(20)
    rotate(hub_settings)
    done = trunkline.call("keys", "end", keyring.active, "--json", TRUNKLINE__KAFKA__TOPIC=kafka.topic)
    now = load_keyring(hub_settings)
    rows = [row for part in records_in_topic(old_topic).values() for row in settled_rows(part, now)]
    ended = {str(row.partition): row.offset for row in rows if row.type == MAC_KEY_ENDED}
    assert json_of(done)["ended_at"] == ended
    assert {row.verdict for row in rows} == {"accepted"}
