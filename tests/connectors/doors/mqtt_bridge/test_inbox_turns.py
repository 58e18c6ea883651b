"""The order in which inboxes are served: one thread per agent, pauses after failures, and what ends a pause."""

from __future__ import annotations

import pytest

from connectors.doors.mqtt_bridge.inbox_pace import InboxTurns

pytestmark = pytest.mark.requirement("JE-26")


def served(*agents: str, longest_s: float = 60.0) -> InboxTurns:
    """Turns of these agents, none of them due any more."""
    turns = InboxTurns(longest_s)
    turns.serve(set(agents))
    for _ in agents:
        turns.give_back(str(turns.take(1)), is_done=True)
    return turns


def test_a_new_agent_is_due_and_one_that_is_not_served_never_is() -> None:
    turns = served("ann")
    turns.serve({"ann", "bob"})
    turns.due("eve")
    assert [turns.take(0), turns.take(0)] == ["bob", None]


def test_an_agent_is_with_one_thread_at_a_time_and_news_meanwhile_are_not_lost() -> None:
    turns = served("ann", "bob")
    turns.due("ann")
    turns.due("bob")
    first, second = turns.take(0), turns.take(0)
    assert {first, second} == {"ann", "bob"}
    turns.due("ann")
    assert turns.take(0) is None
    turns.give_back("ann", is_done=True)
    assert turns.take(0) == "ann"


def test_who_could_not_be_served_waits_through_news_and_is_woken_by_itself_or_a_gap() -> None:
    turns = served("ann", longest_s=600)
    for wake in (lambda: turns.wake("ann"), turns.all_are_due):
        turns.due("ann")
        assert turns.take(0) == "ann"
        for _ in range(20):
            turns.give_back("ann", is_done=False)
        turns.due("ann")
        assert turns.take(0) is None
        wake()
        assert turns.take(0) == "ann"
        turns.give_back("ann", is_done=True)


def test_it_is_tried_again_by_itself() -> None:
    turns = served("ann", longest_s=0.05)
    turns.due("ann")
    assert turns.take(0) == "ann"
    turns.give_back("ann", is_done=False)
    assert turns.take(5) == "ann"


def test_who_is_removed_has_no_turn_and_nobody_has_after_the_end() -> None:
    turns = served("ann", "bob")
    turns.due("ann")
    turns.serve({"bob"})
    turns.due("bob")
    assert turns.take(0) == "bob"
    turns.give_back("bob", is_done=True)
    turns.due("bob")
    turns.close()
    assert turns.take(1) is None
