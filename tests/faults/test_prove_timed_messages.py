"""The checks of `./trunkline prove` on delayed and expiring messages: what is planted is found."""

from __future__ import annotations

import pytest

from tests.faults.prove.comparison import LOST, MISBEHAVED, Mail
from tests.faults.prove.delivery_notes import Delivery, Got, Taking, Timed
from tests.faults.prove.timed_messages import check_times

pytestmark = [pytest.mark.requirement("DL-21"), pytest.mark.requirement("DL-22")]

BOX = "mailbox/default/tilda"
# Posted between 100 and 101, with a delay of 5 s, to live for 10 s.
BOTH = Timed(BOX, "m1", 100.0, 101.0, 5.0, 10.0)
DELAYED = Timed(BOX, "m1", 100.0, 101.0, 5.0, 0.0)


def taken(sent: float, answered: float, message: str = "m1") -> Taking:
    """A drain that got the message."""
    return Taking(BOX, "http", "http://here", "r1", sent, answered, 1, 10, 0, 0, "", (Got(message),))


def kinds(status: str, *notes: Delivery, is_at_rest: bool = True) -> list[str]:
    """The kinds of what is found."""
    mail = {(BOX, "m1"): Mail(BOX, "m1", status)}
    return [one.kind for one in check_times(notes, mail, is_at_rest=is_at_rest)]


def test_a_message_within_its_time_is_no_finding() -> None:
    assert kinds("claimed", BOTH, taken(104.0, 105.0)) == []
    assert kinds("claimed", BOTH, taken(111.0, 130.0)) == []
    assert kinds("claimed", BOTH, taken(0.0, 1.0, "another")) == []
    assert kinds("expired", BOTH) == []


def test_a_delayed_message_that_came_early_is_found() -> None:
    assert kinds("claimed", DELAYED, taken(104.0, 104.9)) == [MISBEHAVED]


def test_a_message_that_came_after_its_expiry_is_found() -> None:
    assert kinds("claimed", BOTH, taken(111.1, 112.0)) == [MISBEHAVED]


@pytest.mark.parametrize("status", ["delayed", "unread", "leased"])
def test_a_message_that_neither_came_nor_expired_is_found_when_all_is_at_rest(status: str) -> None:
    assert kinds(status, BOTH) == [LOST]
    assert kinds(status, BOTH, is_at_rest=False) == []


def test_a_message_without_an_expiry_may_not_expire() -> None:
    assert kinds("expired", DELAYED) == [LOST]
