"""Messages that the bridge has read are handled in turns by publisher (LM-09)."""

from __future__ import annotations

import queue
import threading

import pytest

from connectors.doors.mqtt_bridge.publish_limits import FairQueue

pytestmark = pytest.mark.requirement("LM-09")
WITHIN_S = 5.0


def filled(messages: str, under_way_most: int = 100, of_each_most: int = 100) -> FairQueue[str]:
    """A queue with these messages, each a publisher's letter and a digit."""
    found: FairQueue[str] = FairQueue(under_way_most, of_each_most)
    for message in messages.split():
        found.put(message[0], message, 1)
    return found


def taken_from(messages: FairQueue[str]) -> str:
    """Take the messages that may be handled now; return them as one text."""
    return " ".join(messages.take())


def test_a_message_waits_for_one_of_each_other_publisher_and_each_keeps_its_order():
    assert taken_from(filled("a1 a2 a3 a4 b1 c1 c2")) == "a1 b1 c1 a2 c2 a3 a4"


def test_no_more_messages_are_under_way_than_may_be():
    messages = filled("a1 a2 a3 b1", under_way_most=2)
    assert taken_from(messages) == "a1 b1"
    messages.done("a")
    assert taken_from(messages) == "a2"
    messages.done("a")
    messages.done("b")
    assert taken_from(messages) == "a3"


def test_one_publisher_has_few_messages_under_way_and_the_others_go_on():
    messages = filled("a1 a2 a3 a4 b1", of_each_most=2)
    assert taken_from(messages) == "a1 b1 a2"
    messages.put("a", "a5", 1)
    messages.put("b", "b2", 1)
    assert taken_from(messages) == "b2"
    messages.done("b")
    messages.done("a")
    assert taken_from(messages) == "a3"
    messages.done("a")
    messages.done("a")
    assert taken_from(messages) == "a4 a5"


def test_take_waits_for_a_message_and_ends_with_the_queue():
    messages: FairQueue[str] = FairQueue(1, 1)
    taken: queue.SimpleQueue[str] = queue.SimpleQueue()
    reading = threading.Thread(target=lambda: [taken.put(taken_from(messages)) for _ in range(2)])
    reading.start()
    messages.put("a", "a1", 1)
    assert taken.get(timeout=WITHIN_S) == "a1"
    messages.put("a", "a2", 1)
    messages.close()
    assert taken.get(timeout=WITHIN_S) == ""
    reading.join(WITHIN_S)


def test_put_waits_while_too_many_bytes_wait_and_a_message_of_any_size_gets_through():
    messages: FairQueue[str] = FairQueue(1, 1, bytes_most=10)
    messages.put("a", "long", 1000)
    adding = threading.Thread(target=messages.put, args=("b", "next", 5))
    adding.start()
    adding.join(0.1)
    assert adding.is_alive()
    assert taken_from(messages) == "long"
    adding.join(WITHIN_S)
    assert not adding.is_alive()
    messages.done("a")
    assert taken_from(messages) == "next"


def test_closing_the_queue_ends_a_put_that_waits():
    messages: FairQueue[str] = FairQueue(1, 1, bytes_most=10)
    messages.put("a", "long", 1000)
    adding = threading.Thread(target=messages.put, args=("b", "next", 5))
    adding.start()
    messages.close()
    adding.join(WITHIN_S)
    assert not adding.is_alive()


@pytest.mark.requirement("LM-13")
def test_messages_under_way_are_bounded_in_bytes_and_not_in_number_alone() -> None:
    messages: FairQueue[str] = FairQueue(100, 100, bytes_most=10)
    for publisher in "ab":
        messages.put(publisher, publisher, 5)

    assert messages.take() == ["a", "b"]
    messages.put("c", "c", 5)
    messages.put("d", "d", 5)
    messages.done("a")

    assert messages.take() == ["c"], "d would exceed what may be under way"
    messages.done("b")
    messages.done("c")
    assert messages.take() == ["d"]
