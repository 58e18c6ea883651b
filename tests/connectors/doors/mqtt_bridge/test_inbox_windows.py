"""How many messages of an agent are under way without a confirmation, and when they are published again."""

from __future__ import annotations

import pytest

from connectors.doors.mqtt_bridge.inbox_pace import BYTES_MOST, LONGEST_S, MESSAGES_MOST, InboxWindows

pytestmark = pytest.mark.requirement("DL-33")


class Windows:
    """The windows, with one agent and a clock of the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.found = InboxWindows(30.0, lambda: self.now)

    def publish(self, *message_ids: str, size: int = 1) -> list[str]:
        """Publish those of the pending messages that are to be published; their ids."""
        published, _ = self.found.begin("ann", message_ids)
        wanted = [one for one in message_ids if one not in published]
        return [one for one in wanted if self.found.add("ann", one, size) is not None]

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def ids(count: int) -> list[str]:
    """Ids of messages."""
    return [f"m{number}" for number in range(count)]


def test_so_many_messages_are_under_way_and_more_after_half_of_them_are_confirmed() -> None:
    windows, pending = Windows(), ids(100)
    assert windows.publish(*pending) == pending[:MESSAGES_MOST]
    assert not windows.found.is_open("ann")
    windows.found.confirm("ann", pending[:10])
    assert not windows.found.is_open("ann")
    windows.found.confirm("ann", pending[10:32])
    assert windows.found.is_open("ann")
    assert windows.publish(*pending[32:]) == pending[64:96]


def test_so_many_bytes_are_under_way_and_one_longer_message_alone() -> None:
    windows, half = Windows(), BYTES_MOST // 2
    assert windows.publish("a", "b", "c", size=half) == ["a", "b"]
    windows.found.confirm("ann", ["a", "b"])
    assert windows.publish("c", "d", size=2 * BYTES_MOST) == ["c"]
    assert not windows.found.is_open("ann")
    windows.found.confirm("ann", ["c"])
    assert windows.publish("d", size=2 * BYTES_MOST) == ["d"]


def test_what_is_not_confirmed_is_published_again_with_growing_pauses() -> None:
    windows, pauses = Windows(), []
    windows.publish("a", "b")
    for _ in range(8):
        due_s = windows.found.due_in_s("ann")
        assert due_s is not None
        pauses.append(due_s)
        windows.passes(due_s - 0.1)
        assert windows.publish("a", "b") == []
        windows.passes(0.1)
        assert windows.publish("a", "b") == ["a", "b"]
    assert pauses == [30, 60, 120, 240, 480, LONGEST_S, LONGEST_S, LONGEST_S]
    windows.found.confirm("ann", ["a"])
    assert windows.found.due_in_s("ann") == 30


def test_a_repetition_is_counted_until_a_confirmation_comes() -> None:
    windows = Windows()
    windows.publish("a", "b")
    counts = []
    for _ in range(3):
        windows.passes(LONGEST_S)
        counts.append(windows.found.begin("ann", ["a", "b"]).repeats)
        windows.publish("a", "b")
    windows.found.confirm("ann", ["a"])
    windows.passes(LONGEST_S)
    assert [*counts, windows.found.begin("ann", ["b"]).repeats] == [1, 2, 3, 1]


def test_an_agent_is_named_from_the_third_repetition_until_it_confirms() -> None:
    windows, named = Windows(), []
    for _ in range(4):
        windows.publish("a")
        named.append(windows.found.unconfirmed())
        windows.passes(LONGEST_S)
    assert named == [{}, {}, {}, {"ann": 3}]
    windows.found.confirm("ann", ["a"])
    assert windows.found.unconfirmed() == {}


def test_a_slow_agent_gets_nothing_again_while_it_confirms_in_order() -> None:
    windows = Windows()
    pending = ids(20)
    windows.publish(*pending)
    for number in range(19):
        windows.passes(20)
        windows.found.confirm("ann", [pending[number]])
        assert windows.publish(*pending[number + 1 :]) == []


def test_what_the_broker_lost_is_published_again_while_later_messages_are_confirmed() -> None:
    windows = Windows()
    windows.publish("lost", *ids(20))
    for number in range(2):
        windows.passes(14)
        windows.found.confirm("ann", [f"m{number}"])
    windows.passes(2)
    assert windows.publish("lost", "m2") == ["lost", "m2"]


def test_a_greeting_repeats_at_once_and_at_most_once_in_a_second() -> None:
    windows = Windows()
    windows.publish("a")
    windows.found.again("ann")
    assert windows.publish("a") == ["a"]
    windows.passes(0.5)
    windows.found.again("ann")
    assert windows.publish("a") == []
    windows.passes(0.5)
    assert windows.publish("a") == ["a"]
    windows.found.again("bob")


def test_after_a_loss_of_the_broker_all_is_published_again_with_short_pauses() -> None:
    windows = Windows()
    windows.publish("a")
    for _ in range(3):
        windows.passes(LONGEST_S)
        windows.publish("a")
    windows.found.all_again()
    assert windows.publish("a") == ["a"]
    assert windows.found.due_in_s("ann") == 30


def test_messages_that_have_ended_leave_the_window_and_the_others_stay() -> None:
    windows = Windows()
    windows.publish("a", "b")
    assert windows.publish("b", "c") == ["c"]
    assert windows.found.begin_confirmation("ann", ["a", "b"])
    assert not windows.found.begin_confirmation("ann", ["a"])
    windows.found.drop("ann", ["b"])
    windows.found.keep({"bob"})
    assert not windows.found.begin_confirmation("ann", ["c"])
    assert windows.found.due_in_s("ann") is None
    windows.found.confirm("ann", ["c"])


@pytest.mark.requirement("DL-30")
def test_a_message_with_a_confirmation_on_its_way_is_published_again_if_that_is_rejected_or_late() -> None:
    windows = Windows()
    windows.publish("a", "b", "c")
    assert windows.found.begin_confirmation("ann", ["a", "b"])
    windows.found.refuse_confirmation("ann", ["b"])
    windows.found.again("ann")
    assert windows.publish("a", "b", "c") == ["b", "c"]
    windows.passes(30)
    assert windows.publish("a", "b", "c") == ["a", "b", "c"]
