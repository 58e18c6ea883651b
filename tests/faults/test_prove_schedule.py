"""The schedule of `./trunkline prove`: drawn from the seed alone, and over some seeds each fault comes up."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.faults.prove.schedule import (
    ACK_POINTS,
    ALL_FAULTS,
    CRASH,
    LIBRARY_POINTS,
    OTHER_FAULTS,
    OTHERS_A_SEED,
    REACTOR_STEPS,
    STOP,
    STREAM_FAULTS,
    STREAM_POINTS,
    draw_schedule,
    schedule_of,
)

# As many as the larger deck needs.
SEEDS_FOR_ALL = max(len(STREAM_FAULTS), -(-len(OTHER_FAULTS) // OTHERS_A_SEED))


def test_the_same_seed_is_the_same_schedule_and_another_is_another() -> None:
    assert draw_schedule(7) == draw_schedule(7)
    assert len({draw_schedule(seed) for seed in range(50)}) == 50


def test_a_schedule_is_json_and_comes_back_equal() -> None:
    for seed in range(20):
        schedule = draw_schedule(seed)
        assert schedule_of(json.loads(json.dumps(schedule.as_json()))) == schedule


@pytest.mark.parametrize("first", [0, 13, 1_000_000])
def test_each_named_fault_comes_up_within_so_many_seeds(first: int) -> None:
    # Two decks, because a run may begin in the midst of one; habits of the clients are drawn for each seed.
    found = {fault for seed in range(first, first + 2 * SEEDS_FOR_ALL) for fault in draw_schedule(seed).faults}
    assert found == set(ALL_FAULTS)


def test_each_crash_point_that_the_issue_names_is_a_fault() -> None:
    points = {fault.partition(".")[2] for fault in ALL_FAULTS if fault.startswith(CRASH)}
    steps = {f"reactor_{step}" for step in REACTOR_STEPS}
    assert points == {*ACK_POINTS, *STREAM_POINTS, *LIBRARY_POINTS, *steps}


def test_faults_come_in_order_begin_within_the_load_and_stops_last_5_to_30_s() -> None:
    for seed in range(200):
        schedule = draw_schedule(seed)
        times = [injection.at_s for injection in schedule.injections]
        assert all(one <= other for one, other in pairwise(times))
        assert times[0] > 0 and times[-1] < schedule.load_s
        assert len(times) >= 4
        stops = [injection.for_s for injection in schedule.injections if injection.kind == STOP]
        assert all(5 <= for_s <= 30 for for_s in stops)


def test_what_lasts_is_over_early_enough_for_the_backbone_to_come_to_rest() -> None:
    for seed in range(1000):
        for injection in draw_schedule(seed).injections:
            assert injection.at_s >= 1 and injection.at_s + injection.for_s <= 31, (seed, injection)
