"""`trunkline keys end` and `keys mac`: what they append and write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from connectors.tls_keys.master_keys import rotate
from schemas.keys.record_macs import FILE_BRIDGE, load_mac_key
from schemas.keys.sealing import Keyring, load_keyring
from schemas.settings.settings import Settings
from schemas.streams.control.record_macs import MAC_KEY_ENDED
from tests.connectors.cli.conftest import CommandLine
from tests.settled_topic import records_in_topic, settled_rows


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
