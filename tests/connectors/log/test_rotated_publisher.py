"""The publisher of a job whose secret was rotated: what waits in its outbox is signed anew, and counts once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.settings.settings import Settings
from tests.broker_processes import free_port, with_mqtt
from trunkline_agent.errors import BackboneUnreachable
from trunkline_agent.jobs.job import Job
from trunkline_agent.wire.signing import Signer, signed_bytes

JOB, SECRET, NEW_SECRET = "0a1b2c3d", "canary-5d1c0e77-secret", "5d1c0e78.canary-new-secret"
DATA = {"ratio": 1e16, "zero": -0.0, "text": "größer 𝄞", "big": 2**63 - 1}


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "publisher"


def without_broker() -> Settings:
    """Settings of a broker that is not there."""
    never = {"publish_attempts": 1, "connect_timeout_s": 0.2, "backoff_base_s": 0.0}
    return with_mqtt(Settings(), port=free_port(), **never)


def waiting(state_dir: Path) -> list[dict[str, Any]]:
    """Return the events in the outbox."""
    found: list[dict[str, Any]] = json.loads((state_dir / f"{JOB}.json").read_text())["outbox"]
    return found


@pytest.mark.requirement("JE-05")
@pytest.mark.requirement("JE-16")
@pytest.mark.parametrize("again", ["publish", "resend"])
def test_with_a_new_secret_what_was_not_confirmed_is_signed_anew_under_its_seq(
    backbone_settings: Settings,
    start_bridge: Callable[[], Any],
    read_topic: Callable[[int], list[Any]],
    state_dir: Path,
    again: str,
) -> None:
    with pytest.raises(BackboneUnreachable):
        Job(JOB, SECRET, mqtt=without_broker().mqtt, state_dir=state_dir).publish("started", "x", DATA)
    (before,) = waiting(state_dir)
    start_bridge()
    publisher = Job(JOB, NEW_SECRET, mqtt=backbone_settings.mqtt, state_dir=state_dir)
    if again == "resend":
        assert publisher.resend() == 1
    assert publisher.publish("progress", "y").seq == 2
    events = [json.loads(record.value) for record in read_topic(2)]
    assert [event["seq"] for event in events] == [1, 2]
    for event in events:
        assert Signer(NEW_SECRET).verifies(signed_bytes(event), event["data"]["hmac_sig"])
    assert signed_bytes(events[0]) == signed_bytes(json.loads(before["payload"]))
    assert waiting(state_dir) == []


@pytest.mark.requirement("JE-16")
def test_with_the_same_secret_what_was_not_confirmed_stays_as_it_is(state_dir: Path) -> None:
    publisher = Job(JOB, SECRET, mqtt=without_broker().mqtt, state_dir=state_dir)
    with pytest.raises(BackboneUnreachable):
        publisher.publish("started", "x", DATA)
    before = waiting(state_dir)
    with pytest.raises(BackboneUnreachable):
        publisher.resend()
    assert waiting(state_dir) == before
