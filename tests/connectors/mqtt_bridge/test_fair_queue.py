"""Messages that the bridge has read are handled in turns by publisher (LM-09)."""

from __future__ import annotations

import queue
import threading

import pytest

from connectors.mqtt_bridge.fair_queue import FairQueue

pytestmark = pytest.mark.requirement("LM-09")
WITHIN_S = 5.0


def filled(under_way_most: int, messages: str) -> FairQueue[str]:
    """A queue with these messages, each a publisher's letter and a digit."""
    found: FairQueue[str] = FairQueue(under_way_most)
    for message in messages.split():
        found.put(message[0], message, 1)
    return found


def test_a_message_waits_for_one_of_each_other_publisher_and_each_keeps_its_order():
    assert filled(100, "a1 a2 a3 a4 b1 c1 c2").take() == ["a1", "b1", "c1", "a2", "c2", "a3", "a4"]


def test_no_more_messages_are_under_way_than_may_be():
    messages = filled(2, "a1 a2 a3 b1")
    assert messages.take() == ["a1", "b1"]
    messages.done()
    assert messages.take() == ["a2"]
    messages.done()
    messages.done()
    assert messages.take() == ["a3"]


def test_take_waits_for_a_message_and_ends_with_the_queue():
    messages: FairQueue[str] = FairQueue(1)
    taken: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    reading = threading.Thread(target=lambda: [taken.put(messages.take()) for _ in range(2)])
    reading.start()
    messages.put("a", "a1", 1)
    assert taken.get(timeout=WITHIN_S) == ["a1"]
    messages.put("a", "a2", 1)
    messages.close()
    assert taken.get(timeout=WITHIN_S) == []
    reading.join(WITHIN_S)


def test_put_waits_while_too_many_bytes_wait_and_a_message_of_any_size_gets_through():
    messages: FairQueue[str] = FairQueue(1, bytes_most=10)
    messages.put("a", "long", 1000)
    adding = threading.Thread(target=messages.put, args=("b", "next", 5))
    adding.start()
    adding.join(0.1)
    assert adding.is_alive()
    assert messages.take() == ["long"]
    adding.join(WITHIN_S)
    assert not adding.is_alive()
    messages.done()
    assert messages.take() == ["next"]


def test_closing_the_queue_ends_a_put_that_waits():
    messages: FairQueue[str] = FairQueue(1, bytes_most=10)
    messages.put("a", "long", 1000)
    adding = threading.Thread(target=messages.put, args=("b", "next", 5))
    adding.start()
    messages.close()
    adding.join(WITHIN_S)
    assert not adding.is_alive()
