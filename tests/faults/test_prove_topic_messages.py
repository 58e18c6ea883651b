"""The checks of `./trunkline prove` on topics and schedules: what is planted is found."""

from __future__ import annotations

import pytest

from tests.faults.prove.comparison import DUPLICATE, LOST, TICK, Line, Mail
from tests.faults.prove.delivery_notes import Got, Published, Taking
from tests.faults.prove.topic_messages import check_topics

ANN, BO = "mailbox/default/ann", "mailbox/default/bo"


def taken(box: str, message: str, text: str = "hello") -> Taking:
    """A drain that got the message."""
    return Taking(box, "http", "http://here", "r1", 1.0, 2.0, 1, 10, 0, 0, "", (Got(message, body=text),))


def kinds(*takings: Taking, runs: int = 0, ticks: int = 0, is_at_rest: bool = True) -> list[str]:
    """The kinds of what is found about one message to a topic, and a schedule."""
    notes = [Published("hello", (ANN, BO)), *takings]
    mail = {(BO, f"t{n}"): Mail(BO, f"t{n}", "unread", kind=TICK) for n in range(ticks)}
    ledger = [Line(0, n, "schedule/prove", "schedule.ran", "accepted", f"r{n}") for n in range(runs)]
    ledger.append(Line(0, 99, "schedule/prove", "schedule.ran", "duplicate", "r0"))
    return [one.kind for one in check_topics(notes, mail, ledger, is_at_rest=is_at_rest)]


@pytest.mark.requirement("DL-24")
def test_each_subscriber_gets_one_copy() -> None:
    both = (taken(ANN, "a1"), taken(BO, "b1"))
    assert kinds(*both) == []
    # The answer to a drain that was repeated has the same message.
    assert kinds(*both, taken(BO, "b1")) == []
    assert kinds(*both, taken(BO, "b2")) == [DUPLICATE]
    assert kinds(taken(ANN, "a1"), taken(BO, "b1", "another text")) == [LOST]
    assert kinds(taken(ANN, "a1"), is_at_rest=False) == []


@pytest.mark.requirement("DL-23")
def test_each_run_of_a_schedule_is_posted_once() -> None:
    both = (taken(ANN, "a1"), taken(BO, "b1"))
    assert kinds(*both, runs=3, ticks=3) == []
    assert kinds(*both, runs=3, ticks=4) == [DUPLICATE]
    assert kinds(*both, runs=3, ticks=2) == [LOST]
    assert kinds(*both, runs=3, ticks=2, is_at_rest=False) == []
