"""The bridge counts and reports the messages that accounts publish (LM-10)."""

from __future__ import annotations

import pytest

from connectors.doors.mqtt_bridge.publish_limits import PublishCounts

pytestmark = pytest.mark.requirement("LM-10")


def counted(*streams: tuple[str, int]) -> PublishCounts:
    """Counts of so many messages of each stream."""
    counts = PublishCounts()
    for stream, messages in streams:
        for _ in range(messages):
            counts.count(stream)
    return counts


def test_few_messages_are_not_reported_and_stay_counted() -> None:
    counts = counted(("agent/ann", 60), ("job/0a1b2c3d", 40))
    assert counts.take() is None
    counts.count("agent/ann")
    assert counts.take() == {"agents": {"ann": 61}, "jobs": {"0a1b2c3d": 40}}
    assert counts.take() is None, "they are reported once"


def test_only_jobs_and_agents_are_counted() -> None:
    assert counted(("refused/mqtt", 1000)).take() is None


def test_a_report_has_the_thousand_accounts_with_the_most_messages() -> None:
    found = counted(("agent/loud", 5), *((f"agent/a-{n}", 1) for n in range(20_000))).take()
    assert found is not None
    assert (len(found["agents"]), found["agents"]["loud"], found["jobs"]) == (1000, 5, {})
