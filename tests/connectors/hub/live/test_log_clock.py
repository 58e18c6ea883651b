"""The difference between the log's clock and this process's, learned from settled records (ST-85)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors.hub.live.log_clock import LogClock
from connectors.hub.live.settled_feed import SettledRecord
from schemas.wire.record import Position, partition_for

pytestmark = pytest.mark.requirement("ST-85")

S_US = 1_000_000
STREAMS = [f"mailbox/default/m{number}" for number in range(40)]


class Log:
    """A log whose brokers' clocks differ from ours, by partition."""

    def __init__(self, *ahead_s: float) -> None:
        self.now_us = 1_790_000_000 * S_US
        self.ahead_s = ahead_s
        self.clock = LogClock(len(ahead_s), lambda: self.now_us)

    def record(self, stream: str, ce_id: str = "x", verdict: str = "rejected") -> SettledRecord:
        number = partition_for(stream.encode(), len(self.ahead_s))
        logged = self.now_us + int(self.ahead_s[number] * S_US)
        about = (stream, "t", ce_id, "reactor/reactor", verdict, None, None, False, None, None)
        return SettledRecord(Position(number, 1), *about, logged, None)

    def ask(self, stream: str, delay_s: float = 0.02) -> None:
        """Append a record, which is settled a little later."""
        self.clock.ask("a")
        self.now_us += int(delay_s * S_US / 2)
        found = self.record(stream, "a")
        self.now_us += int(delay_s * S_US / 2)
        self.clock.settled([found])


@pytest.mark.parametrize("ahead_s", [-600, -75, -1, 0, 0.1, 1, 75, 370 * 86_400])
def test_one_answer_tells_the_difference_to_within_the_time_that_it_took(ahead_s: float) -> None:
    log = Log(ahead_s)
    log.ask(STREAMS[0])
    found = log.clock.offset_us(STREAMS[0]) / S_US
    assert abs(found - ahead_s) <= 0.21 if abs(ahead_s) < 0.5 else abs(found - ahead_s) <= 0.03
    assert log.clock.offset_us() == log.clock.offset_us(STREAMS[0])


def test_a_clock_that_was_put_right_is_noticed_with_the_next_answer() -> None:
    log = Log(-600)
    log.ask(STREAMS[0])
    log.ahead_s = (0,)
    log.ask(STREAMS[0])
    assert log.clock.offset_us(STREAMS[0]) == 0


def test_each_partition_has_a_clock_of_its_own() -> None:
    log = Log(0, -75, 0.05, 40)
    for stream in STREAMS:
        log.ask(stream)
    for stream in STREAMS:
        ahead_us = log.ahead_s[partition_for(stream.encode(), 4)] * S_US
        assert abs(log.clock.offset_us(stream) - ahead_us) <= 210_000


def test_records_of_others_tell_that_the_log_is_ahead_and_old_ones_tell_nothing() -> None:
    log = Log(30)
    log.clock.settled([log.record(STREAMS[0])])
    assert abs(log.clock.offset_us(STREAMS[0]) - 30 * S_US) < 1000
    slow = Log(-3600)
    slow.clock.settled([slow.record(STREAMS[0])])
    slow.clock.settled([])
    assert slow.clock.offset_us(STREAMS[0]) == 0


def answers(log: Log) -> Iterator[int]:
    for stream in STREAMS[:20]:
        log.ask(stream, 0.3)
        yield log.clock.offset_us(stream)


def test_a_known_difference_does_not_move_with_the_time_that_an_answer_takes() -> None:
    assert len(set(answers(Log(-75)))) == 1


def test_the_caller_is_called_once_with_the_answer() -> None:
    log, heard = Log(-75), list[SettledRecord]()
    log.clock.ask("a", heard.append)
    found = log.record(STREAMS[0], "a")
    log.clock.settled([log.record(STREAMS[0], "b"), found, found])
    assert heard == [found]
