"""`trunkline up --profile`: what it writes to the settings file, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from connectors.cli.main import main
from connectors.cli.stack.profiles import take_over
from schemas.settings import settings as settings_module
from schemas.settings.settings import Settings, load_settings
from trunkline_agent.errors import Refused, UsageError

pytestmark = pytest.mark.requirement("DP-09")
SERVERS = "127.0.0.1:19092,127.0.0.1:19093,127.0.0.1:19094"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file of the test's own in the place of the checkout's, which does not exist yet."""
    path = tmp_path / "trunkline.yaml"
    monkeypatch.setattr(settings_module, "_DEFAULT_FILE", path)
    monkeypatch.delenv("TRUNKLINE_CONF", raising=False)
    return path


def taken() -> Settings:
    """The settings with those of the profile."""
    return take_over("durable", load_settings(), lambda _: None)


def test_the_settings_are_written_once_and_other_commands_have_them(file: Path) -> None:
    found = taken()
    assert found.kafka.bootstrap_servers == SERVERS
    assert (found.kafka.replication_factor, found.kafka.wanted_in_sync_replicas) == (3, 2)
    assert load_settings() == found
    before = file.read_bytes()
    assert take_over("durable", found, lambda _: None) == found
    assert file.read_bytes() == before


def test_what_the_file_has_stays_as_it_is(file: Path) -> None:
    text = "# Ours.\nmqtt:\n  port: 1999 # chosen\n"
    file.write_text(text)
    assert taken().mqtt.port == 1999
    assert file.read_text().startswith(text)
    assert yaml.safe_load(file.read_text()).keys() == {"mqtt", "kafka"}


def test_other_addresses_are_kept_if_they_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    own = "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"
    monkeypatch.setenv("TRUNKLINE__KAFKA__BOOTSTRAP_SERVERS", own)
    found = take_over("durable", load_settings(), lambda _: None)
    assert (found.kafka.bootstrap_servers, found.kafka.replication_factor) == (own, 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kafka: {bootstrap_servers: '127.0.0.1:1'}", "bootstrap_servers is 127.0.0.1:1 .*trunkline.yaml"),
        ("kafka: {replication_factor: 1}", r"replication_factor is 1 \(from .*\), and 3 in the profile"),
        ("kafka: {min_in_sync_replicas: 1}", r"min_in_sync_replicas is 1 \(from .*\), and 2 in the profile"),
        ("kafka: {topic: ours}", "settings of its own: add those of the profile durable:\n.*\nkafka:\n"),
    ],
)
def test_settings_of_the_file_are_not_contradicted(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(Refused, match=told):
        take_over("durable", load_settings(), lambda _: None)
    assert file.read_text() == text


def test_nothing_is_written_of_what_the_stack_cannot_run(file: Path) -> None:
    def check(wanted: Settings) -> None:
        raise UsageError(wanted.kafka.bootstrap_servers)

    with pytest.raises(UsageError, match=SERVERS):
        take_over("durable", load_settings(), check)
    assert not file.exists()


def test_an_unknown_profile_and_a_file_that_takes_nothing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--profile", "quick"]) == 2
    assert "no such profile: quick; there is durable" in capsys.readouterr().err
    monkeypatch.setenv("TRUNKLINE_CONF", "/dev/null")
    assert main(["up", "--profile", "durable"]) == 2
    assert (
        "set kafka.bootstrap_servers, kafka.min_in_sync_replicas, kafka.replication_factor as variables"
        in capsys.readouterr().err
    )
