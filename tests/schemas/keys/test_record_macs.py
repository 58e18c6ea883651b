"""The key of a bridge's records in its own file, for a machine without the master keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.keys.record_macs import (
    FILE_BRIDGE,
    GATEWAY,
    MQTT_BRIDGE,
    is_mac_of,
    load_mac_key,
    mac_of,
    write_mac_key,
)
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import Settings, SettingsError


@pytest.mark.requirement("ST-05")
def test_a_bridge_has_the_same_key_from_its_file_as_from_the_master_keys(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    keyring = ensure_keyring(settings)
    file = tmp_path / "file.key"
    key = write_mac_key(keyring, FILE_BRIDGE, file)
    assert file.stat().st_mode & 0o777 == 0o600
    elsewhere = Settings(data_dir=tmp_path / "elsewhere", mac_key_file=file)
    assert load_mac_key(elsewhere, FILE_BRIDGE) == key == load_mac_key(settings, FILE_BRIDGE)
    assert keyring.known_mac_key(key.name) == key
    assert len({load_mac_key(settings, signer).key for signer in (GATEWAY, MQTT_BRIDGE, FILE_BRIDGE)}) == 3
    master = settings.key_file.read_text()
    assert not any(part in file.read_text() for part in master.split('"') if len(part) > 30)


@pytest.mark.requirement("ST-05")
def test_a_key_file_that_cannot_be_used_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    file = tmp_path / "file.key"
    elsewhere = Settings(data_dir=tmp_path, mac_key_file=file)
    with pytest.raises(SettingsError, match="cannot read"):
        load_mac_key(elsewhere, FILE_BRIDGE)
    write_mac_key(ensure_keyring(settings), FILE_BRIDGE, file)
    with pytest.raises(SettingsError, match="has the key of 'file', this program needs 'mqtt'"):
        load_mac_key(elsewhere, MQTT_BRIDGE)
    file.chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        load_mac_key(elsewhere, FILE_BRIDGE)
    for text in ("", "{}", "[1]", '{"name":"x","master":"k","signer":"file","key":"?"}'):
        file.write_text(text)
        file.chmod(0o600)
        with pytest.raises(SettingsError, match="keys mac file FILE"):
            load_mac_key(elsewhere, FILE_BRIDGE)


def test_a_mac_belongs_to_its_key_and_its_bytes(tmp_path: Path) -> None:
    key = ensure_keyring(Settings(data_dir=tmp_path)).mac_key(GATEWAY)
    mac = mac_of(key, b"content")
    assert len(mac) == 32
    assert is_mac_of(key, b"content", mac)
    for data, told in (
        (b"content.", mac),
        (b"content", mac[:-1]),
        (b"content", ""),
        (b"content", mac.upper() + "0"),
    ):
        assert not is_mac_of(key, data, told)
