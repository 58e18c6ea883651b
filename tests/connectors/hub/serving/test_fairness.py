"""Requests begin in turns by principal, and refusals of those beyond a limit are held (LM-09)."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from connectors.hub.serving.answers import not_found, too_many
from connectors.hub.serving.turns import BURST, HELD_MOST_S, PER_SECOND, FairTurns, RefusalPace, UnderWay

pytestmark = pytest.mark.requirement("LM-09")


async def begun_in_order(names: list[str], cancelled: tuple[int, ...] = ()) -> list[str]:
    """The order in which requests of these principals begin that arrive at once; those cancelled do not."""
    turns, begun = FairTurns(), []

    async def ask(name: str) -> None:
        await turns.wait(name)
        begun.append(name)

    tasks = [asyncio.create_task(ask(name)) for name in names]
    await asyncio.sleep(0)
    for place in cancelled:
        tasks[place].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    return begun


def test_a_request_waits_for_one_of_each_other_principal_and_not_for_all_of_them() -> None:
    found = asyncio.run(begun_in_order(["loud"] * 30 + ["calm", "quiet"]))
    assert found == ["loud", "calm", "quiet"] + ["loud"] * 29


def test_requests_of_clients_that_have_gone_take_no_turn_and_hold_up_none() -> None:
    found = asyncio.run(begun_in_order(["a", "a", "a", "a", "b"], cancelled=(1, 2)))
    assert found == ["a", "b", "a"]


def test_a_principal_begins_one_request_in_a_step_and_connections_are_read_in_between() -> None:
    async def steps_until_begun(count: int) -> list[int]:
        turns, begun, step = FairTurns(), [], 0

        async def ask() -> None:
            await turns.wait("loud")
            begun.append(step)

        tasks = [asyncio.create_task(ask()) for _ in range(count)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            step += 1
        return begun

    found = asyncio.run(steps_until_begun(5))
    assert len(found) == len(set(found)) == 5


def test_nothing_is_kept_and_no_step_is_asked_for_when_all_requests_have_begun() -> None:
    async def kept() -> int:
        turns = FairTurns()
        await asyncio.gather(*(turns.wait(name) for name in ("a", "a", "b", "c", "a")))
        for _ in range(3):
            await asyncio.sleep(0)
        return len(turns._waiting) + len(turns._begun)

    assert asyncio.run(kept()) == 0


def test_a_request_that_is_alone_waits_for_nothing_also_after_others() -> None:
    async def alone() -> None:
        turns = FairTurns()
        await asyncio.gather(*(turns.wait("loud") for _ in range(3)))
        await asyncio.sleep(0.01)
        turn = turns.wait("calm")
        with pytest.raises(StopIteration):
            turn.send(None)
        await asyncio.sleep(0)

    asyncio.run(alone())


def test_a_principal_gets_some_refusals_at_once_then_few_in_a_second_and_each_within_seconds() -> None:
    now = 100.0
    pace = RefusalPace(lambda: now)
    assert [pace.held_s("loud") for _ in range(BURST)] == [0.0] * BURST
    held = [pace.held_s("loud") for _ in range(500)]
    assert held[:3] == pytest.approx([1 / PER_SECOND, 2 / PER_SECOND, 3 / PER_SECOND])
    assert max(held) == held[-1] == HELD_MOST_S
    assert pace.held_s("calm") == 0.0
    now += HELD_MOST_S + BURST / PER_SECOND
    assert [pace.held_s("loud") for _ in range(BURST)] == [0.0] * BURST


def test_only_the_refusal_of_a_request_beyond_a_limit_is_held() -> None:
    async def held_s(error: Exception) -> float:
        pace = RefusalPace()
        while not pace.held_s("loud"):
            pass
        began = time.monotonic()
        await pace.hold("loud", error)
        return time.monotonic() - began

    assert asyncio.run(held_s(too_many("too many"))) > 0.02
    assert asyncio.run(held_s(not_found("no such thing"))) < 0.02
    assert asyncio.run(held_s(ValueError())) < 0.02


def test_a_principal_has_few_records_under_way_and_others_do_not_wait_for_it() -> None:
    async def begun() -> list[list[str]]:
        under_way, begun, done = UnderWay(most=2), [], asyncio.Event()

        async def ask(name: str) -> None:
            async with under_way.one(name.rstrip("0123456789")):
                begun.append(name)
                await done.wait()

        tasks = [asyncio.create_task(ask(name)) for name in ("loud1", "loud2", "loud3", "loud4", "calm1")]
        await asyncio.sleep(0.01)
        first = list(begun)
        tasks[2].cancel()  # its client has gone while it waited
        done.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        return [first, begun]

    first, all_begun = asyncio.run(begun())
    assert first == ["loud1", "loud2", "calm1"]
    assert all_begun == ["loud1", "loud2", "calm1", "loud4"]


def test_nothing_is_kept_of_principals_without_records_under_way() -> None:
    async def kept() -> int:
        under_way = UnderWay()
        for number in range(100):
            async with under_way.one(f"agent{number}"):
                pass
        return len(under_way._waiting) + len(under_way._count)

    assert asyncio.run(kept()) == 0


@pytest.mark.requirement("ST-98")
def test_however_many_requests_wait_their_records_may_all_fail_at_once() -> None:
    under_way, ended = UnderWay(most=1), list[int]()

    def fail(number: int) -> None:
        ended.append(number)
        under_way.end("loud")

    under_way.begin("loud", lambda: None)
    for number in range(5000):
        under_way.begin("loud", partial(fail, number))
    under_way.begin("calm", lambda: None)
    under_way.end("loud")
    assert ended == list(range(5000))
    assert under_way._waiting == {} and under_way._count == {"calm": 1}
