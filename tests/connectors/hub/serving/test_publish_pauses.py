"""The pauses of accounts at the MQTT broker: when they begin, and for how long (LM-10)."""

from __future__ import annotations

import pytest

from connectors.hub.services.principal_limits import FIRST_S, FORGOTTEN_S, LONGEST_S, PublishPauses

pytestmark = pytest.mark.requirement("LM-10")


class Broker:
    """Reports what one account publishes, four times a second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses = PublishPauses(lambda: self.now)

    def publish(
        self, per_second: float, seconds: float, per_minute: int | None, owner: str = "a"
    ) -> int | None:
        """Publish evenly until a pause begins; its seconds, or None."""
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            found = self.pauses.report(owner, round(per_second / 4), per_minute)
            if found is not None:
                return found
        return None


@pytest.fixture
def broker() -> Broker:
    return Broker()


def test_a_flood_is_paused_within_a_second_beyond_its_rate_and_the_margin(broker: Broker) -> None:
    began = broker.now
    assert broker.publish(4000, 5, 600) == FIRST_S
    assert broker.now - began < 1


def test_without_a_limit_or_within_its_rate_an_account_is_never_paused(broker: Broker) -> None:
    assert broker.publish(10_000, 60, None) is None
    assert broker.publish(8, 600, 600) is None
    # A burst of a whole minute's messages at once is within the rate.
    assert broker.pauses.report("b", 600, 600) is None


def test_a_little_beyond_the_rate_is_refused_elsewhere_and_not_paused(broker: Broker) -> None:
    # 600 a minute are 10 a second; 16 a second exceed it by 60 in 10 s.
    assert broker.publish(16, 900, 600) is None
    assert broker.publish(32, 900, 600) == FIRST_S


def test_the_margin_is_a_tenth_of_a_large_rate_and_a_hundred_messages_of_a_small_one(broker: Broker) -> None:
    assert broker.pauses.report("large", 60_000 + 6_000, 60_000) is None
    assert broker.pauses.report("large", 1, 60_000) == FIRST_S
    assert broker.pauses.report("small", 30 + 100, 30) is None
    assert broker.pauses.report("small", 1, 30) == FIRST_S


def test_what_exceeded_the_rate_more_than_ten_seconds_ago_does_not_count(broker: Broker) -> None:
    for _ in range(20):
        assert broker.pauses.report("a", 70 + 10, 30) is None
        broker.now += 20


def test_messages_that_the_broker_took_before_the_pause_cause_no_other_one(broker: Broker) -> None:
    assert broker.publish(4000, 1, 600) == FIRST_S
    assert broker.publish(4000, FIRST_S - 1, 600) is None


def test_each_repetition_is_twice_as_long_and_an_hour_without_a_pause_is_a_new_begin(broker: Broker) -> None:
    found = []
    for _ in range(7):
        seconds = broker.publish(4000, 2, 600)
        assert seconds is not None
        found.append(seconds)
        broker.now += seconds + 60
    assert found == [60, 120, 240, 480, 960, LONGEST_S, LONGEST_S]
    broker.now += FORGOTTEN_S
    assert broker.publish(4000, 2, 600) == FIRST_S


def test_accounts_do_not_count_for_each_other_and_only_ten_thousand_are_remembered(broker: Broker) -> None:
    for number in range(12_000):
        assert broker.pauses.report(f"a-{number}", 129, 30) is None
    assert broker.pauses.report("a-0", 129, 30) is None, "it was forgotten"
    assert broker.pauses.report("a-11999", 2, 30) == FIRST_S
    assert len(broker.pauses._excess) <= 10_000
    for number in range(12_000):
        broker.pauses.report(f"b-{number}", 1000, 30)
    assert len(broker.pauses._pauses) == 10_000
