"""The delivery checks of `./trunkline prove`: each kind of finding is seen when it is planted."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.prove.comparison import CHANGED, DUPLICATE, LOST, MISBEHAVED, OUT_OF_ORDER, Finding, Mail
from tests.faults.prove.delivery_checks import LEASE_RAN_OUT, Outage, check_deliveries
from tests.faults.prove.delivery_doors import HubMailbox, Lease
from tests.faults.prove.delivery_notes import (
    ACK,
    ATTEMPTS_MOST,
    EXTEND,
    EXTEND_S,
    NACK,
    Answered,
    Deliveries,
    Delivery,
    Ending,
    Got,
    Seen,
    Taking,
)
from tests.faults.prove.follow_checks import check_followers
from tests.faults.prove.hub_client import Clock, GaveUp
from tests.faults.prove.load_deliveries import SureConsumer
from tests.faults.prove.oracle import ACKED, Note, Oracle
from trunkline_agent.hub.plans import Answer

BOX, HERE, THERE = "mailbox/default/dora", "http://here", "http://there"
LEASE_S = 2


def lease(number: int, at: float, attempt: int = 1, message: str = "m1", **changed: object) -> Taking:
    """A lease of a message that began at this time, by a request that was answered at once."""
    got = (Got(message, attempt, at + LEASE_S),)
    found = Taking(
        BOX, "http", HERE, f"r{number}", at - 0.1, at + 0.1, 1, 10, 0, LEASE_S, f"lease-{number}", got
    )
    return dataclasses.replace(found, **changed)  # type: ignore[arg-type]


def empty(number: int, sent: float, answered: float, **changed: object) -> Taking:
    """A request that waited and got nothing."""
    wait_s = answered - sent
    found = Taking(BOX, "http", HERE, f"r{number}", sent, answered, 1, 10, wait_s, LEASE_S, "", ())
    return dataclasses.replace(found, **changed)  # type: ignore[arg-type]


def drain(number: int, at: float) -> Taking:
    """A request that took the message for good."""
    return Taking(BOX, "http", HERE, f"r{number}", at - 0.1, at + 0.1, 1, 10, 0, 0, "", (Got("m1"),))


def end(how: str, number: int, at: float, *, is_done: bool = True, reason: str = "") -> Ending:
    """The end of a lease, at this time."""
    return Ending(how, BOX, f"lease-{number}", "m1", at, at + 0.1, 1, is_done, reason, "" if is_done else "no")


def found(
    *notes: Delivery, mail: Mail | None = None, outages: tuple[Outage, ...] = (), is_at_rest: bool = True
) -> list[Finding]:
    """The findings of these notes; without a message in the end only what needs none."""
    shown = {} if mail is None else {(BOX, mail.id): mail}
    return check_deliveries(
        notes, shown, [BOX], attempts_most=ATTEMPTS_MOST, outages=outages, is_at_rest=is_at_rest
    )


def kinds(*notes: Delivery, mail: Mail | None = None) -> set[str]:
    """The kinds of the findings of these notes."""
    return {finding.kind for finding in found(*notes, mail=mail)}


CLAIMED = Mail(BOX, "m1", "claimed", attempts=1)
ACKED_ONCE = (lease(1, 100), end(ACK, 1, 101))


@pytest.mark.requirement("DL-03")
def test_where_everything_is_as_promised_nothing_is_found() -> None:
    assert found(*ACKED_ONCE, mail=CLAIMED) == []
    again = (lease(1, 100), lease(2, 102.5, 2), end(NACK, 2, 103, reason="no disk"), lease(3, 103.2, 3))
    assert found(*again, end(ACK, 3, 104), mail=CLAIMED) == []
    assert found(lease(1, 100), lease(2, 102, 2), end(ACK, 2, 103), mail=CLAIMED) == []
    assert found(drain(1, 100), mail=CLAIMED) == []
    assert found(lease(1, 100), end(ACK, 1, 109), mail=CLAIMED) == [], "late, and nobody else had it"
    # A lease that is asked for again is the same lease.
    assert found(lease(1, 100), lease(1, 100), end(ACK, 1, 101), mail=CLAIMED) == []


@pytest.mark.requirement("DL-03")
def test_a_message_that_comes_again_after_it_was_acknowledged_is_a_duplicate() -> None:
    assert kinds(*ACKED_ONCE, lease(2, 102, 2)) == {DUPLICATE}
    assert kinds(*ACKED_ONCE, drain(2, 102)) == {DUPLICATE}
    assert kinds(*ACKED_ONCE, lease(2, 101.05, 2), end(ACK, 2, 101.06)) == {DUPLICATE}
    assert kinds(drain(1, 100), drain(2, 100)) == {DUPLICATE}


@pytest.mark.requirement("DL-04")
def test_a_lease_of_two_holders_at_once_and_a_drain_of_a_leased_message_are_duplicates() -> None:
    assert kinds(lease(1, 100), lease(2, 101.9, 2)) == {DUPLICATE}
    assert kinds(lease(1, 100), end(EXTEND, 1, 101), lease(2, 102.5, 2)) == {DUPLICATE}
    assert kinds(lease(1, 100), end(EXTEND, 1, 101), lease(2, 101.1 + EXTEND_S, 2)) == set()
    assert kinds(lease(1, 100), drain(2, 101)) == {DUPLICATE}
    assert kinds(lease(1, 100), end(NACK, 1, 100.5), drain(2, 101)) == set()
    assert kinds(lease(1, 100), lease(2, 102, 1)) == {DUPLICATE}, "twice the same attempt"


@pytest.mark.requirement("DL-05")
def test_a_message_that_nobody_gets_after_its_lease_is_lost() -> None:
    forgotten = lease(1, 100)
    assert kinds(forgotten, empty(2, 101, 104.1)) == {LOST}, "it waited"
    assert kinds(forgotten, empty(2, 104.5, 104.6)) == {LOST}, "it asked after that"
    assert kinds(forgotten, empty(2, 101, 104.3), lease(3, 104.4, 2)) == {LOST}, "another got it, too late"
    assert kinds(forgotten, empty(2, 101, 103.9), lease(3, 103.9, 2)) == set()
    full = {"got": (Got("m2", 1, 106),), "limit": 1}
    assert kinds(forgotten, empty(2, 104.5, 104.6, **full)) == set(), "it has no room"
    assert kinds(forgotten, empty(2, 101, 104.1, **full)) == {LOST}, "it had room all the time"
    assert kinds(forgotten, empty(2, 104.5, 104.6), end(ACK, 1, 101)) == set()
    given_back = (forgotten, end(NACK, 1, 100.5))
    assert kinds(*given_back, empty(2, 100.3, 103)) == {LOST}
    assert kinds(forgotten, empty(2, 104.5, 104.6), lease(3, 100, ATTEMPTS_MOST)) >= {DUPLICATE}
    last = lease(1, 100, ATTEMPTS_MOST)
    assert LOST not in {one.kind for one in found(last, empty(2, 101, 104.1)) if "was free" in one.what}


@pytest.mark.requirement("DL-05")
def test_nobody_is_held_to_the_two_seconds_in_an_outage_or_after_an_interruption() -> None:
    forgotten, waited = lease(1, 100), empty(2, 101, 104.1)
    for gateway in ("", HERE):
        assert found(forgotten, waited, outages=(Outage(gateway, 103, 110),)) == []
    assert found(forgotten, waited, outages=(Outage(THERE, 103, 110), Outage("", 90, 99))) != []
    slow = dataclasses.replace(waited, request="r3", wait_s=0, sent=101.5, answered=103, limit=0)
    assert found(forgotten, waited, slow) == []
    interrupted = dataclasses.replace(waited, request="r3", sends=2)
    assert found(forgotten, waited, interrupted) == []
    # A later request gets it in any case.
    later = empty(2, 105, 105.1)
    assert found(forgotten, later, outages=(Outage("", 103, 110),)) != []


@pytest.mark.requirement("DL-05")
def test_an_attempt_that_nobody_got_is_lost_and_one_too_many_is_said() -> None:
    assert kinds(lease(1, 100), lease(2, 102, 3)) == {LOST}
    interrupted = empty(3, 100.5, 101.5, sends=2)
    assert kinds(lease(1, 100), lease(2, 102, 3), interrupted) == set()
    attempts = [lease(number, 100 + LEASE_S * number, number) for number in range(1, ATTEMPTS_MOST + 2)]
    assert kinds(*attempts) == {MISBEHAVED}


@pytest.mark.requirement("DL-03")
def test_a_holder_that_is_refused_within_its_lease_is_said() -> None:
    for how in (ACK, NACK, EXTEND):
        assert kinds(lease(1, 100), end(how, 1, 101, is_done=False)) == {MISBEHAVED}
        assert kinds(lease(1, 100), end(how, 1, 102, is_done=False)) == set()
    extended = (lease(1, 100), end(EXTEND, 1, 101))
    assert kinds(*extended, end(ACK, 1, 102, is_done=False)) == {MISBEHAVED}


@pytest.mark.requirement("DL-05")
def test_in_the_end_each_message_was_taken_by_somebody_or_is_dead_with_its_last_reason() -> None:
    for status in ("unread", "leased", "read", "expired"):
        assert kinds(mail=Mail(BOX, "m1", status)) == {LOST}
    assert kinds(lease(1, 100), mail=CLAIMED) == {LOST}
    assert kinds(*ACKED_ONCE, mail=Mail(BOX, "m1", "dead", attempts=1)) == {CHANGED}
    attempts = [lease(number, 100 + LEASE_S * number, number) for number in range(1, ATTEMPTS_MOST + 1)]
    dead = Mail(BOX, "m1", "dead", attempts=ATTEMPTS_MOST, last_reason=LEASE_RAN_OUT)
    assert kinds(*attempts, mail=dead) == set()
    assert kinds(*attempts, mail=dataclasses.replace(dead, attempts=2)) == {LOST}
    assert kinds(*attempts, mail=dataclasses.replace(dead, last_reason=None)) == {CHANGED}
    nacked = end(NACK, ATTEMPTS_MOST, 107, reason="no disk")
    assert kinds(*attempts, nacked, mail=dead) == {CHANGED}
    assert kinds(*attempts, nacked, mail=dataclasses.replace(dead, last_reason="no disk")) == set()
    silent = end(NACK, ATTEMPTS_MOST, 107)
    assert kinds(*attempts, silent, mail=dataclasses.replace(dead, last_reason=None)) == set()
    assert found(mail=Mail(BOX, "m1", "unread"), is_at_rest=False) == []


def asked(reply: str = "", question: str = "q1") -> Answered:
    """The answer to a question."""
    return Answered(BOX, question, 100, 101, reply)


def late_reply(number: int = 1, reply: str = "m1") -> Taking:
    """The reply, drained out of the mailbox."""
    return dataclasses.replace(drain(number, 102), got=(Got(reply, in_reply_to="q1"),))


@pytest.mark.requirement("DL-07")
def test_each_question_has_its_reply_once_as_the_answer_or_in_the_mailbox() -> None:
    assert kinds(asked("m1"), mail=CLAIMED) == set()
    assert kinds(asked("m1"), asked("m1"), mail=CLAIMED) == set(), "the same question again"
    assert kinds(asked(), late_reply(), mail=CLAIMED) == set()
    assert kinds(asked()) == {LOST}
    assert kinds(asked("m1"), late_reply()) == {DUPLICATE}
    assert kinds(asked("m1"), late_reply(reply="m2")) == {DUPLICATE}
    assert kinds(asked("m1"), asked("m1", question="q2")) == {DUPLICATE}
    leased = lease(2, 102, got=(Got("m1", 1, 104, in_reply_to="q1"),))
    assert kinds(asked(), leased) == {LOST}, "leased, and not acknowledged"
    assert kinds(asked(), leased, end(ACK, 2, 103), mail=CLAIMED) == set()


def seen(*numbers: int, places: tuple[int, ...] = (), follower: str = "one") -> list[Delivery]:
    """The events that a follower got, of messages with these numbers."""
    places = places or numbers
    return [
        Seen(follower, BOX, str(place), f"m{number}", 100.0 + n, HERE)
        for n, (number, place) in enumerate(zip(numbers, places, strict=True))
    ]


@pytest.mark.requirement("DL-02")
def test_a_follower_gets_each_message_once_in_order_and_without_a_gap() -> None:
    acked = [Note(ACKED, "http", BOX, f"m{number}") for number in (1, 2, 3)]
    offsets = {(BOX, f"m{number}"): 10 + number for number in (1, 2, 3)}

    def found_in(*notes: Delivery, is_at_rest: bool = True) -> set[str]:
        return {one.kind for one in check_followers(notes, acked, offsets, is_at_rest=is_at_rest)}

    assert found_in(*seen(1, 2, 3)) == set()
    assert found_in(*seen(1, 2, 3), *seen(1, 2, 3, follower="two")) == set()
    assert found_in(*seen(1, 2, 2, 3)) == {DUPLICATE}
    assert found_in(*seen(1, 3, 2)) == {OUT_OF_ORDER}
    assert found_in(*seen(1, 2, 3, places=(1, 1, 3))) == {OUT_OF_ORDER}
    assert found_in(*seen(1, 3)) == {LOST}
    assert found_in(*seen(1, 2)) == {LOST}
    assert found_in(*seen(1, 2), is_at_rest=False) == set()
    # Taken before the follower came to a later one, or after.
    for at, kinds_of in ((100.5, set[str]()), (103.0, {LOST})):
        taken = dataclasses.replace(drain(1, at), got=(Got("m2"),))
        assert found_in(*seen(1, 3), taken) == kinds_of


class StubbornMailbox:
    """A mailbox whose leases run out: of each way to end one, the first `refused` are refused."""

    name = "gil"

    def __init__(self, refused: int) -> None:
        self._refused = dict.fromkeys((ACK, NACK, EXTEND), refused)
        self._attempts: dict[str, int] = {}
        self._free: list[str] = []
        self.done: list[str] = []

    def send(self, *_: object) -> None:
        """Make a message that is free."""
        self._free.append(f"m{len(self._attempts)}")
        self._attempts[self._free[-1]] = 0

    def take(self, request: str, *, limit: int, **_: object) -> Lease:
        """Lease free messages."""
        ids, self._free = self._free[:limit], self._free[limit:]
        for one in ids:
            self._attempts[one] += 1
        return Lease(request, tuple(Got(one, self._attempts[one]) for one in ids))

    def end(self, how: str, lease: str, ids: Sequence[str], reason: str = "") -> list[str]:
        """End a lease or refuse that. Another attempt follows a refusal, unless the message is dead by now."""
        is_refused = self._refused[how] > 0
        self._refused[how] -= 1
        if is_refused or how == NACK:
            self._free += [one for one in ids if self._attempts[one] < ATTEMPTS_MOST]
        if is_refused:
            return []
        self.done.append(how)
        return list(ids)

    @property
    def is_empty(self) -> bool:
        """True if no message waits."""
        return not self._free


@pytest.mark.requirement("DL-03")
@pytest.mark.parametrize("refused", [0, 1, 5])
def test_a_run_has_each_way_to_end_a_lease_however_often_faults_prevent_it(
    refused: int, tmp_path: Path
) -> None:
    own: Any = StubbornMailbox(refused)
    clock = Clock()
    clock.begin(0.0, 20.0)  # the load is over, and only patience is left
    SureConsumer(own, Oracle(tmp_path / "oracle.jsonl"), clock).run()
    assert {EXTEND, NACK, ACK} == set(own.done)
    assert own.is_empty


@pytest.mark.requirement("DL-03")
def test_a_run_in_which_a_lease_is_never_ended_says_which_way_was_missing(tmp_path: Path) -> None:
    own: Any = StubbornMailbox(10**9)
    clock = Clock()
    clock.begin(0.0, 0.05)
    with pytest.raises(GaveUp, match="gil could not extend, nack, ack"):
        SureConsumer(own, Oracle(tmp_path / "oracle.jsonl"), clock).run()


def test_two_threads_with_one_name_have_no_order_among_each_other(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "oracle.jsonl")
    sent = itertools.count()

    def ask_known(*_: object, **__: object) -> Answer:
        return Answer(200, {}, json.dumps({"message_id": f"m{next(sent)}"}).encode())

    client: Any = SimpleNamespace(ask_known=ask_known)
    for own in [HubMailbox(client, "rosa", Deliveries(tmp_path / "notes")) for _ in range(2)]:
        for text in ("one", "two"):
            own.send("abel", text, "key", None, oracle)
    notes = oracle.notes(ACKED)
    assert len({note.sender for note in notes}) == 2
    assert [note.order for note in notes] == [0, 1, 0, 1]
