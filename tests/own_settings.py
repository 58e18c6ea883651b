"""Settings of a test's own: topic, MQTT prefixes, data directory and keyring that no other test has."""

from __future__ import annotations

import uuid
from pathlib import Path

from connectors.log.kafka_topic import ensure_topic
from schemas.keys.sealing import ensure_keyring
from schemas.settings.settings import (
    GatewaySettings,
    LimitSettings,
    MqttSettings,
    Settings,
    XmlPumpSettings,
)
from tests.broker_processes import LOOPBACK, BrokerProcess, kafka_at


def own_settings(kafka: BrokerProcess, mosquitto: BrokerProcess, folder: Path) -> Settings:
    """Such settings below `folder`; the topic is made and checked."""
    own = uuid.uuid4().hex[:12]
    settings = Settings(
        data_dir=folder / "data",
        kafka=kafka_at(
            kafka.port,
            topic=f"test.{own}",
            record_limit_bytes=1024 * 1024,
            delivery_timeout_s=10,
        ),
        limits=LimitSettings(payload_bytes=256 * 1024),
        # A gateway that was killed stays a member of its group for seconds, and its successor waits for that.
        gateway=GatewaySettings(reactor_group=f"reactor-{own}"),
        # Not the sample's: its listeners would be there in every test.
        xml_pump=XmlPumpSettings(organism_file=folder / "organism.yaml", processes=0),
        mqtt=MqttSettings(
            host=LOOPBACK,
            port=mosquitto.port,
            topic_prefix=f"test/{own}/jobs",
            agents_prefix=f"test/{own}/agents",
            bridge_client_id=f"bridge-{own}",
            connect_timeout_s=5,
            backoff_base_s=0.1,
            backoff_max_s=1,
        ),
    )
    ensure_keyring(settings)
    ensure_topic(settings)
    return settings
