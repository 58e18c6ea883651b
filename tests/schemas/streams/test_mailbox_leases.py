"""Conditions of a lease besides its size: named messages, a limit at once or per minute, a closed mailbox.

See XP-08 and XP-11. An acknowledgement carries its answers (XP-06).
"""

from __future__ import annotations

import pytest

from schemas.streams.mailboxes.mailbox_requests import (
    ack_record,
    gate_record,
    lease_record,
)
from schemas.streams.mailboxes.message import Message
from tests.schemas.job_records import said
from tests.schemas.mailbox_records import AT, HUB, PUMP, at, mailbox_of, post_at, refused, rows_of, statuses
from tests.schemas.stream_records import message

S_US = 1_000_000
NEVER = {"lease_ms": 86_400_000}


@pytest.mark.requirement("XP-08")
def test_only_the_named_ones_are_leased_and_never_more_than_so_many_at_once() -> None:
    entries = mailbox_of("m1", "m2", "m3", "m4")
    first = at(0, lease_record(*AT, "l1", 9, **NEVER, message_ids=["m3", "m9"], held_most=2, **PUMP), entries)
    assert statuses(first) == {"m3": "leased"}
    second = at(0, lease_record(*AT, "l2", 9, **NEVER, message_ids=["m1", "m2"], held_most=2, **PUMP), entries)
    assert statuses(second) == {"m1": "leased"}
    third = lease_record(*AT, "l3", 9, **NEVER, held_most=2, **PUMP)
    assert (said(settled := at(0, third, entries)), rows_of(settled)) == (("accepted", None), [])
    at(S_US, ack_record(*AT, "m3", "l1", **PUMP), entries)
    assert statuses(at(S_US, lease_record(*AT, "l4", 9, held_most=2, **PUMP), entries)) == {"m2": "leased"}


@pytest.mark.requirement("XP-08")
def test_no_more_a_minute_than_a_lease_says_by_the_logs_clock() -> None:
    entries = mailbox_of("m1", "m2", "m3", "m4")
    rate = {"per_minute": 2, **PUMP}
    assert len(rows_of(at(0, lease_record(*AT, "l1", 9, **rate), entries))) == 2
    assert rows_of(at(59_999_999, lease_record(*AT, "l2", 9, **rate), entries)) == []
    assert len(rows_of(at(60 * S_US, lease_record(*AT, "l3", 9, message_ids=["m3"], **rate), entries))) == 1
    assert len(rows_of(at(60 * S_US, lease_record(*AT, "l4", 9, message_ids=["m4"], **rate), entries))) == 1
    # A lease without a rate is neither counted nor limited.
    post_at(60 * S_US, entries, "m5")
    assert len(rows_of(at(60 * S_US, lease_record(*AT, "l5", 1, message_ids=["m5"], **PUMP), entries))) == 1


@pytest.mark.requirement("XP-11")
def test_nothing_is_posted_to_a_closed_mailbox_or_leased_from_it_until_it_is_open_again() -> None:
    entries = mailbox_of("m1", "m2")
    at(0, lease_record(*AT, "l1", 1, **PUMP), entries)
    close = gate_record(*AT, "g1", is_open=False, ce_id="g1", **PUMP)
    assert said(at(0, close, entries)) == ("accepted", None)
    assert said(at(0, close, entries)) == ("duplicate", None)
    assert refused(post_at(0, entries, "m3")) == ("illegal_transition", None)
    # The fold still knows a message that was posted before.
    assert said(post_at(0, entries, "m1")) == ("duplicate", None)
    assert refused(at(0, lease_record(*AT, "l2", 9, **PUMP), entries)) == ("illegal_transition", None)
    # The holder can still ack an earlier lease. The remaining messages go back to their senders.
    assert said(at(0, ack_record(*AT, "m1", "l1", **PUMP), entries)) == ("accepted", None)
    back = at(0, lease_record(*AT, "l3", 9, from_closed=True, **PUMP), entries)
    assert statuses(back) == {"m2": "leased"}
    assert said(at(0, gate_record(*AT, "g2", is_open=True, ce_id="g2", **PUMP), entries)) == ("accepted", None)
    assert said(post_at(0, entries, "m3")) == ("accepted", None)


@pytest.mark.requirement("XP-06")
def test_an_acknowledgement_with_its_answers_counts_once_and_only_for_who_holds_the_lease() -> None:
    entries = mailbox_of("m1")
    one, other = (Message.model_validate(message("a1", to="ann", body=body)) for body in ("1", "2"))
    assert said(at(0, ack_record(*AT, "m1", "l1", [one], **PUMP), entries))[0] == "rejected"
    at(0, lease_record(*AT, "l1", 1, lease_ms=1000, **PUMP), entries)
    at(2 * S_US, lease_record(*AT, "l2", 1, **PUMP), entries)
    assert refused(at(2 * S_US, ack_record(*AT, "m1", "l1", [one], **PUMP), entries)) == (
        "illegal_transition",
        "leased",
    )
    assert said(at(2 * S_US, ack_record(*AT, "m1", "l2", [one], **PUMP), entries)) == ("accepted", None)
    assert said(at(2 * S_US, ack_record(*AT, "m1", "l2", [one], **PUMP), entries)) == ("duplicate", None)
    assert said(at(2 * S_US, ack_record(*AT, "m1", "l2", [other], **PUMP), entries)) == (
        "rejected",
        "seq_conflict",
    )


@pytest.mark.requirement("DL-04")
def test_a_lease_of_named_messages_leaves_those_that_another_door_holds() -> None:
    entries = mailbox_of("m1", "m2")
    at(0, lease_record(*AT, "l1", 1, **PUMP), entries)
    named = lease_record(*AT, "l2", 9, message_ids=["m1", "m2"], **HUB)
    assert statuses(at(0, named, entries)) == {"m2": "leased"}
