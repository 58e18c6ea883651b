"""The budget in bytes of answers and streams under way: shares, turns, and bodies sent in pieces."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from connectors.hub.serving.shares import PIECE_BYTES, ByteBudget, Rooms, send_in_pieces

pytestmark = pytest.mark.requirement("LM-12")
_NOW = 0.01


def _run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return functools.wraps(test)(lambda: asyncio.run(test()))


async def _held(budget: ByteBudget, principal: str, size: int) -> int:
    """Take rooms of a size for a principal until there is none, and return their number."""
    count = 0
    while await budget.take(principal, size, _NOW) is not None:
        count += 1
    return count


@_run
async def test_principals_share_the_budget_and_none_shuts_out_the_next() -> None:
    budget = ByteBudget(1200)

    assert [await _held(budget, name, 1) for name in "abc"] == [600, 300, 150]

    assert budget.used == 1050
    assert await budget.take("d", 150, _NOW) is not None


@_run
async def test_rooms_are_granted_in_order_when_others_are_given_back() -> None:
    budget = ByteBudget(100)
    first = await budget.take("a", 80, _NOW)
    assert first is not None
    order: list[str] = []

    async def one(name: str, size: int) -> None:
        assert await budget.take(name, size, 5) is not None
        order.append(name)

    waiting = [asyncio.create_task(one(name, size)) for name, size in (("b", 50), ("c", 10), ("d", 10))]
    await asyncio.sleep(0)
    assert budget.waiting == 3, "a small answer must not pass a large one for ever"
    budget.give_back(first)
    await asyncio.gather(*waiting)

    assert order == ["b", "c", "d"]
    assert budget.used == 70


@_run
async def test_a_principal_beyond_its_share_does_not_hold_up_others() -> None:
    budget = ByteBudget(100)
    assert await budget.take("a", 40, _NOW) is not None
    late = asyncio.create_task(budget.take("a", 40, 5))
    await asyncio.sleep(0)

    assert await budget.take("b", 30, _NOW) is not None

    assert not late.done()
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert (budget.used, budget.waiting) == (70, 0)


@_run
async def test_a_room_that_was_granted_and_cancelled_at_once_is_given_back() -> None:
    budget = ByteBudget(100)
    first = await budget.take("a", 100, _NOW)
    late = asyncio.create_task(budget.take("b", 100, 5))
    await asyncio.sleep(0)
    assert first is not None
    budget.give_back(first)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late

    assert (budget.used, budget.waiting) == (0, 0)
    assert await budget.take("c", 1000, _NOW) is not None, "more than all counts as all"


@_run
async def test_what_a_request_reserves_is_in_its_rooms_and_takes_its_real_size() -> None:
    budget = ByteBudget(100)
    assert await budget.reserve("a", 1000, _NOW), "outside a request nothing is taken"
    kept: set[Rooms] = set()
    rooms = budget.begin_request(kept)

    assert await budget.reserve("a", 90, _NOW)
    assert not await budget.reserve("b", 20, _NOW)
    rooms.resize(30)

    assert (budget.used, kept) == (30, {rooms})
    rooms.close()
    assert (budget.used, kept) == (0, set())
    assert await budget.reserve("a", 90, _NOW), "after the answer nothing is taken"
    assert budget.used == 0


@_run
async def test_what_is_granted_after_the_answer_of_its_request_is_given_back_at_once() -> None:
    budget = ByteBudget(100)
    other = await budget.take("a", 100, _NOW)
    assert other is not None
    kept: set[Rooms] = set()
    rooms = budget.begin_request(kept)
    late = asyncio.create_task(budget.reserve("b", 50, 5))
    await asyncio.sleep(0)
    rooms.close()
    budget.give_back(other)

    assert await late
    assert (budget.used, kept) == (0, set())


@_run
async def test_a_long_body_is_sent_in_pieces_and_is_the_same() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    body = bytes(range(256)) * 1500 + b"end"
    await send_in_pieces(send, {"type": "http.response.start", "status": 200})
    await send_in_pieces(send, {"type": "http.response.body", "body": body})

    assert [len(one["body"]) for one in sent[1:]] == [PIECE_BYTES, len(body) - PIECE_BYTES]
    assert [one["more_body"] for one in sent[1:]] == [True, False]
    assert b"".join(one["body"] for one in sent[1:]) == body
