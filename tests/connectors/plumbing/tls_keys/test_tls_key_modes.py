"""A private key of TLS that others can read is not used, whoever would load it, and the setting is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.plumbing.gateway_client.gateway_access import listener_context
from connectors.plumbing.tls_keys.tls_files import client_name, create
from schemas.log_access.kafka_clients import kafka_context, spark_security
from schemas.settings.settings import GatewaySettings, KafkaSettings, MqttSettings, SettingsError
from trunkline_agent.errors import UsageError
from trunkline_agent.mqtt.mqtt_tls import mqtt_context

pytestmark = pytest.mark.requirement("JE-23")


def gateway(certificate: Path, key: Path | None) -> object:
    return listener_context(GatewaySettings(certfile=certificate, keyfile=key))


def mqtt(certificate: Path, key: Path | None) -> object:
    return mqtt_context(MqttSettings(tls=True, certfile=certificate, keyfile=key))


def kafka(certificate: Path, key: Path | None) -> object:
    return kafka_context(KafkaSettings(security_protocol="SSL", ssl_certfile=certificate, ssl_keyfile=key))


def spark(certificate: Path, key: Path | None) -> object:
    return spark_security(KafkaSettings(security_protocol="SSL", ssl_certfile=certificate))


@pytest.mark.parametrize(
    ("load", "setting"),
    [(gateway, "gateway.keyfile"), (mqtt, "mqtt.keyfile"), (kafka, "kafka.ssl_keyfile")],
)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_read_is_not_loaded_and_the_setting_is_named(
    load: Callable[[Path, Path | None], object], setting: str, mode: int, tmp_path: Path
) -> None:
    pair = create(tmp_path / "tls", mutual=True).of(client_name("operator"))
    assert load(pair.certificate, pair.key) is not None
    pair.key.chmod(mode)
    with pytest.raises((SettingsError, UsageError), match=rf"^{setting}: .*; run: chmod 600 {pair.key}$"):
        load(pair.certificate, pair.key)
    pair.key.chmod(0o600)
    assert load(pair.certificate, pair.key) is not None


@pytest.mark.parametrize(
    ("load", "setting"),
    [
        (gateway, "gateway.certfile"),
        (mqtt, "mqtt.certfile"),
        (kafka, "kafka.ssl_certfile"),
        (spark, "kafka.ssl_certfile"),
    ],
)
def test_so_is_a_file_that_holds_the_key_beside_the_certificate(
    load: Callable[[Path, Path | None], object], setting: str, tmp_path: Path
) -> None:
    both = create(tmp_path / "tls").folder / "kafka.pem"
    assert load(both, None)
    both.chmod(0o644)
    with pytest.raises((SettingsError, UsageError), match=rf"^{setting}: .*; run: chmod 600 {both}$"):
        load(both, None)


@pytest.mark.parametrize("load", [gateway, mqtt, kafka])
def test_of_a_key_that_is_not_there_it_is_said_that_it_is_missing(
    load: Callable[[Path, Path | None], object], tmp_path: Path
) -> None:
    pair = create(tmp_path / "tls").of("gateway")
    pair.key.unlink()
    with pytest.raises((SettingsError, UsageError), match="No such file"):
        load(pair.certificate, pair.key)
