"""Settings of a test's own: topic, MQTT prefixes, data directory and keyring that no other test has."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from kafka.admin import NewTopic

from connectors.log.kafka_topic import append_first_records
from connectors.programs.local_stack import free_port
from schemas.keys.sealing import ensure_keyring
from schemas.log_access.event_topic import admin_client, topic_config
from schemas.settings.settings import (
    AgentMcpSettings,
    DashboardSettings,
    GatewaySettings,
    KafkaSettings,
    LimitSettings,
    MqttSettings,
    Settings,
    XmlPumpSettings,
)
from tests.broker_processes import LOOPBACK, BrokerProcess, kafka_at


def own_settings(kafka: BrokerProcess, mosquitto: BrokerProcess, folder: Path) -> Settings:
    """Such settings below `folder`; the topic is made."""
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
    make_topic(settings)
    return settings


def stack_settings(folder: Path, **groups: Any) -> Settings:
    """Settings on free ports, with `folder` for the data. `groups` replace groups of them, such as `views`."""
    return Settings(
        **{
            "data_dir": folder,
            "kafka": KafkaSettings(bootstrap_servers=f"{LOOPBACK}:{free_port()}"),
            "mqtt": MqttSettings(port=free_port()),
            "gateway": GatewaySettings(port=free_port()),
            "dashboard": DashboardSettings(port=free_port()),
            "agent_mcp": AgentMcpSettings(port=free_port()),
            **groups,
        }
    )


def make_topic(settings: Settings) -> None:
    """Make a topic as `ensure_topic` does, without its questions: nobody else has a topic of this name."""
    kafka = settings.kafka
    topic = NewTopic(kafka.topic, kafka.partitions, kafka.replication_factor, topic_configs=topic_config(kafka))
    with admin_client(kafka) as admin:
        admin.create_topics([topic])
        admin.wait_for_topics([kafka.topic], timeout_ms=10_000)
    append_first_records(settings)
