"""Claims: the messages of a mailbox that are handed out for good."""

from __future__ import annotations

import pytest

from schemas.fold.entries import Entries
from schemas.streams.mailboxes.mailbox_bodies import (
    LIMIT_MOST,
)
from tests.schemas.job_records import START_US, said
from tests.schemas.mailbox_records import (
    HUB,
    S_US,
    a_claim,
    a_clearing,
    a_lease,
    at,
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


def test_a_claim_hands_out_high_before_normal_before_low_and_each_oldest_first() -> None:
    entries = Entries()
    posted = {"m4": "low", "m2": "normal", "m9": "high", "m1": "normal", "m3": "high", "m8": "normal"}
    for n, (message_id, priority) in enumerate(posted.items()):
        # The last two have one moment: then the log decides.
        post_at(min(n, 4) * 1000, entries, message_id, priority=priority)
    post_at(4000, entries, "m7")
    first = at(S_US, a_claim("c1", limit=3, by=HUB), entries)
    assert statuses(first) == {"m9": "claimed", "m3": "claimed", "m2": "claimed"}
    assert list(statuses(first)) == ["m9", "m3", "m2"]
    rest = at(S_US, a_claim("c2", by=HUB), entries)
    assert list(statuses(rest)) == ["m1", "m8", "m7", "m4"]
    assert (said(first), first.status_after) == (("accepted", None), None)


def test_a_claim_of_named_messages_hands_out_these_alone_and_touches_no_other() -> None:
    entries = mailbox_of("m1", "m2", expires_at=LATER)
    for message_id in ("m3", "m4", "m5"):
        post_at(0, entries, message_id)
    found = at(
        60 * S_US, a_claim("c1", message_ids=["m5", "m2", "m3", "m9"], limit=LIMIT_MOST, by=HUB), entries
    )
    # m2's time is over by the log's clock, but it was in time by the poll's; m1's is over, too.
    assert statuses(found) == {"m2": "claimed", "m3": "claimed", "m5": "claimed"}
    assert said(
        at(S_US, a_claim("c1", message_ids=["m5", "m2", "m3", "m9"], limit=LIMIT_MOST, by=HUB), entries)
    ) == ("duplicate", None)
    assert refused(at(S_US, a_claim("c1", message_ids=["m4"], limit=LIMIT_MOST, by=HUB), entries)) == (
        "seq_conflict",
        None,
    )
    assert statuses(at(S_US, a_claim("c2", by=HUB), entries)) == {"m1": "claimed", "m4": "claimed"}


@pytest.mark.requirement("LM-11")
@pytest.mark.parametrize(("bytes_most", "handed"), [(0, 1), (9, 1), (10, 2), (14, 2), (15, 3), (99, 4)])
def test_a_claim_or_lease_hands_out_no_more_bytes_than_it_may_but_one_message(
    bytes_most: int, handed: int
) -> None:
    ids = ["m1", "m2", "m3", "m4"]
    for made in (
        a_claim("c1", limit=1000, bytes_most=bytes_most),
        a_lease("l1", limit=1000, bytes_most=bytes_most),
    ):
        entries = Entries()
        for number, one in enumerate(ids):
            # A blob is not part of an answer, although it counts in the mailbox.
            blob = {"digest": "0" * 64, "bytes": 10_000, "content_type": "image/png"} if number == 1 else None
            post_at(number, entries, one, body="\N{SNOWMAN}12", content_type="text/plain", blob=blob)

        assert [row.message_id for row in rows_of(at(S_US, made, entries))] == ids[:handed]


@pytest.mark.requirement("DL-32")
def test_a_claim_of_named_messages_is_rejected_if_the_mailbox_knows_none_of_them() -> None:
    entries = mailbox_of("m1")
    unknown = a_claim("c1", message_ids=["m8", "m9"], limit=LIMIT_MOST, by=HUB)
    assert refused(at(S_US, unknown, entries)) == ("unknown_stream", None)
    claim = a_claim("c2", message_ids=["m1", "m9"], limit=LIMIT_MOST, by=HUB)
    assert statuses(at(S_US, claim, entries)) == {"m1": "claimed"}
    again = a_claim("c3", message_ids=["m1"], limit=LIMIT_MOST, by=HUB)
    assert (said(at(S_US, again, entries)), said(at(S_US, unknown, entries))) == (
        ("accepted", None),
        ("rejected", "unknown_stream"),
    )


def test_a_claimed_message_says_who_got_it_when_and_by_which_request() -> None:
    found = row_of(at(S_US, a_claim("c1", by=HUB), mailbox_of("m1")))
    assert (found.handed_to, found.request_id, found.attempts) == ("http/bo", "c1", 1)
    assert (found.handed_at, found.ended_at, found.lease_until) == (START_US + S_US, START_US + S_US, None)


def test_a_drain_of_an_empty_mailbox_is_accepted_and_again_a_duplicate() -> None:
    entries = Entries()
    for made in (
        a_claim("c1", by=HUB),
        a_lease("l1", by=HUB),
        a_clearing("x", by=HUB),
    ):
        first, again = at(0, made, entries), at(1, made, entries)
        assert (said(first), first.changes) == (("accepted", None), ())
        assert (said(again), again.changes) == (("duplicate", None), ())


def test_the_same_drain_again_hands_out_nothing_and_with_other_content_it_is_a_conflict() -> None:
    entries = mailbox_of("m1", "m2")
    assert len(rows_of(at(0, a_claim("c1", limit=1, by=HUB), entries))) == 1
    assert said(at(0, a_claim("c1", limit=1, by=HUB), entries)) == ("duplicate", None)
    assert refused(at(0, a_claim("c1", limit=2, by=HUB), entries)) == ("seq_conflict", None)
    assert len(rows_of(at(0, a_claim("c2", limit=2, by=HUB), entries))) == 1


def test_a_claim_ends_the_messages_on_its_way_whose_time_is_over_and_does_not_count_them() -> None:
    entries = mailbox_of("m1", "m3", expires_at=LATER)
    for message_id in ("m2", "m4", "m5"):
        post_at(0, entries, message_id)
    settled = at(60 * S_US, a_claim("c1", limit=1, by=HUB), entries)
    assert statuses(settled) == {"m1": "expired", "m3": "expired", "m2": "claimed"}
    assert (rows_of(settled)[0].attempts, rows_of(settled)[0].handed_to) == (0, None)
    leasing = at(60 * S_US, a_lease("l1", limit=1, by=HUB), entries)
    assert statuses(leasing) == {"m4": "leased"}
    early = mailbox_of("m1", expires_at=LATER)
    assert statuses(at(60 * S_US - 1, a_claim("c1", by=HUB), early)) == {"m1": "claimed"}
