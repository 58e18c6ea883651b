"""The MQTT user of a program: the settings' own, a job's, a role's, or nobody."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from pydantic import SecretStr

from connectors.plumbing.mqtt_link.broker_settings import (
    OPERATOR,
    ROLES,
    ensure_role_passwords,
    load_role_passwords,
    role_file,
    role_mqtt,
)
from schemas.settings.settings import Settings, SettingsError
from tests.broker_processes import with_mqtt
from trunkline_agent.broker import BrokerAccess, clear_password, job_broker
from trunkline_agent.wire.mqtt_password import mqtt_password

pytestmark = pytest.mark.requirement("JE-13")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


def login_of(mqtt: BrokerAccess) -> tuple[str | None, str | None]:
    return mqtt.username, clear_password(mqtt)


def test_user_name_and_password_of_the_settings_win(settings: Settings) -> None:
    ensure_role_passwords(settings)
    explicit = with_mqtt(settings, username="ann", password=SecretStr("a word"))
    assert login_of(role_mqtt(explicit, OPERATOR)) == ("ann", "a word")
    assert login_of(job_broker(explicit.mqtt, "0a1b2c3d", "s")) == ("ann", "a word")


def test_a_job_uses_its_id_and_what_follows_from_its_secret(settings: Settings) -> None:
    found = job_broker(settings.mqtt, "0a1b2c3d", "s")
    assert login_of(found) == ("0a1b2c3d", mqtt_password("s", "0a1b2c3d"))
    assert "s" not in login_of(found)


def test_the_password_of_a_job_is_the_documented_hmac() -> None:
    # From openssl: printf 'trunkline mqtt password/0a1b2c3d' | openssl dgst -sha256 -hmac secret
    expected = "aa3c8410ae343cd10173f76c8abbff1654037d2a336acefa64752ec89a662697"
    assert mqtt_password("secret", "0a1b2c3d") == expected


def test_a_role_uses_the_key_file_and_without_one_nobodys_name(settings: Settings) -> None:
    assert login_of(role_mqtt(settings, OPERATOR)) == (None, None)
    passwords = ensure_role_passwords(settings)
    assert login_of(role_mqtt(settings, OPERATOR)) == (OPERATOR, passwords[OPERATOR].get_secret_value())


@pytest.mark.parametrize("changes", [{"host": "broker.example"}, {"tls": True}])
def test_a_roles_password_is_not_sent_to_a_broker_elsewhere(settings: Settings, changes: dict) -> None:
    ensure_role_passwords(settings)
    assert login_of(role_mqtt(with_mqtt(settings, **changes), OPERATOR)) == (None, None)


@pytest.mark.requirement("CM-05")
def test_the_roles_passwords_are_made_once_random_and_private(settings: Settings, tmp_path: Path) -> None:
    first = ensure_role_passwords(settings)
    assert ensure_role_passwords(settings) == first
    assert stat.S_IMODE(role_file(settings).stat().st_mode) == 0o600
    assert [path.name for path in role_file(settings).parent.iterdir()] == ["mqtt.json"]
    other = ensure_role_passwords(Settings(data_dir=tmp_path / "other"))
    values = {p.get_secret_value() for found in (first, other) for p in found.values()}
    assert len(values) == 2 * len(ROLES) and all(len(value) == 64 for value in values)


@pytest.mark.requirement("CM-05")
def test_a_key_file_that_others_can_read_or_that_is_none_is_refused(settings: Settings) -> None:
    ensure_role_passwords(settings)
    path = role_file(settings)
    path.chmod(0o640)
    with pytest.raises(SettingsError, match=f"chmod 600 {path}"):
        role_mqtt(settings, OPERATOR)
    path.chmod(0o600)
    for broken in ("", "[]", "{}", json.dumps(dict.fromkeys(ROLES, "")), json.dumps(dict.fromkeys(ROLES, 7))):
        path.write_text(broken)
        with pytest.raises(SettingsError, match="remove it"):
            load_role_passwords(settings)
