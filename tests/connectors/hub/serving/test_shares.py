"""The rule by which principals share places: streams, uploads and connections (LM-23)."""

from __future__ import annotations

import pytest

from connectors.hub.serving.answers import crowded
from connectors.hub.serving.shares import Places, may_have_one_more

LIMITS = (8, 64, 512, 2000)


def filled(places: Places, principal: str, *, is_operator: bool = False) -> int:
    """Take as many places as a principal may have; returns their number."""
    count = 0
    while places.take(principal, is_operator=is_operator):
        count += 1
    return count


@pytest.mark.requirement("LM-23")
@pytest.mark.parametrize("limit", LIMITS)
def test_two_greedy_principals_leave_places_to_others_and_to_the_operator(limit: int) -> None:
    places = Places(limit)
    first, second = filled(places, "ann"), filled(places, "bo")
    assert limit // 3 <= first <= limit // 2
    assert 1 <= second <= first
    others = [filled(places, f"other{number}") for number in range(20)]
    assert min(others[: min(5, 1 + limit // 64)]) >= max(1, limit // 64)
    assert filled(places, "operator", is_operator=True) >= limit // 32
    assert not places.take("operator", is_operator=True)


@pytest.mark.requirement("LM-23")
def test_principals_that_take_turns_get_equal_shares() -> None:
    places, held = Places(512), dict.fromkeys(("ann", "bo", "cy"), 0)
    for _ in range(512):
        for name in held:
            held[name] += places.take(name)
    assert set(held.values()) == {108}
    places.give_back("ann")
    assert places.take("ann") and not places.take("ann")


@pytest.mark.requirement("LM-23")
def test_a_limit_for_each_principal_counts_in_addition() -> None:
    places = Places(16, 4)
    assert [filled(places, name) for name in ("ann", "bo", "cy", "di")] == [4, 4, 3, 2]
    assert may_have_one_more(16, 15, 0) and not may_have_one_more(16, 16, 0)


@pytest.mark.requirement("LM-23")
def test_clients_without_a_place_are_told_to_come_back_at_different_times() -> None:
    told = {int((crowded("full").headers or {})["Retry-After"]) for _ in range(200)}
    assert told == set(range(1, 9))
