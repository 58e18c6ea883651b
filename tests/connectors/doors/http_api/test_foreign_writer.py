"""Somebody with a stolen Kafka login appends well-formed records of every kind, past all doors."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from connectors.hub.live.live_view import LiveView
from connectors.log.ledger_files.ledger_replay import replayable
from schemas.keys.record_macs import GATEWAY, MQTT_BRIDGE, SIGNED_BY_AUTHOR, mac_headers
from schemas.keys.sealing import Keyring, load_keyring
from schemas.settings.settings import Settings
from schemas.streams.control.record_macs import (
    macs_stream,
    rules_of,
)
from schemas.streams.fold import RECORD_TYPES, VIEWS
from schemas.wire.record import OutgoingRecord
from tests.connectors.doors.http_api.hub_access import GatewayProcess, register
from tests.raw_records import Raw, append_raw, raw
from tests.schemas.stream_records import GOOD
from tests.settled_topic import records_in_topic, settled_rows
from trunkline_agent.errors import Refused

STRANGER = Keyring({"stranger": bytes(range(32))}, "stranger")


def outgoing(record_type: str) -> OutgoingRecord:
    """A good record of this type, as its door would append it."""
    key, body = GOOD[record_type]
    door = "mqtt" if record_type in SIGNED_BY_AUTHOR else "http"
    value = json.dumps(body).encode()
    return OutgoingRecord(key.decode(), f"forged {record_type}", door, "operator", record_type, value)


def forged(made: OutgoingRecord, keyring: Keyring | None, signer: str = GATEWAY) -> Raw:
    """The record with a MAC of this keyring, or without one."""
    mac = None if keyring is None else mac_headers(made, keyring.mac_key(signer))
    return Raw(made.key, made.value, list(made.headers(mac=mac)))


@pytest.mark.requirement("ST-04")
@pytest.mark.requirement("ST-05")
def test_records_of_every_type_change_nothing_at_the_gateway_and_in_the_ledger(
    gateway: GatewayProcess, operator: httpx.Client
) -> None:
    settings = gateway.settings
    before = register(operator)
    keyring = load_keyring(settings)
    records = [outgoing(record_type) for record_type in RECORD_TYPES if record_type not in SIGNED_BY_AUTHOR]
    attack = [
        *(forged(made, None) for made in records),
        *(forged(made, STRANGER) for made in records),
        # With the key of a bridge that was stolen, too.
        *(forged(made, keyring, MQTT_BRIDGE) for made in records),
    ]
    append_raw(settings, attack)
    register(operator)
    rows = [row for part in records_in_topic(settings).values() for row in settled_rows(part, keyring)]
    told = {row.ce_id: (row.verdict, row.reason) for row in rows if (row.ce_id or "").startswith("forged")}
    assert len(told) == len(records)
    assert set(told.values()) == {("rejected", "unauthenticated_record")}
    view = LiveView(settings, keyring)
    view.open()
    try:
        shown = {name: len(view.rows(name)) for name in VIEWS}
        agents = view.rows("registry_agents")
    finally:
        view.close()
    # The gateway itself has declared its agents.
    assert {name for name, count in shown.items() if count} == {"registry_jobs", "registry_agents"}
    assert shown["registry_jobs"] == 2
    assert "ada" not in {row.agent_name for row in agents}
    metrics = operator.get("/metrics").text
    line = next(line for line in metrics.splitlines() if 'reason="unauthenticated_record"' in line)
    assert float(line.rpartition(" ")[2]) == len(attack)
    assert operator.get(f"/api/hub/jobs/{before['job_id']}").status_code == 200


@pytest.mark.requirement("ST-06")
def test_the_first_records_of_a_topic_require_macs_and_a_gateway_completes_them(
    backbone_settings: Settings, start_gateway: Callable[..., GatewayProcess]
) -> None:
    partitions = backbone_settings.kafka.partitions
    keyring = load_keyring(backbone_settings)
    view = LiveView(backbone_settings, keyring)
    view.open()
    try:
        for partition in range(partitions):
            assert rules_of(view.entries(macs_stream(partition))) is not None
    finally:
        view.close()
    start_gateway()
    found = [record.key for part in records_in_topic(backbone_settings).values() for record in part]
    for partition in range(partitions):
        assert found.count(macs_stream(partition).encode()) == 1, "nothing is appended twice"


@pytest.mark.requirement("ST-04")
def test_dead_letters_without_a_valid_mac_are_not_replayed(backbone_settings: Settings) -> None:
    keyring = load_keyring(backbone_settings)
    made = outgoing("principal.added")
    (record,) = append_raw(backbone_settings, [raw(made)])
    rows = settled_rows(records_in_topic(backbone_settings)[record.partition], keyring)
    row = next(row for row in rows if row.offset == record.offset)._asdict()
    with pytest.raises(Refused, match="no valid MAC"):
        replayable(_shown(row), keyring)
    # Settled before the switch, for another reason: a new MAC would vouch for it.
    with pytest.raises(Refused, match="without a valid MAC"):
        replayable(_shown({**row, "reason": "malformed"}), keyring)


def _shown(row: dict[str, object]) -> dict[str, object]:
    """The row as the reader of the ledger gives it."""
    from datetime import UTC, datetime

    return {**row, "logged_at": datetime.fromtimestamp(row["logged_at"] / 1e6, UTC)}
