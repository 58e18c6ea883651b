"""The life of a message after its posting (HH-06): claims, leases, acks and expiry.

The model in `mailbox_model.py` says what the fold does in every case; here are the cases that matter, in words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest

from schemas.fold.entries import Entries
from schemas.streams.mailboxes.mailbox_bodies import (
    LIMIT_MOST,
    MailboxLease,
    MessageAck,
    MessageExpiry,
    MessageNack,
    MessageReading,
    MessageReclaim,
)
from schemas.streams.mailboxes.mailbox_fold import ATTEMPTS_MOST
from schemas.streams.mailboxes.message import MESSAGE_FINAL, MESSAGE_PENDING
from schemas.wire.record import OutgoingRecord
from tests.schemas.job_records import START_US, said
from tests.schemas.mailbox_records import (
    AT,
    HUB,
    LEASE_US,
    PUMP,
    S_US,
    a_claim,
    a_clearing,
    a_lease,
    a_nack,
    a_reading,
    a_reclaim,
    an_ack,
    an_expiry,
    at,
    leased,
    mailbox_of,
    post_at,
    refused,
    row_of,
    rows_of,
    statuses,
)

pytestmark = pytest.mark.requirement("HH-06")

WEEK_US = 7 * 24 * 3600 * S_US
LATER = "2027-01-15T08:01:00Z"  # a minute after the start


def worn_out() -> Entries:
    """A mailbox whose m1 was leased as often as may be, each lease of a millisecond; last at 2 s, by l2."""
    entries = mailbox_of("m1")
    for number in range(ATTEMPTS_MOST):
        found = row_of(at(number * S_US, a_lease(f"l{number}", limit=1, lease_ms=1), entries))
        assert (found.status, found.attempts) == ("leased", number + 1)
    return entries


def end_by(status: str) -> tuple[Entries, OutgoingRecord]:
    """A mailbox whose m1 got this final status about a minute after the start, and the record that did it."""
    entries = Entries()
    post_at(0, entries, expires_at=LATER)
    made = {
        "claimed": a_claim("c1"),
        "read": a_reading("m1"),
        "expired": an_expiry("m1"),
        "cleared": a_clearing("x1"),
        "dead": a_nack("m1", "l2"),
    }[status]
    if status == "dead":
        entries = worn_out()
    found = row_of(at(59 * S_US if status == "claimed" else 60 * S_US, made, entries))
    assert (found.status, found.lease_until) == (status, None)
    assert found.ended_at is not None
    return entries, made


def test_a_leased_message_is_nobody_elses_until_the_very_end_of_its_lease() -> None:
    entries = leased()
    assert rows_of(at(LEASE_US - 1, a_claim("c1"), entries)) == []
    found = row_of(at(LEASE_US, a_lease("l2", limit=1, lease_ms=60_000), entries))
    assert (found.attempts, found.request_id) == (2, "l2")
    assert found.lease_until == START_US + LEASE_US + 60 * S_US
    assert statuses(at(LEASE_US + 60 * S_US, a_claim("c2"), entries)) == {"m1": "claimed"}


@pytest.mark.parametrize("offset_us", [0, LEASE_US - 1, LEASE_US, 9 * LEASE_US])
def test_its_holder_acknowledges_a_message_even_after_the_lease_has_run_out(offset_us: int) -> None:
    entries = leased()
    settled = at(offset_us, an_ack("m1", "l1"), entries)
    assert (row_of(settled).status, row_of(settled).request_id, settled.status_after) == (
        "claimed",
        "l1",
        "claimed",
    )
    again = at(offset_us, an_ack("m1", "l1"), entries)
    assert (said(again), again.status_after) == (("duplicate", None), "claimed")


def test_a_late_ack_counts_after_a_reclaim_until_somebody_else_gets_the_message() -> None:
    for taken in (False, True):
        entries = leased()
        assert row_of(at(LEASE_US, a_reclaim("m1", "l1", by=HUB), entries)).status == "unread"
        if taken:
            at(LEASE_US, a_lease("l2"), entries)
        settled = at(LEASE_US, an_ack("m1", "l1"), entries)
        assert said(settled) == (("rejected", "illegal_transition") if taken else ("accepted", None))


def test_only_the_holder_acknowledges_or_gives_back_and_only_by_its_lease() -> None:
    entries = leased()
    for make in (MessageAck, MessageNack):
        for request, by in (("l2", PUMP), ("l1", HUB), ("l1", {**PUMP, "principal": "cy"})):
            assert refused(at(0, make(**AT, message_id="m1", request_id=request).record(**by), entries)) == (
                "illegal_transition",
                "leased",
            )


def test_a_message_given_back_is_unread_and_its_lease_is_no_more() -> None:
    entries = leased()
    nack = a_nack("m1", "l1", reason="busy")
    found = row_of(at(S_US, nack, entries))
    assert (found.status, found.attempts, found.lease_until) == ("unread", 1, None)
    assert (found.handed_to, found.request_id) == ("xml/bo", None)
    assert (said(at(S_US, nack, entries)), entries.get("leases")) == (("duplicate", None), None)
    assert refused(at(S_US, an_ack("m1", "l1"), entries)) == ("illegal_transition", "unread")
    other = a_nack("m1", "l1", reason="ill")
    assert refused(at(S_US, other, entries)) == ("seq_conflict", "unread")
    at(S_US, a_lease("l2"), entries)
    again = at(S_US, nack, entries)
    assert (said(again), again.status_after) == (("duplicate", None), "leased"), "and the new lease stays"


def test_a_lease_is_reclaimed_by_anybody_once_it_has_run_out_and_not_before() -> None:
    entries, reclaim = (leased(), a_reclaim("m1", "l1", ce_id="follows", by=HUB))
    assert refused(at(LEASE_US - 1, reclaim, entries)) == ("illegal_transition", "leased")
    wrong = a_reclaim("m1", "l7", by=HUB)
    assert refused(at(LEASE_US, wrong, entries)) == ("illegal_transition", "leased")
    found = row_of(at(LEASE_US, reclaim, entries))
    assert (found.status, found.handed_to, found.lease_until) == ("unread", "xml/bo", None)
    assert said(at(LEASE_US, reclaim, entries)) == ("duplicate", None)
    second = a_reclaim("m1", "l1", ce_id="another", by=HUB)
    assert refused(at(LEASE_US, second, entries)) == ("illegal_transition", "unread")


@pytest.mark.parametrize(
    "made",
    [
        a_nack("m1", "l2"),
        a_reclaim("m1", "l2", by=HUB),
        a_claim("c1", by=HUB),
        a_lease("l3"),
    ],
    ids=lambda made: made.type,
)
def test_after_three_attempts_a_message_is_dead_instead_of_handed_out(made: OutgoingRecord) -> None:
    entries = worn_out()
    found = row_of(at(60 * S_US, made, entries))
    assert (found.status, found.attempts, found.handed_to, found.request_id) == ("dead", 3, "xml/bo", "l2")
    assert list(entries.with_prefix("m/")) == []
    assert said(at(60 * S_US, made, entries)) == ("duplicate", None)


def test_the_third_attempt_may_succeed() -> None:
    assert row_of(at(60 * S_US, an_ack("m1", "l2"), worn_out())).status == "claimed"


@pytest.mark.requirement("DL-04")
def test_a_lease_keeps_its_messages_from_all_others_and_other_messages_go_to_any_door() -> None:
    entries = leased(2, "m1", "m2", "m3", "m4")
    assert row_of(at(S_US, a_reading("m4", by=HUB), entries)).status == "read"
    assert refused(at(S_US, a_reading("m1", by=HUB), entries)) == ("illegal_transition", "leased")
    assert statuses(at(S_US, a_lease("l2", limit=9, by=HUB), entries)) == {"m3": "leased"}
    assert rows_of(at(S_US, a_claim("c1", by=HUB), entries)) == []
    at(S_US, a_nack("m2", "l1"), entries)
    assert statuses(at(S_US, a_claim("c2", by=HUB), entries)) == {"m2": "claimed"}


def test_a_lease_that_has_run_out_keeps_nobody_away() -> None:
    entries = leased()
    assert rows_of(at(LEASE_US - 1, a_claim("c1", by=HUB), entries)) == []
    assert statuses(at(LEASE_US, a_claim("c2", by=HUB), entries)) == {"m1": "claimed"}
    entries = leased()
    assert row_of(at(LEASE_US, a_reading("m1", by=HUB), entries)).status == "read"


@pytest.mark.requirement("DL-07")
def test_a_claim_of_unread_messages_leaves_those_that_somebody_holds() -> None:
    entries = leased(1, "m1", "m2")
    wanted = a_claim("c1", message_ids=["m1", "m2"], if_unread=True, limit=LIMIT_MOST, by=HUB)
    assert statuses(at(S_US, wanted, entries)) == {"m2": "claimed"}
    assert row_of(at(S_US, an_ack("m1", "l1"), entries)).status == "claimed"


def test_a_message_expires_when_its_time_is_over_and_nobody_holds_it() -> None:
    entries = mailbox_of("m1", expires_at=LATER)
    expiry = an_expiry("m1", by=HUB)
    assert refused(at(60 * S_US - 1, expiry, entries)) == ("illegal_transition", "unread")
    at(50 * S_US, a_lease("l1"), entries)
    assert refused(at(60 * S_US, expiry, entries)) == ("illegal_transition", "leased")
    assert row_of(at(80 * S_US, expiry, entries)).status == "expired"
    assert refused(at(0, an_expiry("m1", by=HUB), mailbox_of("m1"))) == ("illegal_transition", "unread")


def test_clearing_ends_all_that_is_pending_leased_or_not() -> None:
    entries = leased(1, "m1", "m2")
    assert statuses(at(S_US, a_clearing("x1", by=HUB), entries)) == {"m1": "cleared", "m2": "cleared"}
    assert (list(entries.with_prefix("m/")), entries.get("leases")) == ([], None)
    assert refused(at(S_US, an_ack("m1", "l1"), entries)) == ("after_terminal", None)


@pytest.mark.parametrize("status", sorted(MESSAGE_FINAL))
def test_what_is_final_stays_so(status: str) -> None:
    entries, made = end_by(status)
    later = [
        an_ack("m1", "l9"),
        a_nack("m1", "l9"),
        a_reclaim("m1", "l9"),
        a_reading("m1", by=HUB),
        an_expiry("m1", by=HUB),
    ]
    for one in later:
        assert refused(at(90 * S_US, one, entries)) == ("after_terminal", None)
    assert rows_of(at(90 * S_US, a_claim("c9"), entries)) == []
    assert said(at(90 * S_US, made, entries)) == ("duplicate", None)
    assert status not in MESSAGE_PENDING


def test_of_a_message_that_nobody_posted_there_is_nothing_to_say() -> None:
    for make in (MessageReading, MessageExpiry):
        assert refused(at(0, make(**AT, message_id="m2").record(**PUMP), leased())) == ("unknown_stream", None)
    for make in (MessageAck, MessageNack, MessageReclaim):
        assert refused(at(0, make(**AT, message_id="m2", request_id="l1").record(**PUMP), leased())) == (
            "unknown_stream",
            None,
        )


@pytest.mark.requirement("CM-04")
def test_a_finished_messages_id_is_known_for_a_week_and_new_after_that() -> None:
    entries = mailbox_of("m1")
    at(S_US, a_claim("c1", by=HUB), entries)
    assert said(post_at(WEEK_US, entries)) == ("duplicate", None)
    assert refused(post_at(WEEK_US, entries, body="other")) == ("seq_conflict", None)
    assert refused(at(WEEK_US, a_reading("m1", by=HUB), entries)) == ("after_terminal", None)
    assert refused(at(WEEK_US + 1, a_reading("m1", by=HUB), entries)) == ("unknown_stream", None)
    assert row_of(post_at(WEEK_US + 1, entries, body="other")).posted_at == START_US + WEEK_US + 1
    assert row_of(at(WEEK_US + 2, a_reading("m1", by=HUB), entries)).status == "read"


def test_the_same_door_reads_the_message_that_has_its_id_after_a_week() -> None:
    """The record has the id of the one that read the first: that one is not it."""
    entries, read = mailbox_of("m1"), a_reading("m1", by=HUB)
    assert said(at(0, read, entries)) == ("accepted", None)
    post_at(WEEK_US + 1, entries)
    assert row_of(at(WEEK_US + 1, read, entries)).status == "read"
    assert said(at(WEEK_US + 1, read, entries)) == ("duplicate", None)


def test_no_entry_is_left_of_a_finished_message_but_its_id() -> None:
    entries = Entries()
    for n in range(600):
        post_at(n, entries, f"m{n}")
    at(S_US, a_claim("c1", limit=1000, by=HUB), entries)
    kinds = {key.partition("/")[0] for key in entries.stored()}
    assert kinds == {"id", "last", "requests", "size"}


def test_acks_do_not_make_a_drain_forgotten_that_may_yet_be_repeated() -> None:
    entries = mailbox_of(*(f"m{n}" for n in range(300)))
    lease = a_lease("l1", limit=300)
    assert len(rows_of(at(0, lease, entries))) == 300
    for n in range(300):
        assert said(at(0, an_ack(f"m{n}", "l1"), entries)) == ("accepted", None)
    assert said(at(0, lease, entries)) == ("duplicate", None)


T = TypeVar("T", bound=msgspec.Struct)


class CountedEntries(Entries):
    """Entries that count the messages that were looked at."""

    looked_at = 0

    def struct(self, key: str, decode: Callable[[bytes], T]) -> T | None:
        self.looked_at += key.startswith("m/")
        return super().struct(key, decode)


def test_a_claim_looks_at_no_more_messages_than_it_hands_out() -> None:
    entries = CountedEntries(mailbox_of(*(f"m{n}" for n in range(200))).stored())
    assert len(rows_of(at(0, a_claim("c1", limit=10, by=HUB), entries))) == 10
    assert 10 <= entries.looked_at <= 11


def test_two_senders_may_use_one_request_id_and_make_two_requests() -> None:
    entries = mailbox_of("m1", "m2")
    for principal in ("bo", "cy"):
        made = MailboxLease(**AT, request_id="l1").record(door="xml", principal=principal)
        assert row_of(at(0, made, entries)).handed_to == f"xml/{principal}"
