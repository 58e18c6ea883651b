"""The limits of mailboxes (LM-01), and those that an operator sets for principals (LM-02), in the fold."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from schemas.fold.entries import Entries
from schemas.fold.settled import Settled
from schemas.streams.control.limits import LimitRow, LimitsSet
from schemas.streams.fold import settle
from schemas.streams.mailboxes.mailbox_bodies import (
    MailboxLimitRow,
    MailboxLimits,
)
from schemas.streams.mailboxes.message import Message
from tests.schemas.job_records import KEYRING, START_US, said
from tests.schemas.mailbox_records import (
    AT,
    HUB,
    S_US,
    a_claim,
    a_clearing,
    a_due,
    a_lease,
    a_nack,
    an_ack,
    an_expiry,
    at,
    mailbox_of,
    post_at,
)
from tests.schemas.stream_records import as_read

OPERATOR: dict[str, Any] = {"door": "http", "principal": "operator"}


def limit(entries: Entries, number: int, **most: int) -> Settled:
    """Set the limits of the mailbox's own."""
    wanted: dict[str, Any] = {"pending_most": None, "bytes_most": None, **most}
    return at(number, MailboxLimits(**AT, request_id=f"s{number}", **wanted).record(**OPERATOR), entries)


@pytest.mark.requirement("LM-01")
def test_a_full_mailbox_takes_a_message_again_as_soon_as_one_has_ended() -> None:
    ends = {
        "claimed": lambda entries: at(S_US, a_claim("c1", limit=1, by=HUB), entries),
        "cleared": lambda entries: at(S_US, a_clearing("x1", by=HUB), entries),
        "expired": lambda entries: at(61 * S_US, an_expiry("m1", ce_id="e1", by=OPERATOR), entries),
    }
    for end in ends.values():
        entries = mailbox_of("m1", "m2", expires_in_ms=60_000)
        full = post_at(S_US, entries, "m3", pending_most=2)
        assert said(full) == ("rejected", "mailbox_full")
        assert full.why == "2 messages wait in the mailbox, and its limit is 2"
        end(entries)
        assert said(post_at(62 * S_US, entries, "m3", pending_most=2)) == ("accepted", None)


@pytest.mark.requirement("LM-01")
def test_delayed_and_leased_messages_count_and_coming_back_or_being_delivered_counts_nothing_twice() -> None:
    entries = mailbox_of("m1")
    post_at(0, entries, "m2", deliver_after_ms=1000)
    at(0, a_lease("l1"), entries)
    assert said(post_at(0, entries, "m3", pending_most=2)) == ("rejected", "mailbox_full")
    at(0, a_nack("m1", "l1"), entries)
    at(S_US, a_due("m2", ce_id="d1", by=OPERATOR), entries)
    assert said(post_at(S_US, entries, "m3", pending_most=2)) == ("rejected", "mailbox_full")
    assert said(post_at(S_US, entries, "m3", pending_most=3)) == ("accepted", None)
    at(S_US, a_lease("l2"), entries)
    at(S_US, an_ack("m1", "l2"), entries)
    assert said(post_at(S_US, entries, "m4", pending_most=3)) == ("accepted", None)


@pytest.mark.requirement("LM-01")
def test_bytes_are_those_of_the_bodies_in_utf_8() -> None:
    entries = mailbox_of("m1", body="ü")
    assert said(post_at(0, entries, "m2", body="☃", bytes_most=4)) == ("rejected", "mailbox_full")
    assert said(post_at(0, entries, "m2", body="☃", bytes_most=5)) == ("accepted", None)
    at(S_US, a_claim("c1", by=HUB), entries)
    assert said(post_at(S_US, entries, "m3", body="12345", bytes_most=5)) == ("accepted", None)


@pytest.mark.requirement("LM-01")
def test_the_same_message_again_is_a_duplicate_also_in_a_full_mailbox_and_with_other_limits() -> None:
    entries = mailbox_of("m1", pending_most=1)
    assert said(post_at(0, entries, "m1", pending_most=1)) == ("duplicate", None)
    assert said(post_at(0, entries, "m1", bytes_most=0)) == ("duplicate", None)
    assert said(post_at(0, entries, "m1", body="other", pending_most=1)) == ("rejected", "seq_conflict")


@pytest.mark.requirement("ST-80")
def test_a_message_of_the_system_is_taken_by_a_full_mailbox_and_no_file_can_say_that_it_is_one() -> None:
    entries = mailbox_of("m1")
    limit(entries, 1, pending_most=1, bytes_most=1)
    assert said(post_at(2, entries, "m2", unlimited=True)) == ("accepted", None)
    # The mark is no part of the content.
    assert said(post_at(3, entries, "m2")) == ("duplicate", None)
    assert said(post_at(4, entries, "m3")) == ("rejected", "mailbox_full")
    said_by_file = {
        "message_id": "m4",
        "from": "ann",
        "to": "bo",
        "kind": "ask",
        "body": "?",
        "unlimited": True,
    }
    record = Message.model_validate(said_by_file).record(door="file", principal="ann")
    assert said(at(5, record, entries)) == ("rejected", "unauthenticated_record")


@pytest.mark.requirement("LM-01")
def test_a_mailboxs_own_limit_counts_instead_of_the_doors_until_it_is_lifted() -> None:
    entries = mailbox_of("m1")
    row = limit(entries, 1, pending_most=1).changes[0].row
    assert row == MailboxLimitRow(
        realm="default",
        recipient="bo",
        pending_most=1,
        bytes_most=None,
        limited_by="http/operator",
        limited_at=START_US + 1,
    )
    for more in ({}, {"pending_most": 100}):
        assert said(post_at(2, entries, "m2", **more)) == ("rejected", "mailbox_full")
    limit(entries, 3, pending_most=3)
    assert said(post_at(4, entries, "m2", pending_most=1)) == ("accepted", None)
    limit(entries, 5)
    assert said(post_at(6, entries, "m3", pending_most=2)) == ("rejected", "mailbox_full")
    assert said(post_at(6, entries, "m3")) == ("accepted", None)
    assert said(limit(entries, 5)) == ("duplicate", None)
    assert said(limit(entries, 5, pending_most=4)) == ("rejected", "seq_conflict")


@pytest.mark.requirement("LM-01")
def test_what_waited_before_this_fold_version_counts_and_its_bytes_do_not() -> None:
    entries = mailbox_of("m1", "m2")
    older = Entries({key: value for key, value in entries.stored().items() if key != "size"})
    assert said(post_at(1, older, "m3", pending_most=2)) == ("rejected", "mailbox_full")
    assert said(post_at(1, older, "m3", body="x", bytes_most=1)) == ("accepted", None)
    assert said(post_at(1, older, "m4", pending_most=3)) == ("rejected", "mailbox_full")


def set_limits(entries: Entries, request_id: str, **fields: Any) -> Settled:
    """Settle limits of a scope."""
    body = LimitsSet.model_validate({"scope": "role", "name": "worker", "request_id": request_id, **fields})
    record = as_read(body.record(**OPERATOR))
    return settle(msgspec.structs.replace(record, logged_at_us=START_US), entries, KEYRING, Entries())


@pytest.mark.requirement("LM-02")
def test_limits_of_a_scope_replace_those_before_and_a_repeated_request_changes_nothing() -> None:
    entries = Entries()
    row = set_limits(entries, "q1", pending_most=5, messages_per_minute=60).changes[0].row
    assert isinstance(row, LimitRow)
    assert (row.key, row.pending_most, row.messages_per_minute) == ("role/worker", 5, 60)
    assert said(set_limits(entries, "q1", pending_most=5, messages_per_minute=60)) == ("duplicate", None)
    assert said(set_limits(entries, "q1", pending_most=6)) == ("rejected", "seq_conflict")
    row = set_limits(entries, "q2", bytes_per_minute=7).changes[0].row
    assert isinstance(row, LimitRow)
    assert (row.pending_most, row.messages_per_minute, row.bytes_per_minute) == (None, None, 7)
    assert set_limits(entries, "q1", scope="all", name="all").changes[0].key == "all/all"


@pytest.mark.requirement("LM-02")
@pytest.mark.parametrize(
    "wrong",
    [
        {"messages_per_minute": 0},
        {"pending_most": -1},
        {"scope": "all"},
        {"scope": "some"},
        {"bytes_most": 1.5},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        set_limits(Entries(), "q1", **wrong)
