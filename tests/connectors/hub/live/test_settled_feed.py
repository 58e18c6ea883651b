"""The ring of settled records: cursors, bounds, and those who wait."""

from __future__ import annotations

import asyncio

import pytest

from connectors.hub.live.settled_feed import FellBehind, SettledFeed, SettledRecord
from schemas.wire.record import Position


def _record(offset: int, value: bytes = b"{}") -> SettledRecord:
    return SettledRecord(
        Position(0, offset),
        "job/0a1b2c3d",
        None,
        None,
        None,
        "accepted",
        None,
        None,
        False,
        None,
        None,
        0,
        value,
    )


def _records(*offsets: int) -> list[SettledRecord]:
    return [_record(offset) for offset in offsets]


def test_cursors_rise_by_one_and_reading_goes_on_where_it_stopped():
    feed = SettledFeed()
    assert (feed.newest, feed.since(0, 10)) == (0, ([], 0))
    feed.extend(_records(5, 6, 7))
    feed.extend(_records(8))
    assert feed.newest == 4
    first, cursor = feed.since(0, 3)
    assert ([one.position.offset for one in first], cursor) == ([5, 6, 7], 3)
    rest, cursor = feed.since(cursor, 10)
    assert ([one.position.offset for one in rest], cursor) == ([8], 4)
    assert feed.since(4, 10) == ([], 4)


def test_a_reader_that_is_too_slow_is_told_from_where_it_can_go_on():
    feed = SettledFeed(limit_records=3)
    feed.extend(_records(*range(10)))
    with pytest.raises(FellBehind) as told:
        feed.since(6, 10)
    assert told.value.oldest == 7
    found, cursor = feed.since(told.value.oldest, 10)
    assert ([one.position.offset for one in found], cursor) == ([7, 8, 9], 10)


def test_the_ring_is_bounded_by_bytes_and_keeps_at_least_the_newest():
    feed = SettledFeed(limit_bytes=10_000)
    feed.extend([_record(n, b"x" * 3000) for n in range(5)])
    assert [one.position.offset for one in feed.since(3, 10)[0]] == [3, 4]
    with pytest.raises(FellBehind):
        feed.since(1, 10)
    feed.extend([_record(9, b"x" * 100_000)])
    assert [one.position.offset for one in feed.since(5, 10)[0]] == [9]


def test_a_record_is_found_by_its_position_until_it_leaves():
    feed = SettledFeed(limit_records=2)
    feed.extend(_records(1, 2, 3))
    assert feed.find(Position(0, 1)) is None
    assert feed.find(Position(0, 2)) == _record(2)
    assert feed.find(Position(0, 3)) == _record(3)
    assert feed.find(Position(1, 3)) is None


def test_all_who_wait_are_woken_with_one_call_per_poll():
    async def scene():
        feed, loop = SettledFeed(), asyncio.get_running_loop()
        calls = []
        original = loop.call_soon_threadsafe
        waiting = [asyncio.create_task(feed.wait_beyond(0)) for _ in range(50)]
        await asyncio.sleep(0)
        loop.call_soon_threadsafe = lambda *a, **k: (calls.append(a), original(*a, **k))[1]
        try:
            await asyncio.to_thread(feed.extend, _records(1, 2, 3))
            await asyncio.wait_for(asyncio.gather(*waiting), 10)
        finally:
            del loop.call_soon_threadsafe
        assert sum(call[0].__name__ == "_wake" for call in calls) == 1
        await asyncio.wait_for(feed.wait_beyond(2), 10)

    asyncio.run(scene())


def test_who_gives_up_waiting_leaves_nothing_behind():
    async def scene():
        feed = SettledFeed()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(feed.wait_beyond(0), 0.01)
        assert not feed._waiting
        feed.extend(_records(1))

    asyncio.run(scene())


def test_a_loop_that_has_ended_does_not_disturb_the_others():
    feed = SettledFeed()

    async def leave_behind():
        future = asyncio.get_running_loop().create_future()
        feed._waiting[asyncio.get_running_loop()] = [future]

    asyncio.run(leave_behind())
    feed.extend(_records(1))
    assert feed.newest == 1
