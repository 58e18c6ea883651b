"""The ids that a mailbox remembers: for a week, in entries that stay small."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from schemas.fold.entries import Entries
from schemas.streams.mailboxes import mailbox_entries
from tests.schemas.job_records import START_US, said
from tests.schemas.mailbox_records import (
    HUB,
    a_claim,
    a_due,
    a_lease,
    a_reading,
    a_reclaim,
    at,
    mailbox_of,
    post_at,
    refused,
    row_of,
)

WEEK_US = 7 * 24 * 3600 * 1_000_000


def shard_of(message_id: str) -> str:
    """The entry that holds an id."""
    return f"id/{hashlib.sha256(message_id.encode()).hexdigest()[:3]}"


def test_the_ids_of_an_older_week_are_dropped_when_another_is_written() -> None:
    entries, shard = mailbox_of("m1"), shard_of("m1")
    at(0, a_claim("c1", by=HUB), entries)
    mate = next(f"x{n}" for n in range(100_000) if shard_of(f"x{n}") == shard)
    for offset_us, wanted in ((WEEK_US, {"m1", mate}), (2 * WEEK_US + 1, {mate})):
        post_at(offset_us, entries, mate)
        at(offset_us, a_claim(f"c{offset_us}", by=HUB), entries)
        assert set(msgspec.msgpack.decode(entries.stored()[shard])[1]) == wanted


@pytest.mark.requirement("ST-10")
def test_a_posting_writes_few_ids_of_many_and_knows_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_entries, "IDS_TOGETHER", 2)
    monkeypatch.setattr(mailbox_entries, "_LEAST_DIGITS", 1)
    entries = Entries()
    for n in range(400):
        post_at(n, entries, f"m{n}")
        written = {key: value for key, value in entries.take_writes().items() if key.startswith("id/")}
        ids = [set(msgspec.msgpack.decode(value)[1]) for value in written.values() if value is not None]
        assert f"m{n}" in set().union(*ids)
        assert sum(map(len, ids)) <= 3
    assert {said(post_at(n, entries, f"m{n}")) for n in range(400)} == {("duplicate", None)}


@pytest.mark.long
@pytest.mark.requirement("ST-13")
def test_ids_that_fold_version_9_wrote_are_known_and_are_split_by_the_next_posting() -> None:
    entries, shard = mailbox_of("m0"), shard_of("m0")
    stored = entries.stored()
    version, ids, _ = msgspec.msgpack.decode(stored[shard])
    mates = [f"x{n}" for n in range(400_000) if shard_of(f"x{n}") == shard][: mailbox_entries.IDS_TOGETHER + 1]
    old = [version, ids | dict.fromkeys(mates[1:], ids["m0"])]
    entries = Entries({**stored, shard: msgspec.msgpack.encode(old)})
    assert said(post_at(0, entries, mates[1])) == ("rejected", "seq_conflict")
    post_at(0, entries, mates[0])
    assert msgspec.msgpack.decode(entries.stored()[shard])[1:] == [{}, True]
    for known in ("m0", mates[0]):
        assert said(post_at(0, entries, known)) == ("duplicate", None)
    assert said(post_at(0, entries, mates[1])) == ("rejected", "seq_conflict")


def test_the_id_of_a_message_that_lies_there_longer_than_a_week_is_not_used_again() -> None:
    entries, shard = mailbox_of("m1"), shard_of("m1")
    mates = [f"x{n}" for n in range(20_000) if shard_of(f"x{n}") == shard]
    assert len(mates) > 1
    for mate in mates:
        assert said(post_at(2 * WEEK_US, entries, mate)) == ("accepted", None)
    assert said(post_at(2 * WEEK_US, entries)) == ("duplicate", None)
    assert refused(post_at(2 * WEEK_US, entries, body="other")) == ("seq_conflict", "unread")
    assert row_of(at(2 * WEEK_US, a_reading("m1", by=HUB), entries)).status == "read"
    assert refused(at(2 * WEEK_US, a_reading("m1"), entries)) == ("unknown_stream", None)


YEAR_US = 370 * 24 * 3600 * 1_000_000


@pytest.mark.requirement("ST-86")
def test_one_record_of_a_wrong_clock_moves_the_times_of_no_later_message() -> None:
    entries = mailbox_of("m1")
    assert row_of(post_at(YEAR_US, entries, "m2")).posted_at == START_US + YEAR_US
    assert row_of(post_at(10, entries, "m3")).posted_at == START_US + 10
    assert row_of(post_at(10, entries, "m4")).posted_at == START_US + 11
    # A clock of another broker that is a little ahead is none: the order of the log counts.
    ahead_us = 60_000_000
    post_at(ahead_us, entries, "m5")
    assert row_of(post_at(20, entries, "m6")).posted_at == START_US + ahead_us + 1


@pytest.mark.requirement("ST-86")
def test_the_id_of_a_message_of_a_wrong_clock_is_known_for_a_week_from_its_end_and_not_for_a_year() -> None:
    entries, shard = Entries(), shard_of("m1")
    mates = [f"x{n}" for n in range(100_000) if shard_of(f"x{n}") == shard][:3]
    # One message ends under the wrong clock, and one after it.
    for message_id in ("m1", mates[0]):
        post_at(YEAR_US, entries, message_id)
    at(YEAR_US, a_claim("c1", limit=1, by=HUB), entries)
    at(0, a_claim("c2", by=HUB), entries)
    for message_id in ("m1", mates[0]):
        assert said(post_at(0, entries, message_id)) == ("duplicate", None)
    post_at(10, entries, mates[1])
    post_at(2 * WEEK_US, entries, mates[2])
    assert set(msgspec.msgpack.decode(entries.stored()[shard])[1]) == {mates[1], mates[2]}
    assert said(post_at(2 * WEEK_US, entries, "m1")) == ("accepted", None)


@pytest.mark.requirement("ST-86")
def test_a_lease_and_a_delay_of_a_wrong_clock_end_with_it() -> None:
    entries = mailbox_of("m1")
    at(YEAR_US, a_lease("l1", lease_ms=60_000), entries)
    post_at(YEAR_US, entries, "m2", deliver_after_ms=1000)
    assert said(at(20, a_due("m2", ce_id="d1", by=HUB), entries)) == ("accepted", None)
    assert said(at(20, a_reclaim("m1", "l1", ce_id="r1", by=HUB), entries)) == ("accepted", None)
    at(30, a_lease("l2", lease_ms=86_400_000), entries)
    early = at(40, a_reclaim("m1", "l2", ce_id="r2", by=HUB), entries)
    assert refused(early) == ("illegal_transition", "leased")
