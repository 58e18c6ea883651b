"""Conditions of a lease besides its size, its extension and its attempts.

See XP-08, XP-11, DL-03 and DL-05. An acknowledgement carries its answers (XP-06).
"""

from __future__ import annotations

from typing import Any

import pytest

from schemas.streams.mailboxes.mailbox_bodies import (
    MailboxClosing,
    MailboxOpening,
    MessageExtension,
)
from schemas.streams.mailboxes.message import Message
from schemas.wire.record import OutgoingRecord
from tests.schemas.job_records import START_US, said
from tests.schemas.mailbox_records import (
    AT,
    HUB,
    LEASE_US,
    PUMP,
    S_US,
    a_lease,
    a_nack,
    a_reclaim,
    an_ack,
    at,
    leased,
    mailbox_of,
    post_at,
    refused,
    row_of,
    rows_of,
    statuses,
)
from tests.schemas.stream_records import message

NEVER = {"lease_ms": 86_400_000}


@pytest.mark.requirement("XP-08")
def test_only_the_named_ones_are_leased_and_never_more_than_so_many_at_once() -> None:
    entries = mailbox_of("m1", "m2", "m3", "m4")
    first = at(0, a_lease("l1", limit=9, **NEVER, message_ids=["m3", "m9"], held_most=2), entries)
    assert statuses(first) == {"m3": "leased"}
    second = at(0, a_lease("l2", limit=9, **NEVER, message_ids=["m1", "m2"], held_most=2), entries)
    assert statuses(second) == {"m1": "leased"}
    third = a_lease("l3", limit=9, **NEVER, held_most=2)
    assert (said(settled := at(0, third, entries)), rows_of(settled)) == (("accepted", None), [])
    at(S_US, an_ack("m3", "l1"), entries)
    assert statuses(at(S_US, a_lease("l4", limit=9, held_most=2), entries)) == {"m2": "leased"}


@pytest.mark.requirement("XP-08")
def test_no_more_a_minute_than_a_lease_says_by_the_logs_clock() -> None:
    entries = mailbox_of("m1", "m2", "m3", "m4")
    rate = {"limit": 9, "per_minute": 2}
    assert len(rows_of(at(0, a_lease("l1", **rate), entries))) == 2
    assert rows_of(at(59_999_999, a_lease("l2", **rate), entries)) == []
    assert len(rows_of(at(60 * S_US, a_lease("l3", **rate, message_ids=["m3"]), entries))) == 1
    assert len(rows_of(at(60 * S_US, a_lease("l4", **rate, message_ids=["m4"]), entries))) == 1
    # A lease without a rate is neither counted nor limited.
    post_at(60 * S_US, entries, "m5")
    assert len(rows_of(at(60 * S_US, a_lease("l5", limit=1, message_ids=["m5"]), entries))) == 1


@pytest.mark.requirement("XP-11")
def test_nothing_is_posted_to_a_closed_mailbox_or_leased_from_it_until_it_is_open_again() -> None:
    entries = mailbox_of("m1", "m2")
    at(0, a_lease("l1", limit=1), entries)
    close = MailboxClosing(**AT, request_id="g1").record(ce_id="g1", **PUMP)
    assert said(at(0, close, entries)) == ("accepted", None)
    assert said(at(0, close, entries)) == ("duplicate", None)
    assert refused(post_at(0, entries, "m3")) == ("illegal_transition", None)
    # The fold still knows a message that was posted before.
    assert said(post_at(0, entries, "m1")) == ("duplicate", None)
    assert refused(at(0, a_lease("l2", limit=9), entries)) == ("illegal_transition", None)
    # The holder can still ack an earlier lease. The remaining messages go back to their senders.
    assert said(at(0, an_ack("m1", "l1"), entries)) == ("accepted", None)
    back = at(0, a_lease("l3", limit=9, from_closed=True), entries)
    assert statuses(back) == {"m2": "leased"}
    assert said(at(0, MailboxOpening(**AT, request_id="g2").record(ce_id="g2", **PUMP), entries)) == (
        "accepted",
        None,
    )
    assert said(post_at(0, entries, "m3")) == ("accepted", None)


@pytest.mark.requirement("XP-06")
def test_an_acknowledgement_with_its_answers_counts_once_and_only_for_who_holds_the_lease() -> None:
    entries = mailbox_of("m1")
    one, other = (Message.model_validate(message("a1", to="ann", body=body)) for body in ("1", "2"))
    assert said(at(0, an_ack("m1", "l1", answers=[one]), entries))[0] == "rejected"
    at(0, a_lease("l1", limit=1, lease_ms=1000), entries)
    at(2 * S_US, a_lease("l2", limit=1), entries)
    assert refused(at(2 * S_US, an_ack("m1", "l1", answers=[one]), entries)) == ("illegal_transition", "leased")
    assert said(at(2 * S_US, an_ack("m1", "l2", answers=[one]), entries)) == ("accepted", None)
    assert said(at(2 * S_US, an_ack("m1", "l2", answers=[one]), entries)) == ("duplicate", None)
    assert said(at(2 * S_US, an_ack("m1", "l2", answers=[other]), entries)) == ("rejected", "seq_conflict")


@pytest.mark.requirement("DL-04")
def test_a_lease_of_named_messages_leaves_those_that_another_door_holds() -> None:
    entries = mailbox_of("m1", "m2")
    at(0, a_lease("l1", limit=1), entries)
    named = a_lease("l2", limit=9, message_ids=["m1", "m2"], by=HUB)
    assert statuses(at(0, named, entries)) == {"m2": "leased"}


def extension(lease_ms: int = 60_000, ce_id: str = "e1", request: str = "l1", by: Any = PUMP) -> OutgoingRecord:
    """The record by which the holder of m1 extends its lease."""
    return MessageExtension(**AT, message_id="m1", request_id=request, lease_ms=lease_ms).record(
        ce_id=ce_id, **by
    )


@pytest.mark.requirement("DL-03")
def test_an_extended_lease_ends_later_and_each_extension_counts_once() -> None:
    entries = leased()
    found = row_of(at(S_US, extension(), entries))
    assert (found.status, found.attempts, found.lease_until) == ("leased", 1, START_US + 61 * S_US)
    assert said(at(20 * S_US, extension(), entries)) == ("duplicate", None)
    assert refused(at(20 * S_US, extension(5), entries)) == ("seq_conflict", "leased")
    reclaim = a_reclaim("m1", "l1", by=HUB)
    assert refused(at(LEASE_US, reclaim, entries)) == ("illegal_transition", "leased")
    assert row_of(at(40 * S_US, extension(1000, "e2"), entries)).lease_until == START_US + 41 * S_US
    assert row_of(at(41 * S_US, reclaim, entries)).status == "unread"


@pytest.mark.requirement("DL-03")
def test_only_the_holder_extends_a_lease_and_only_before_its_end() -> None:
    entries = leased()
    for made in (extension(request="l2"), extension(by=HUB)):
        assert refused(at(S_US, made, entries)) == ("illegal_transition", "leased")
    assert refused(at(LEASE_US, extension(), entries)) == ("illegal_transition", "leased")
    at(LEASE_US, a_reclaim("m1", "l1", by=HUB), entries)
    assert refused(at(LEASE_US, extension(), entries)) == ("illegal_transition", "unread")
    at(LEASE_US, an_ack("m1", "l1"), entries)
    assert refused(at(LEASE_US, extension(), entries)) == ("after_terminal", None)


@pytest.mark.requirement("DL-05")
def test_the_lease_sets_after_how_many_attempts_a_message_is_dead_and_the_row_has_the_last_reason() -> None:
    entries = mailbox_of("m1")
    for number, reason in enumerate(("no route", "", "the disk is full"), 1):
        request = f"l{number}"
        lease = a_lease(request, attempts_most=4, by=HUB)
        assert row_of(at(number * S_US, lease, entries)).status == "leased"
        found = row_of(at(number * S_US, a_nack("m1", request, reason=reason, by=HUB), entries))
        assert (found.status, found.last_reason) == ("unread", reason or None)
    assert (
        row_of(at(4 * S_US, a_lease("l4", limit=1, lease_ms=1, attempts_most=4, by=HUB), entries)).attempts == 4
    )
    dead = row_of(at(5 * S_US, a_reclaim("m1", "l4", by=HUB), entries))
    assert (dead.status, dead.attempts, dead.last_reason) == ("dead", 4, "the lease ran out")


@pytest.mark.requirement("DL-05")
def test_a_message_whose_lease_ran_out_before_anything_took_it_back_says_so_when_it_is_leased_again() -> None:
    entries = leased()
    at(S_US, a_nack("m1", "l1", reason="the disk is full"), entries)
    at(2 * S_US, a_lease("l2", attempts_most=3), entries)
    found = row_of(at(2 * S_US + LEASE_US, a_lease("l3", attempts_most=3, by=HUB), entries))
    assert (found.status, found.last_reason) == ("leased", "the lease ran out")
    dead = row_of(at(3 * S_US + 2 * LEASE_US, a_lease("l4", attempts_most=3), entries))
    assert (dead.status, dead.attempts, dead.last_reason) == ("dead", 3, "the lease ran out")
